"""Trains LoRA adapters on a checkpoint that is stored in NVFP4, and publishes them merged.

    pip install transformers peft
    python examples/train_lora_quantized.py

The base is loaded as the checkpoint's own codes, about 0.6 bytes a weight, and stays frozen. The
adapters are published over the weights from which those codes were made: mf.restore_ puts them in
the place of the codes.
"""

import tempfile
from pathlib import Path

import minifloat as mf
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

STEPS = 30


def write_original(folder):
    """Writes a small model in bfloat16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def write_quantized(original, folder):
    """Writes the same model as servers read it: NVFP4 in the layout of compressed-tensors."""
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.bfloat16)
    mf.quantize_(model, "nvfp4_served", share_amax="servers")
    mf.export(model, folder)


def texts(seed):
    """Returns a batch of texts in which each token is the next number."""
    starts = torch.randint(64, (8, 1), generator=torch.Generator().manual_seed(seed))
    return (torch.arange(32) + starts) % 64


def train(model):
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    losses = []
    for step in range(STEPS):
        ids = texts(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
        losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        original, quantized = folder / "original", folder / "quantized"
        write_original(original)
        write_quantized(original, quantized)

        torch.manual_seed(1)
        config = AutoConfig.from_pretrained(original)
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        print(mf.load_quantized_(base, quantized, "bf16"))
        model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        train(model)

        up_proj = base.model.layers[0].mlp.up_proj
        adapter = up_proj.get_delta_weight("default")
        mf.restore_(model, original)  # the weights before they were quantized
        model.merge_and_unload().save_pretrained(folder / "published")

        before, after = (
            load_file(folder / name / "model.safetensors") for name in ("original", "published")
        )
        print("published keys equal:", before.keys() == after.keys())
        key = "model.layers.0.mlp.up_proj.weight"
        is_sum = torch.equal(after[key], (before[key] + adapter).to(torch.bfloat16))
        print("published weights are the original and the adapters:", is_sum)


if __name__ == "__main__":
    main()
