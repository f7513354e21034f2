"""Trains a small Llama, and exports it as servers of low precision read it.

    pip install transformers safetensors compressed-tensors
    python examples/export.py [recipe]

The folder has the codes that the training forward multiplied. transformers loads it by
compressed-tensors, and its weights then are the values of these codes. vLLM loads the same folder.
"""

import sys
import tempfile
import warnings

import minifloat as mf
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

RECIPE = sys.argv[1] if sys.argv[1:] else "nvfp4"
STEPS = 20


def build_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype=torch.bfloat16,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def counting_batch(step):
    """Returns texts in which each token is the next number."""
    starts = torch.arange(16)[:, None] * 4 + step
    return (torch.arange(32) + starts) % 64


def train(model):
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(STEPS):
        batch = counting_batch(step)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        mf.step(model)
        losses.append(loss.item())
    print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")


def values_of(model):
    """Returns the values of the codes of each converted layer."""
    values = {}
    for name, layer in model.named_modules():
        if isinstance(layer, mf.Linear):
            codes = mf.tensor.quantize(layer.weight.detach(), layer.recipe.fprop.b)
            values[f"{name}.weight"] = mf.tensor.dequantize(codes, torch.bfloat16)
    return values


def main():
    model = build_model()
    mf.quantize_(model, RECIPE)
    train(model)

    # Servers of NVFP4 cast activations by an amax that is known before.
    amaxes = None
    if RECIPE == "nvfp4":
        amaxes = mf.calibrate(model, [{"input_ids": counting_batch(i)} for i in range(4)])
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # q, k and v have tensor scales of their own: docs/serve.md
        mf.export(model, folder, amaxes=amaxes)
        served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = served(counting_batch(0)).logits  # the first forward decompresses the weights
    weights = served.state_dict()
    equal = all(torch.equal(weights[name], value) for name, value in values_of(model).items())
    print(f"served weights equal: {equal}")
    right = (logits[:, :-1].argmax(-1) == counting_batch(0)[:, 1:]).float().mean()
    print(f"next numbers that the served model knows: {right:.0%}")


if __name__ == "__main__":
    main()
