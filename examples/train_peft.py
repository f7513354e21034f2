"""Trains LoRA adapters with PEFT on a frozen base whose weights are codes only.

    pip install transformers peft
    python examples/train_peft.py

The base holds its weights as FP8 codes (primary=True), a byte for each of the two directions that
forward and backward read, and no high-precision copy. That is bf16's memory; nvfp4 takes half of
it. To merge adapters without a second rounding, mf.restore_ the base first.
"""

import tempfile
from pathlib import Path

import minifloat as mf
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 30


def build_base():
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
    base = LlamaForCausalLM(config)
    mf.quantize_(base, "fp8_tensorwise", primary=True)
    return base


def texts(seed):
    """Returns a batch of texts in which each token is the next number."""
    starts = torch.randint(64, (8, 1), generator=torch.Generator().manual_seed(seed))
    return (torch.arange(32) + starts) % 64


def main():
    base = build_base()
    torch.manual_seed(1)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=16, lora_alpha=32, target_modules=targets))
    codes = base.model.layers[0].mlp.up_proj.base_layer.weight.rowwise.codes.clone()

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
    after = base.model.layers[0].mlp.up_proj.base_layer.weight.rowwise.codes
    print("base unchanged:", torch.equal(codes, after))

    model.eval()
    ids = texts(STEPS)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        wanted = model(input_ids=ids).logits
        model.save_pretrained(folder)
        saved = load_file(Path(folder) / "adapter_model.safetensors")
        print("adapters only:", all("lora_" in name for name in saved))
        loaded = PeftModel.from_pretrained(build_base(), folder).eval()
        print("loaded adapters equal:", torch.equal(loaded(input_ids=ids).logits, wanted))

        # A merge into codes would round each weight again, so the base returns to high precision.
        mf.restore_(model)
        before = model(input_ids=ids).logits
        merged = model.merge_and_unload()
        error = (merged(input_ids=ids).logits - before).abs().max().item()
        print("merged equals adapters:", error < 1e-3)


if __name__ == "__main__":
    main()
