"""Casts and bare products of experts' rows on the GPU: parts of gpu_grouped.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import torch
from minifloat._native import ops
from minifloat.spec import Spec
from torch import Tensor

Shape = tuple[int, int, int, int]  # M, N, K, E
SHAPES: list[Shape] = [
    (32768, 8192, 5120, 2),
    (32768, 2048, 7168, 8),
    (16384, 4096, 4096, 8),
    (131072, 1536, 2048, 128),
]
CAST_SHAPE = (32768, 7168)
CASTS = ["e4m3/tensor", "e4m3/row", "e4m3/1x128", "mxfp8", "mxfp4", "nvfp4"]
GRADIENTS = [
    ("e5m2/tensor", "e5m2/tensor"),
    ("mxfp4+sr+rht", "mxfp4+sr+rht"),
    ("nvfp4+sr", "nvfp4+sr+rht"),
    ("nvfp4+pow2+sr", "nvfp4+pow2+sr+rht"),
]
CAST_BARS = {"8 even": 0.95, "64 uneven": 0.85, "a quarter": 1 / 1.1}


# ---- Groups --------------------------------------------------------------------------------------


def even_ends(rows: int, groups: int, device: torch.device) -> Tensor:
    sizes = torch.full((groups,), rows // groups)
    sizes[-1] += rows - int(sizes.sum())
    return sizes.cumsum(0).to(device, torch.int32)


def routed_ends(rows: int, groups: int, device: torch.device) -> Tensor:
    """Ends of a router's counts: skewed, unaligned, and with two groups empty where there are 4."""
    random = torch.Generator().manual_seed(7)
    load = torch.rand(groups, generator=random).pow(2) + 0.05
    if groups >= 4:
        load[[1, groups - 1]] = 0
    sizes = (load / load.sum() * rows).floor().long()
    sizes[load.argmax()] += rows - int(sizes.sum())
    return sizes.cumsum(0).to(device, torch.int32)


# ---- Casts ---------------------------------------------------------------------------------------


@dataclass
class CastRow:
    cast: str
    groups: str
    dense_tb_s: float
    tb_s: float
    bar: float


def cast_call(x: Tensor, row: str, col: str, table: Tensor | None) -> Callable[[], Any]:
    rng = torch.tensor([1, 2], device=x.device)
    return lambda: ops.quantize(x, row, col, rng=rng, groups=table)


def cast_tb_s(row: str, col: str, rows: int, used: int, ends: Tensor | None) -> float:
    """Times a cast. used: the rows that lie in groups."""
    device = torch.device("cuda") if ends is None else ends.device
    copies = timing.copies_of(2 * used * CAST_SHAPE[1], device)
    xs = [
        torch.randn(rows, CAST_SHAPE[1], device=device, dtype=torch.bfloat16) for _ in range(copies)
    ]
    table = None if ends is None else ops.group_table(ends, rows)
    out = ops.quantize(xs[0], row, col, rng=torch.tensor([1, 2], device=device), groups=table)
    written = sum(out[i].nbytes for i in (0, 1, 4, 5)) * used / rows
    ms = timing.kernel_ms([cast_call(x, row, col, table) for x in xs], device, 7)
    return (used * CAST_SHAPE[1] * 2 + written) / ms / 1e9


