"""What each fused producer gains a training step: norms and feed-forwards, eager and compiled.

    python benchmarks/gpu_producers.py [--recipes fp8_tensorwise,…] [--ways compiled]

The model is gpu_blocks.py's, and so are the step and the peak. A row has one recipe in one way; its
columns are the ms and the GiB without fusion, and the change in per cent with fused norms, with
fused feed-forwards, and with both. Each is measured twice, in turn; the better of the two counts.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from unittest import mock

import _gpu_timing as timing  # first: it makes minifloat importable
import gpu_blocks
import minifloat as mf
import torch
from minifloat.nn.fuse import fusion
from torch import nn

RECIPES = "fp8_tensorwise,fp8_delayed,fp8_rowwise,fp8_blockwise,mxfp8,mxfp4,nvfp4,nvfp4_pow2"
PRODUCERS = {"none": (), "norms": ("norms",), "mlps": ("mlps",), "both": ("norms", "mlps")}
ROUNDS = 2
LARGE = (gpu_blocks.LAYERS, gpu_blocks.BATCH, gpu_blocks.TOKENS)


@contextlib.contextmanager
def fusing(parts: tuple[str, ...]) -> Iterator[None]:
    """Lets mf.quantize_(…, fuse=True) fuse these producers alone."""
    with contextlib.ExitStack() as stack:
        for part in PRODUCERS["both"]:
            if part not in parts:
                stack.enter_context(mock.patch.object(fusion, f"fuse_{part}", return_value=[]))
        yield


def build(sizes: gpu_blocks.Sizes, device: torch.device, recipe: str, producer: str) -> nn.Module:
    net = gpu_blocks.blocks(sizes, device)
    with fusing(PRODUCERS[producer]):
        mf.quantize_(net, recipe, fuse=producer != "none", verbose=False)
    return net


def measure(
    sizes: gpu_blocks.Sizes, device: torch.device, recipe: str, way: str
) -> dict[str, tuple[float, float]]:
    """Returns (ms, GiB) of each producer."""
    best: dict[str, tuple[float, float]] = {}
    net = nn.Module()
    for _ in range(ROUNDS):
        for producer in PRODUCERS:
            del net  # before the collection: layers of a feed-forward refer to each other
            timing.compile_each_shape()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            net = build(sizes, device, recipe, producer)
            row = gpu_blocks.measure(
                recipe, net, sizes, device, is_profiled=False, is_compiled=way == "compiled"
            )
            best[producer] = min((row.ms, row.peak_gib), best.get(producer, (row.ms, row.peak_gib)))
    return best


def main() -> int:
    parser = timing.arguments(__doc__, "gpu_producers.json")
    parser.add_argument("--recipes", default=RECIPES, help="%(default)s")
    parser.add_argument("--ways", default="compiled,eager", help="%(default)s")
    arguments = parser.parse_args()
    device = timing.require_device(arguments.device)
    sizes = gpu_blocks.Sizes(*(gpu_blocks.QUICK if arguments.quick else LARGE))
    print(
        f"{'recipe':16} {'way':9} {'ms':>8} {'GiB':>6}"
        + "".join(f"{p:>18}" for p in list(PRODUCERS)[1:])
    )
    rows = []
    for way in arguments.ways.split(","):
        for recipe in arguments.recipes.split(","):
            found = measure(sizes, device, recipe, way)
            ms, gib = found["none"]
            changes = "".join(
                f"{100 * (m / ms - 1):+9.1f}% ms {100 * (g / gib - 1) if gib else 0:+.1f}%"
                for m, g in list(found.values())[1:]
            )
            print(f"{recipe:16} {way:9} {ms:8.2f} {gib:6.2f} {changes}", flush=True)
            rows.append({"recipe": recipe, "way": way, "ms_and_gib": found})
    timing.write_json(arguments.out, device, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
