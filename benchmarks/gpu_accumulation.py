"""A micro-batch whose weight gradient is added to a float32 sum, in the product or after it.

    python benchmarks/gpu_accumulation.py [--quick] [--recipes fp8_rowwise,…] [--device cpu]

Forward and backward of one bf16 layer without bias, with cached weight codes, in eager mode.

    bf16      no sum: the gradient in bf16, as for one micro-batch a step
    added     the gradient in bf16, then main_grad.add_(grad)
    fused     accumulate="main_grad": the product adds

The product alone, and the bytes that it moves for the sum: `added` moves 12 bytes an element of W
(2 + 10), `fused` 8. The columns "saved" are 1 - fused / added, and what 4 bytes an element take at
the speed of a copy, where none of them is hidden behind the product's arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
from torch import Tensor, nn

SHAPES = [(4096, 4096), (4096, 14336), (8192, 8192)]  # K, N
TOKENS = (2048, 8192, 16384)
RECIPES = ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "fp8_rowwise_gw_hp", "mxfp4", "mxfp8"]
COPY_BYTES = 256 << 20
KINDS = ("bf16", "added", "fused")


def layer_of(recipe: str, kind: str, k: int, n: int, device: torch.device) -> nn.Module:
    layer = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
    accumulate = "main_grad" if kind == "fused" else None
    mf.quantize_(layer, recipe, accumulate=accumulate)
    layer.weight.main_grad = torch.zeros(n, k, device=device)  # type: ignore[attr-defined]
    return layer


def step_of(layer: Any, kind: str, x: Tensor, g: Tensor) -> Callable[[], None]:
    weight = layer.weight

    def step() -> None:
        layer(x).backward(g)
        if kind == "added":
            weight.main_grad.add_(weight.grad)
        weight.grad = x.grad = None

    return step


def measure(
    recipe: str, k: int, n: int, tokens: int, device: torch.device, rounds: int, bytes_per_ms: float
) -> dict[str, Any]:
    x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(tokens, n, device=device, dtype=torch.bfloat16)
    layers = {kind: layer_of(recipe, kind, k, n, device) for kind in KINDS}
    steps = {kind: step_of(layer, kind, x, g) for kind, layer in layers.items()}
    for _ in range(2):  # the codes of the weights are cached, and the kernels chosen
        for step in steps.values():
            step()
    ms = timing.medians_in_turns(steps, device, rounds, 4)
    return {
        "recipe": recipe, "k": k, "n": n, "tokens": tokens, **ms,
        "saved": 1 - ms["fused"] / ms["added"],
        "predicted": 4 * n * k / bytes_per_ms / ms["added"],
    }  # fmt: skip


def main() -> None:
    parser = timing.arguments(__doc__, "gpu_accumulation.json")
    parser.add_argument("--recipes", type=lambda s: s.split(","), default=RECIPES)
    options = parser.parse_args()
    device = timing.require_device(options.device)
    rounds, shapes = (3, SHAPES[:1]) if options.quick else (12, SHAPES)
    size = COPY_BYTES if device.type == "cuda" else 1 << 20
    bytes_per_ms = 2 * size / timing.copy_ms(size, device, 10)
    rows = []
    print("recipe, K x N, tokens | bf16 ms | added ms | fused ms | saved | by 4 bytes an element")
    for k, n in options.shapes or shapes:
        for tokens in TOKENS[:1] if options.quick else TOKENS:
            for recipe in options.recipes:
                row = measure(recipe, k, n, tokens, device, rounds, bytes_per_ms)
                rows.append(row)
                times = " | ".join(f"{row[kind]:.3f}" for kind in KINDS)
                shares = f"{timing.percent(row['saved'])} | {timing.percent(row['predicted'])}"
                print(f"{recipe}, {k} x {n}, {tokens} | {times} | {shares}", flush=True)
    timing.write_json(options.out, device, rows=rows)


if __name__ == "__main__":
    main()
