"""The least time of a linear layer's forward and backward.

floor = the three bare products of this device's engines + the fewest bytes of the casts at the
        speed of its copy
count = the FLOPs of the three products and the fewest bytes of the casts, at the rates of an H200.
        A weight matrix stays in the L2 cache from its amax to its cast

x, W, g     read once for their casts, and once more where an amax is needed first
codes       written by the casts; the reads of the products are in the products' times
values      written instead where no engine takes the codes: bf16 for an exact product, FP8 for
            FP4 of power-of-two scales; codes that are saved for backward are read again
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import _gpu_timing as timing
import minifloat as mf
import torch
from minifloat._native import ops
from minifloat.spec import Spec
from torch import Tensor

FP8_RATE, BF16_RATE = 1000e9, 650e9  # FLOPs a ms, of large products within a whole step
COPY_RATE = 4.1e9  # bytes a ms
L2_CACHE = 50 << 20  # bytes

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def family(spec: str) -> str:
    """Returns tensor, row, 1x128 or 128x128 of an FP8 spec; else ''."""
    parsed = Spec.parse(spec)
    if parsed.rule == "block":
        return "x".join(map(str, parsed.block))
    return parsed.rule if parsed.rule in ("tensor", "row") else ""


def multiplies_fp4_by_fp8(product: mf.recipe.Product) -> bool:
    """Tells whether an FP8 product by rows multiplies FP4 codes, converted."""
    specs = [Spec.parse(spec) for spec in (product.a, product.b)]
    has_fp4 = any(spec.is_fp4_by_powers_of_two for spec in specs)
    return has_fp4 and all(s.is_fp4_by_powers_of_two or s.rule == "row" for s in specs)


def value_bytes(product: mf.recipe.Product) -> int:
    """Returns the bytes an element of values that the product reads; 0: it reads the codes."""
    specs = (product.a, product.b)
    if all(Spec.parse(spec).is_bf16 for spec in specs) or all(family(spec) for spec in specs):
        return 0
    return 1 if multiplies_fp4_by_fp8(product) else 2


# ---- Bytes ---------------------------------------------------------------------------------------


def code_bytes(spec: str, rows: int, cols: int) -> int:
    """Returns the bytes of codes and scales of an operand read (rows, cols)."""
    code_cols, _, scale_rows, scale_cols = Spec.parse(spec).sizes(rows, cols)
    each = Spec.parse(spec).scale_dtype.itemsize
    return rows * code_cols + each * scale_rows * max(scale_cols, 1)


def amax_first(spec: str, columnwise: bool) -> bool:
    """Tells whether the values are read before the cast, for a tensor's amax or a column's."""
    parsed = Spec.parse(spec)
    if parsed.is_bf16 or parsed.is_delayed:
        return False
    return parsed.amax_of == "tensor" or (columnwise and parsed.amax_of == "row")


def cast_bytes(
    shape: tuple[int, int],
    row: mf.recipe.Product,
    row_spec: str,
    col: mf.recipe.Product,
    col_spec: str,
    saved: bool,
    stays: bool = False,
) -> int:
    """Counts the bytes of both directions' casts of a bf16 matrix.

    saved: whether the columnwise direction is read again in backward.
    stays: whether the matrix is in a cache after the read for an amax.
    """
    rows, cols = shape
    if Spec.parse(row_spec).is_bf16 and Spec.parse(col_spec).is_bf16:
        return 0
    total = 2 * rows * cols
    if not stays and (amax_first(row_spec, False) or amax_first(col_spec, True)):
        total *= 2
    for spec, product, (r, c), is_saved in (
        (row_spec, row, (rows, cols), False),
        (col_spec, col, (cols, rows), saved),
    ):
        if Spec.parse(spec).is_bf16:
            continue
        values = value_bytes(product) * r * c
        codes = code_bytes(spec, r, c)
        total += values + (2 * codes if is_saved else 0) if values else codes
    return total


def fewest_bytes(
    r: mf.Recipe, shape: tuple[int, int, int], experts: int = 1, has_cache: bool = False
) -> int:
    """Counts the bytes of the casts of x, W and g.   has_cache: whether one of W may stay in it."""
    m, k, n = shape
    stays = has_cache and 2 * n * k < L2_CACHE
    x = cast_bytes((m, k), r.fprop, r.fprop.a, r.wgrad, r.wgrad.b, saved=True)
    w = cast_bytes((experts * n, k), r.fprop, r.fprop.b, r.dgrad, r.dgrad.b, True, stays)
    g = cast_bytes((m, n), r.dgrad, r.dgrad.a, r.wgrad, r.wgrad.a, saved=False)
    return x + w + g


# ---- A count -------------------------------------------------------------------------------------


def counted_ms(recipe: mf.Recipe, shape: tuple[int, int, int], experts: int) -> tuple[float, float]:
    """Returns the ms of the products and of the casts, by the rates above."""
    m, k, n = shape
    three = recipe.fprop, recipe.dgrad, recipe.wgrad
    rates = [
        BF16_RATE
        if Spec.parse(p.a).is_bf16 or Spec.parse(p.b).is_bf16 or value_bytes(p) == 2
        else FP8_RATE
        for p in three
    ]
    products = sum(2 * m * n * k / rate for rate in rates)
    return products, fewest_bytes(recipe, shape, experts, has_cache=True) / COPY_RATE


# ---- Products ------------------------------------------------------------------------------------


def fp8_codes(spec: str, rows: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Makes codes of normal data and their scales, for ATen's products."""
    rng = torch.tensor([1, 2], device=device) if "+sr" in spec else None
    spec = spec.replace("+delayed", "")
    codes, scale, *_ = ops.quantize(
        torch.randn(rows, k, device=device).bfloat16(), spec, "", rng=rng
    )
    return codes.view(DTYPES[spec[:4]]), scale


