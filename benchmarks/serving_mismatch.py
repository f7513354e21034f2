"""How far log-probabilities of training are from those of a server, by recipe.

    python benchmarks/serving_mismatch.py [--steps 80] [--dim 256] [--seeds 1]

Reinforcement learning samples tokens from a server and trains on them by the log-probabilities of
the trainer. Where both compute alike, the mismatch

    k3 = mean(exp(d) - 1 - d),     d = log p_train(token) - log p_server(token)

over tokens that the server samples is 0 but for the order of sums. It is an unbiased estimate of
the KL divergence of the server's distribution from the trainer's.

A small Llama learns a random Markov chain of tokens: once in bf16, and once under each preset that
is made for a server. Its parameters are float32, its compute dtype is bfloat16 by autocast. The
server has the bfloat16 checkpoint's weights as codes, quantizes activations a token at a time, and
multiplies the dequantized values in float32; the head stays in bfloat16 on both sides. On two cores
of a CPU this takes a minute.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT)]  # the source tree's package, installed or not

import minifloat as mf  # noqa: E402

from tests.support.llama import Llama, ModelConfig, build_model, cross_entropy  # noqa: E402

VOCABULARY, SEQUENCE, BATCH = 64, 64, 16
DRAWS = 16  # tokens that the server samples at each position
# A server's formats of x and of W, and the preset that trains for it; None: there is none.
SERVERS = {
    "FP8, a scale a token and channel": ("e4m3/row+exact", "e4m3/row+exact", None),
    "FP8, blocks (DeepSeek-V3)": (
        "e4m3/1x128+exact",
        "e4m3/128x128+exact",
        "fp8_blockwise_served",
    ),
    "NVFP4, a scale a token": ("nvfp4/row", "nvfp4", "nvfp4_served"),
    "MXFP4 weights (gpt-oss)": ("bf16", "mxfp4", "mxfp4_weights_served"),
}


class ServedLinear(nn.Module):
    """A linear layer of a server: codes of W, and of x where its spec is not bf16."""

    def __init__(self, layer: nn.Linear, x_spec: str, w_spec: str) -> None:
        super().__init__()
        weight = layer.weight.detach().bfloat16()
        self.x_spec, self.values = x_spec, mf.tensor.quantize(weight, w_spec).dequantize()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.bfloat16().reshape(-1, x.shape[-1])
        if self.x_spec != "bf16":
            rows = mf.tensor.quantize(rows, self.x_spec).dequantize()
        with torch.autocast("cpu", enabled=False):
            y = (rows.float() @ self.values.t()).bfloat16()
        return y.view(*x.shape[:-1], -1)


def served(model: Llama, x_spec: str, w_spec: str) -> Llama:
    """Returns a copy of a trained model as a server runs it: its blocks' layers quantized."""
    out = copy.deepcopy(model)
    if any(isinstance(module, mf.Linear) for module in out.modules()):
        mf.restore_(out)
    for module in list(out.layers.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, ServedLinear(child, x_spec, w_spec))
    return out


def sampler(seed: int) -> Callable[[int], Tensor]:
    """Returns what draws sequences of a random Markov chain, by a number."""
    generator = torch.Generator().manual_seed(seed)
    chain = (2.5 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)).softmax(-1)

    def draw(number: int) -> Tensor:
        random = torch.Generator().manual_seed(seed * 100_003 + number)
        tokens = torch.randint(0, VOCABULARY, (BATCH, 1), generator=random)
        for _ in range(SEQUENCE):
            p = chain[tokens[:, -1]]
            tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=random)], 1)
        return tokens

    return draw


def trained(recipe: str, config: ModelConfig, steps: int, seed: int) -> tuple[Llama, float]:
    """Trains a model, and returns it and its last loss."""
    model, draw = build_model(config, SEQUENCE, seed, "cpu"), sampler(seed)
    if recipe != "bf16":
        mf.quantize_(model, recipe, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.zeros(())
    for step in range(steps):
        tokens = draw(step)
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mf.step(model)
    return model, loss.item()


@torch.no_grad()
def mismatch(model: Llama, server: Llama, seed: int) -> float:
    """Returns k3 over tokens that the server samples after sequences of the data."""
    tokens = sampler(seed)(10_000)[:, :-1]
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (m(tokens).double().log_softmax(-1) for m in (model, server))
    random = torch.Generator().manual_seed(seed)
    p = theirs.exp().flatten(0, -2)
    drawn = torch.multinomial(p, DRAWS, replacement=True, generator=random)
    d = (ours - theirs).flatten(0, -2).gather(1, drawn)
    return (torch.expm1(d) - d).mean().item()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=80, help="of training")
    parser.add_argument("--dim", type=int, default=256, help="width of the model")
    parser.add_argument("--seeds", type=int, default=1, help="of model and data")
    options = parser.parse_args()
    config = ModelConfig(options.dim, 2, 4, 2, 2 * options.dim, VOCABULARY)
    presets = [preset for *_, preset in SERVERS.values() if preset]
    found: dict[tuple[str, str], list[float]] = {}
    for seed in range(options.seeds):
        for recipe in ("bf16", *presets):
            model, loss = trained(recipe, config, options.steps, seed)
            print(f"seed {seed}, {recipe}: loss {loss:.4f}", flush=True)
            for name, (x_spec, w_spec, preset) in SERVERS.items():
                if recipe in ("bf16", preset):
                    k3 = mismatch(model, served(model, x_spec, w_spec), seed)
                    found.setdefault((name, recipe), []).append(k3)
    print("\n| server | trained in bf16: k3 | preset | trained under it: k3 |\n|---|---|---|---|")
    for name, (*_, preset) in SERVERS.items():
        usual = mean(found[name, "bf16"])
        alike = f"`{preset}` | {mean(found[name, preset]):.1e}" if preset else "- | -"
        print(f"| {name} | {usual:.1e} | {alike} |")
    return 0


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


if __name__ == "__main__":
    sys.exit(main())
