"""Products of quantized operands on the GPU against the bare engine and torch's bf16 product.

    python benchmarks/gpu_products.py [--quick] [--shapes 8192x8192x8192,…]     M x N x K

Each product of the presets runs by the library's op, on operands quantized before. Where an engine
takes the codes, the bar is the bare call. An exact product decodes first, so its bar is the bf16
product. Of the fastest product of its kind in the run, each has at least 80%. The calls run
alternately; medians of device time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
from _linear_floor import bare_product, family, value_bytes
from torch import Tensor

SHAPES = [(8192, 8192, 8192), (16384, 14336, 4096)]
BF16 = mf.Recipe("bf16").fprop
OF_BARE = 0.97  # of the bare call's speed, where an engine takes the codes
OF_BF16 = 0.85  # of the bf16 product's, decoding included
OF_FASTEST = 0.80  # of the fastest of its kind


@dataclass
class Row:
    product: str
    shape: str
    us: float
    tflops: float
    of: str  # the call to compare with
    fraction: float
    bar: float
    kind: str
    of_fastest: float = 1.0


def kind_of(product: mf.recipe.Product) -> str:
    """Returns what products are compared by: the numbers that are multiplied, and their sums."""
    if value_bytes(product) == 2:
        return "exact, decoded to bf16"
    if "x" in family(product.a):
        return "FP8 in blocks"
    return "FP8, fast sums" if product.fast else "FP8"


def products_of_presets() -> list[mf.recipe.Product]:
    """Lists each product once, in the presets' order."""
    found: dict[str, mf.recipe.Product] = {}
    for name in mf.presets():
        recipe = mf.Recipe(name)
        for product in (recipe.fprop, recipe.dgrad, recipe.wgrad):
            delayed = any("+delayed" in spec for spec in (product.a, product.b))
            if product.a != "bf16" and not delayed:
                found.setdefault(str(product), product)
    return list(found.values())


def library_product(
    product: mf.recipe.Product, m: int, n: int, k: int, device: torch.device
) -> Callable[[], Tensor]:
    def operand(spec: str, rows: int) -> mf.tensor.Quantized:
        return mf.tensor.quantize(torch.randn(rows, k, device=device).bfloat16(), spec)

    a, b = operand(product.a, m), operand(product.b, n)
    return lambda: mf.tensor.scaled_mm(a, b, fast=product.fast)


def rows_of(shape: tuple[int, int, int], device: torch.device, repeats: int) -> list[Row]:
    m, n, k = shape
    flop = 2 * m * n * k
    rows = []
    for product in products_of_presets():
        reads_codes = value_bytes(product) < 2
        bare = bare_product(product if reads_codes else BF16, m, n, k, device)
        ours = library_product(product, m, n, k, device)
        times: dict[str, list[float]] = {"bare": [], "ours": []}
        for _ in range(3):  # alternately
            for name, call in (("bare", bare), ("ours", ours)):
                times[name] += measure(call, device, repeats)
        ms = {name: statistics.median(t) for name, t in times.items()}
        rows.append(
            Row(
                str(product),
                f"{m}x{n}x{k}",
                1e3 * ms["ours"],
                flop / ms["ours"] / 1e9,
                "the bare call" if reads_codes else "bf16",
                ms["bare"] / ms["ours"],
                OF_BARE if reads_codes else OF_BF16,
                kind_of(product),
            )
        )
    for row in rows:
        row.of_fastest = row.tflops / max(r.tflops for r in rows if r.kind == row.kind)
    return rows


def measure(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    if device.type != "cuda":
        return [timing.host_ms(call, 1)]
    return timing.event_ms(call, repeats + 1)[1:]


def print_rows(rows: list[Row]) -> None:
    width = max(len(row.product) for row in rows)
    print(f"\n{rows[0].shape}\n{'product':{width}}       us  TFLOP/s  speed")
    for row in rows:
        verdict = "" if row.fraction >= row.bar else ", missed"
        slow = "" if row.of_fastest >= OF_FASTEST else ", missed"
        print(
            f"{row.product:{width}} {row.us:8.1f} {row.tflops:8.0f}  "
            f"{timing.percent(row.fraction)} of {row.of} (bar {timing.percent(row.bar)}{verdict}), "
            f"{timing.percent(row.of_fastest)} of the fastest {row.kind}{slow}"
        )


def main() -> int:
    parser = timing.arguments(__doc__, "gpu_products.json")
    options = parser.parse_args()
    device = timing.require_device(options.device)
    shapes = options.shapes or SHAPES[: 1 if options.quick else None]
    print(f"{timing.device_name(device)}, torch {torch.__version__}")
    rows: list[Row] = []
    for shape in shapes:
        found = rows_of(shape, device, repeats=4 if options.quick else 10)
        print_rows(found)
        rows += found
    timing.write_json(options.out, device, rows=[asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
