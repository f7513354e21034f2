"""The time of a forward pass that quantizes its weight, beside one with cached weight codes.

    python benchmarks/gpu_weight_codes.py [--quick] [--device cpu]

On a GPU codes are reused only in the micro-batches of a training step (operand_cache.py), so every
forward of an evaluation takes the longer time. torch's bf16 layer of the same run is the reference.
On a CPU the table also has the time of the weight's fingerprint, which each reuse there compares.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
from minifloat._native import ops
from minifloat.nn.cache import operand_cache as reuse

SHAPES = [(4096, 4096), (8192, 8192)]  # K, N
TOKENS = (256, 4096, 16384)
RECIPES = [r for r in mf.presets() if r not in ("bf16", "fp8_delayed")]


def measure(
    recipe: str, k: int, n: int, tokens: int, device: torch.device, repeats: int
) -> dict[str, Any]:
    x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16)
    w = torch.randn(n, k, device=device, dtype=torch.bfloat16) / k**0.5
    codes = ops.layer_operands.default(w, recipe, "w", columnwise=False)
    rng = torch.zeros(3, dtype=torch.int64, device=device)

    def forward(given: Any) -> Callable[[], object]:
        return lambda: ops.linear.default(x, w, None, recipe, rng=rng, weight_operands=given)

    row = {
        "bf16": timing.kernel_ms([lambda: torch.nn.functional.linear(x, w)], device, repeats),
        "anew": timing.kernel_ms([forward(None)], device, repeats),
        "codes": timing.kernel_ms([forward(codes)], device, repeats),
    }
    if device.type == "cpu":
        proof = reuse.fingerprint_of(w)
        row["fingerprint"] = timing.host_ms(lambda: proof.matches(w), repeats)
    speeds = {"speed": row["bf16"] / row["anew"], "cached_speed": row["bf16"] / row["codes"]}
    return {"recipe": recipe, "k": k, "n": n, "tokens": tokens, **row, **speeds}


@torch.no_grad()
def main() -> None:
    options = timing.arguments(__doc__, "gpu_weight_codes.json").parse_args()
    device = timing.require_device(options.device)
    repeats, shapes = (5, SHAPES[:1]) if options.quick else (20, SHAPES)
    rows = []
    print("recipe, K x N, tokens | bf16 ms | weight anew | weight's codes | anew / codes | of bf16")
    for k, n in options.shapes or shapes:
        for tokens in TOKENS:
            for recipe in RECIPES:
                row = measure(recipe, k, n, tokens, device, repeats)
                rows.append(row)
                more = f" | {row['fingerprint']:.3f}" if "fingerprint" in row else ""
                print(
                    f"{recipe}, {k} x {n}, {tokens} | {row['bf16']:.4f} | {row['anew']:.4f} | "
                    f"{row['codes']:.4f} | {row['anew'] / row['codes']:.2f} | "
                    f"{row['speed']:.2f}, {row['cached_speed']:.2f}{more}"
                )
    timing.write_json(options.out, device, rows=rows)


if __name__ == "__main__":
    main()
