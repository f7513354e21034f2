"""What feed-forwards that are one op gain a training step, eager and compiled.

    python benchmarks/gpu_fuse.py [--recipes fp8_tensorwise,…] [--ways compiled]

The model is gpu_blocks.py's, and so are the step and the peak. A row has one recipe in one way; its
columns are the ms and the GiB without fusion, and the change in per cent with fuse=True. Each is
measured twice, in turn; the better of the two counts.
"""

from __future__ import annotations

import gc
import sys

import _gpu_timing as timing  # first: it makes minifloat importable
import gpu_blocks
import minifloat as mf
import torch
from torch import nn

RECIPES = "fp8_tensorwise,fp8_delayed,fp8_rowwise,fp8_blockwise,mxfp8,mxfp4,nvfp4,nvfp4_pow2"
ROUNDS = 2
LARGE = (gpu_blocks.LAYERS, gpu_blocks.BATCH, gpu_blocks.TOKENS)


def build(sizes: gpu_blocks.Sizes, device: torch.device, recipe: str, fuse: bool) -> nn.Module:
    net = gpu_blocks.blocks(sizes, device)
    mf.quantize_(net, recipe, fuse=fuse)
    return net


def measure(
    sizes: gpu_blocks.Sizes, device: torch.device, recipe: str, way: str
) -> list[tuple[float, float]]:
    """Returns (ms, GiB) without and with fuse=True."""
    best: dict[bool, tuple[float, float]] = {}
    net = nn.Module()
    for _ in range(ROUNDS):
        for fuse in (False, True):
            del net
            timing.compile_each_shape()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            net = build(sizes, device, recipe, fuse)
            row = gpu_blocks.measure(
                recipe, net, sizes, device, is_profiled=False, is_compiled=way == "compiled"
            )
            best[fuse] = min((row.ms, row.peak_gib), best.get(fuse, (row.ms, row.peak_gib)))
    return [best[False], best[True]]


def main() -> int:
    parser = timing.arguments(__doc__, "gpu_fuse.json")
    parser.add_argument("--recipes", default=RECIPES, help="%(default)s")
    parser.add_argument("--ways", default="compiled,eager", help="%(default)s")
    arguments = parser.parse_args()
    device = timing.require_device(arguments.device)
    sizes = gpu_blocks.Sizes(*(gpu_blocks.QUICK if arguments.quick else LARGE))
    print(f"{'recipe':16} {'way':9} {'ms':>8} {'GiB':>6} {'fuse=True':>18}")
    rows = []
    for way in arguments.ways.split(","):
        for recipe in arguments.recipes.split(","):
            found = measure(sizes, device, recipe, way)
            (ms, gib), (fused_ms, fused_gib) = found
            memory = 100 * (fused_gib / gib - 1) if gib else 0
            change = f"{100 * (fused_ms / ms - 1):+9.1f}% ms {memory:+.1f}%"
            print(f"{recipe:16} {way:9} {ms:8.2f} {gib:6.2f} {change}", flush=True)
            rows.append({"recipe": recipe, "way": way, "ms_and_gib": found})
    timing.write_json(arguments.out, device, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