def measure_casts(device: torch.device, quick: bool) -> list[CastRow]:
    m = CAST_SHAPE[0]
    pairs = [*((spec, spec) for spec in CASTS), *GRADIENTS]
    rows = []
    for row, col in pairs[:2] if quick else pairs:
        for name, a, b in (("rowwise", row, ""), ("columnwise", "", col), ("both", row, col)):
            dense = cast_tb_s(a, b, m, m, None)
            for what, ends, length, used in (
                ("8 even", even_ends(m, 8, device), m, m),
                ("64 uneven", routed_ends(m, 64, device), m, m),
                ("a quarter", even_ends(m // 4, 8, device), m, m // 4),
            ):
                base = dense
                if what == "a quarter":  # against a buffer without a tail
                    base = cast_tb_s(a, b, used, used, ends)
                got = cast_tb_s(a, b, length, used, ends)
                label = f"{name} {a or b}" if not (a and b) else f"{name} {a}, {b}"
                rows.append(CastRow(label, what, base, got, CAST_BARS[what]))
    return rows


def print_casts(rows: list[CastRow]) -> bool:
    print(
        f"\ncasts of x {CAST_SHAPE[0]} x {CAST_SHAPE[1]}, bf16: TB/s, and a share of the dense cast"
        " (a quarter: of a buffer without a tail)"
    )
    met = True
    for r in rows:
        share = r.tb_s / r.dense_tb_s
        met = met and share >= r.bar
        print(
            f"{r.cast:44} {r.groups:10} {r.dense_tb_s:6.2f} {r.tb_s:6.2f} {share:6.1%} "
            f"{r.bar:5.0%}{'' if share >= r.bar else '  MISSED'}"
        )
    return met


# ---- Engines -------------------------------------------------------------------------------------


@dataclass
class EngineRow:
    shape: Shape
    product: str
    tflop_s: float
    dense_tflop_s: float


def fp8(rows: int, cols: int, device: torch.device) -> Tensor:
    return torch.randn(rows, cols, device=device).to(torch.float8_e4m3fn)


def measure_engines(shape: Shape, device: torch.device) -> list[EngineRow]:
    m, n, k, e = shape
    ends = even_ends(m, e, device)
    ones = lambda *size: torch.ones(*size, device=device)  # noqa: E731
    x, g = (torch.randn(m, c, device=device, dtype=torch.bfloat16) for c in (k, n))
    w = torch.randn(e, n, k, device=device, dtype=torch.bfloat16)
    x8, w8 = fp8(m, k, device), torch.randn(e, n, k, device=device).to(torch.float8_e4m3fn)
    xt, gt = fp8(k, m, device), fp8(n, m, device)
    flops = 2 * m * n * k / 1e9

    def rate(call: Callable[[], Any]) -> float:
        return flops / timing.kernel_ms([call] * 3, device, 5)

    dense = {
        fast: rate(
            lambda f=fast: torch._scaled_mm(
                x8, w8[0].t(), ones(m, 1), ones(1, n), out_dtype=torch.bfloat16, use_fast_accum=f
            )
        )
        for fast in (True, False)
    }
    dense_bf16 = rate(lambda: x @ w[0].t())
    rows = [
        EngineRow(
            shape,
            "bf16 along rows",
            rate(lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends)),
            dense_bf16,
        ),
        EngineRow(
            shape,
            "bf16 along the contraction",
            rate(lambda: torch._grouped_mm(g.t(), x, offs=ends)),
            dense_bf16,
        ),
    ]
    for fast in (True, False):
        name = "fast" if fast else "exact"
        along_rows = rate(
            lambda f=fast: torch._scaled_grouped_mm(
                x8,
                w8.transpose(1, 2),
                ones(m),
                ones(e, n),
                offs=ends,
                out_dtype=torch.bfloat16,
                use_fast_accum=f,
            )
        )
        along_k = rate(
            lambda f=fast: torch._scaled_grouped_mm(
                gt,
                xt.t(),
                ones(e * n),
                ones(e * k),
                offs=ends,
                out_dtype=torch.bfloat16,
                use_fast_accum=f,
            )
        )
        rows.append(EngineRow(shape, f"FP8 {name} along rows", along_rows, dense[fast]))
        rows.append(EngineRow(shape, f"FP8 {name} along the contraction", along_k, dense[fast]))
    return rows


def print_engines(rows: list[EngineRow]) -> None:
    print("\ntorch's grouped products, even groups: TFLOP/s, and a share of cuBLAS's dense product")
    for r in rows:
        print(f"{r.shape!s:28} {r.product:34} {r.tflop_s:7.0f} {r.tflop_s / r.dense_tflop_s:6.1%}")


# ---- Products ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Product:
    """A product of two operands, and the least shares of cuBLAS's dense product of its size."""

    text: str
    along_rows: bool
    even_bar: float | None = None
    uneven_bar: float | None = None
    decoded: bool = False  # multiplied as bf16 values

    def __str__(self) -> str:
        return f"{self.text} {'along rows' if self.along_rows else 'along the contraction'}"


_FP8 = ("e4m3/row*e4m3/row,fast", "e4m3/row*e4m3/row", "e5m2/tensor*e4m3/tensor")
PRODUCTS = [
    *(Product(text, True, 0.90, 0.75) for text in _FP8),
    *(Product(text, False, 0.85, 0.55) for text in _FP8),
    Product("e4m3/1x128*e4m3/128x128", True, 0.88, 0.75),
    Product("e4m3/1x128*e4m3/1x128", False, 0.80, 0.55),
    Product("mxfp8*mxfp8", True, decoded=True),
    Product("mxfp8*mxfp8", False, decoded=True),
]


@dataclass
class ProductRow:
    shape: Shape
    product: str
    groups: str
    tflop_s: float
    dense_tflop_s: float
    bar: float | None


def operand(x: Tensor, spec: str, product: Product, **groups: Any) -> list[Tensor]:
    """Returns elements, scale and amax of one operand, read along rows or along columns."""
    row = product.along_rows
    decoded = {"decoded_row": product.decoded and row, "decoded_col": product.decoded and not row}
    out = ops.quantize(x, *((spec, "") if row else ("", spec)), **decoded, **groups)
    codes, scale, amax, values = out[:4] if row else out[4:8]
    return [values if product.decoded else codes, scale, amax]


def product_call(product: Product, shape: Shape, ends: Tensor | None) -> Callable[[], Tensor]:
    """Returns a call of the product: with groups, or of dense operands where there are no ends."""
    m, n, k, e = shape
    device = torch.device("cuda") if ends is None else ends.device
    a_spec, b_spec = product.text.removesuffix(",fast").split("*")
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    groups: dict[str, Any] = {}
    if ends is not None:
        groups = {"groups": ops.group_table(ends, m)}
    unit = 0
    if product.along_rows:
        w = torch.randn(e, n, k, device=device, dtype=torch.bfloat16)
        a = operand(x, a_spec, product, **groups)
        b = operand(w if groups else w[0], b_spec, product)
    else:
        g = torch.randn(m, n, device=device, dtype=torch.bfloat16)
        if groups:
            unit = max(Spec.parse(spec).group_unit for spec in (a_spec, b_spec))
            groups["group_unit"] = unit
        a, b = (operand(v, s, product, **groups) for v, s in ((g, a_spec), (x, b_spec)))
    length = k if product.along_rows else m
    table = groups.get("groups")
    return lambda: ops.scaled_mm(*a, *b, product.text, k=length, groups=table, group_unit=unit)


def measure_products(shape: Shape, device: torch.device) -> list[ProductRow]:
    m, n, k, e = shape
    flops = 2 * m * n * k / 1e9
    rows = []
    for product in PRODUCTS:
        calls = {
            "dense": product_call(product, shape, None),
            "even": product_call(product, shape, even_ends(m, e, device)),
        }
        if shape == SHAPES[1]:
            uneven = (m, n, k, 64)
            calls["64 uneven"] = product_call(product, uneven, routed_ends(m, 64, device))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(5):  # in turns: the clock falls as the device warms
            for name, call in calls.items():
                times[name].append(timing.kernel_ms([call] * 2, device, 3))
        rate = {name: flops / statistics.median(ms) for name, ms in times.items()}
        for name, bar in (("even", product.even_bar), ("64 uneven", product.uneven_bar)):
            if name in rate:
                row = ProductRow(shape, str(product), name, rate[name], rate["dense"], bar)
                rows.append(row)
        del calls
        torch.cuda.empty_cache()
    return rows


def print_products(rows: list[ProductRow]) -> bool:
    print("\ngrouped products: TFLOP/s, and a share of the dense product of the run")
    met = True
    for r in rows:
        share = r.tflop_s / r.dense_tflop_s
        missed = r.bar is not None and share < r.bar
        met = met and not missed
        bar = "" if r.bar is None else f"{r.bar:.0%}"
        print(
            f"{r.shape!s:28} {r.product:46} {r.groups:10} {r.tflop_s:6.0f} {share:6.1%} "
            f"{bar:>4}{'  MISSED' if missed else ''}"
        )
    return met
