"""Trains a small Llama, and exports it as servers of low precision read it.

    pip install transformers safetensors compressed-tensors
    python examples/export.py

The folder has the codes that the training forward multiplied. transformers loads it by
compressed-tensors, and its weights then are the values of these codes; some are rounded to the next
bf16 number, as compressed-tensors joins the two scales first. vLLM loads the same folder: it
joins q, k and v, and gate and up, so these share an amax in training.
"""

import tempfile

import minifloat as mf
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

RECIPE = mf.Recipe("nvfp4")
STEPS = 20
JOINED = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


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
    """Returns the values of the codes of each layer: its rows of the matrix that servers join."""
    values = {}
    for i, block in enumerate(model.model.layers):
        for names in JOINED:
            weights = [block.get_submodule(name).weight.detach() for name in names]
            codes = mf.tensor.quantize(torch.cat(weights), RECIPE.fprop.b)
            rows = mf.tensor.dequantize(codes, torch.bfloat16).split([len(w) for w in weights])
            values |= {f"model.layers.{i}.{n}.weight": value for n, value in zip(names, rows)}
    return values


def main():
    model = build_model()
    mf.quantize_(model, RECIPE, share_amax="servers")
    train(model)

    # Servers of NVFP4 cast activations by an amax that is known before.
    amaxes = mf.calibrate(model, [{"input_ids": counting_batch(i)} for i in range(4)])
    with tempfile.TemporaryDirectory() as folder:
        mf.export(model, folder, amaxes=amaxes)
        served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        logits = served(counting_batch(0)).logits  # the first forward decompresses the weights
    weights = served.state_dict()
    place = torch.finfo(torch.bfloat16).eps  # from a bf16 number to the next one
    equal = all(
        torch.allclose(weights[name], value, rtol=place, atol=0)
        for name, value in values_of(model).items()
    )
    print(f"served weights are the codes' values: {equal}")
    right = (logits[:, :-1].argmax(-1) == counting_batch(0)[:, 1:]).float().mean()
    print(f"next numbers that the served model knows: {right:.0%}")


if __name__ == "__main__":
    main()