def block_scale(spec: str, scale: Tensor) -> Tensor:
    """Lays out scales: 1x128 as (rows, L), rows adjacent; 128x128 as (L, rows), L adjacent.

    L is a multiple of 4 here.
    """
    return scale.t().contiguous().t() if family(spec) == "1x128" else scale.t()


def bare_product(
    product: mf.recipe.Product, m: int, n: int, k: int, device: torch.device
) -> Callable[[], object]:
    """Returns a call of the engine's product (m, k) · (n, k)ᵀ on prepared operands."""
    a_spec, b_spec = product.a, product.b
    if multiplies_fp4_by_fp8(product):
        a_spec = b_spec = "e4m3/row"
    if not (family(a_spec) and family(b_spec)) or device.type != "cuda":
        a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        b = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        return lambda: a @ b.t()
    a, a_scale = fp8_codes(a_spec, m, k, device)
    b, b_scale = fp8_codes(b_spec, n, k, device)
    if family(a_spec) in ("tensor", "row"):
        if family(a_spec) == "row":
            a_scale, b_scale = a_scale.view(-1, 1), b_scale.view(1, -1)
        return lambda: torch._scaled_mm(
            a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16, use_fast_accum=product.fast
        )
    from torch.nn.functional import ScalingType, scaled_mm

    kinds = {"1x128": ScalingType.BlockWise1x128, "128x128": ScalingType.BlockWise128x128}
    a_scale, b_scale = block_scale(a_spec, a_scale), block_scale(b_spec, b_scale)
    return lambda: scaled_mm(
        a, b.t(), a_scale, kinds[family(a_spec)], b_scale, kinds[family(b_spec)],
        output_dtype=torch.bfloat16,
    )  # fmt: skip


def product_ms(
    product: mf.recipe.Product, m: int, n: int, k: int, device: torch.device, repeats: int = 12
) -> float:
    call = bare_product(product, m, n, k, device)
    if device.type != "cuda":
        return timing.host_ms(call, 2)
    timing.event_ms(call, 3)
    return statistics.median(timing.event_ms(call, repeats))


def floor_ms(
    recipe: mf.Recipe,
    shape: tuple[int, int, int],
    device: torch.device,
    bytes_per_ms: float,
    experts: int = 1,
) -> float | None:
    """Returns the floor in ms; None, with the reason printed, where an engine refuses.

    experts: matrices of weights, of which each row of x has one; the products are dense.
    """
    m, k, n = shape
    sizes = ((recipe.fprop, (m, n, k)), (recipe.dgrad, (m, k, n)), (recipe.wgrad, (n, k, m)))
    try:
        products = sum(product_ms(product, *size, device) for product, size in sizes)
    except (RuntimeError, ValueError) as error:
        print(f"floor of {recipe}: no figure, {str(error).splitlines()[0]}")
        return None
    return products + fewest_bytes(recipe, shape, experts) / bytes_per_ms
