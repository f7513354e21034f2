"""MX and NVFP4 as block-scaled tensor cores read them: the CPU's operands to the byte, and the
exact product's values. Where a GPU has no such engine, the product is another's, and as close."""

from __future__ import annotations

from typing import Any

import minifloat as mf
import pytest
import torch
from minifloat._native import ops

from tests.gpu.layer_cases import require_close
from tests.support.same_bits import require_same

pytestmark = pytest.mark.gpu

PRODUCTS = [
    ("mxfp8", "mxfp8"),
    ("mxfp8", "mxfp8/32x32"),
    ("mxfp8/e5m2", "mxfp8"),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4/16x16"),
    ("nvfp4+pow2", "nvfp4+pow2"),
    ("nvfp4+rht", "nvfp4+rht"),
]
SIZES = [(1, 16, 32), (33, 48, 96), (130, 272, 544), (256, 384, 512)]


def operands(a_spec: str, b_spec: str, m: int, n: int, k: int) -> list[mf.tensor.Quantized]:
    """Draws normal data in blocks of magnitudes from 2^-4 to 2^4."""
    g = torch.Generator().manual_seed(m)
    sides = []
    for spec, rows in ((a_spec, m), (b_spec, n)):
        size = torch.exp2(torch.randint(-4, 5, (rows, k // 16), generator=g)).repeat_interleave(
            16, 1
        )
        sides.append(mf.tensor.quantize(torch.randn(rows, k, generator=g) * size, spec))
    return sides


def moved(q: mf.tensor.Quantized, device: torch.device) -> mf.tensor.Quantized:
    codes, scale, amax = (t.to(device) for t in (q.codes, q.scale, q.amax))
    return mf.tensor.Quantized(codes, scale, amax, q.spec, q.shape)


@pytest.mark.parametrize(("a_spec", "b_spec"), PRODUCTS)
def test_operands(device, a_spec, b_spec):
    for m, n, k in SIZES:
        for q in operands(a_spec, b_spec, m, n, k):
            there = moved(q, device)
            codes, scales, *of_scales = ops.block_scaled_operand(
                there.codes, there.scale, there.amax, q.spec, k
            )
            want_codes, want_scales, *want_of_scales = ops.block_scaled_operand(
                q.codes, q.scale, q.amax, q.spec, k
            )
            assert of_scales == want_of_scales
            pairs = zip([codes, *scales], [want_codes, *want_scales], strict=True)
            for got, want in pairs:
                assert got.dtype == want.dtype
                got, want = (t.reshape(-1).view(torch.uint8) for t in (got, want))
                require_same(got, want, f"{q.spec} {m}x{n}x{k}")


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("a_spec", "b_spec"), PRODUCTS)
def test_products_are_the_exact_ones(device, a_spec, b_spec, out_dtype, with_bias):
    """Compares products of equal values.

    Tensor cores may cut products at 2^-13 of the largest of a sum, and bf16 rounds at 2^-9. A wrong
    scale, row or factor errs by 100%."""
    for m, n, k in SIZES:
        sides = operands(a_spec, b_spec, m, n, k)
        g = torch.Generator().manual_seed(n)
        bias = torch.randn(n, generator=g).to(out_dtype) if with_bias else None
        want = mf.tensor.scaled_mm(*sides, bias=bias, out_dtype=out_dtype)
        bias = bias.to(device) if bias is not None else None
        got = mf.tensor.scaled_mm(
            *(moved(q, device) for q in sides), bias=bias, out_dtype=out_dtype
        )
        require_close(got, want, 2.0**-8, f"{a_spec}*{b_spec} {m}x{n}x{k}")


ENDS = [0, 1, 18, 18, 50, 65, 194, 194]  # the first, the last and one group within are empty


def grouped_call(spec: str, along_rows: bool) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Makes the operands of a product of groups among 207 rows, on the CPU."""
    g = torch.Generator().manual_seed(len(spec))
    table = mf.tensor.group_table(torch.tensor(ENDS, dtype=torch.int32), 207)
    shapes = [(207, 96), (len(ENDS), 48, 96)] if along_rows else [(207, 130), (207, 48)]
    sides: list[torch.Tensor] = []
    for shape in shapes:
        groups = {} if len(shape) == 3 else {"groups": table}
        x = torch.randn(shape, generator=g)
        q = mf.tensor.quantize(x, spec, columnwise=not along_rows, **groups)
        sides += [q.codes, q.scale, q.amax]
    where = {"k": 96 if along_rows else 207, "group_unit": 0 if along_rows else q.group_unit}
    return sides, {**where, "groups": table}


@pytest.mark.parametrize("along_rows", [True, False])
@pytest.mark.parametrize("spec", ["mxfp8", "mxfp4", "nvfp4"])
def test_groups(device, spec, along_rows):
    sides, where = grouped_call(spec, along_rows)
    there = [t.to(device) for t in sides], {**where, "groups": where["groups"].to(device)}
    product = f"{spec}*{spec}"
    pairs = zip(
        *(
            torch.utils._pytree.tree_leaves(ops.block_scaled_grouped_operands(*a, product, **w))
            for a, w in (there, (sides, where))
        ),
        strict=True,
    )
    for got, want in pairs:
        if not isinstance(got, torch.Tensor):
            assert got == want
            continue
        assert (got.dtype, got.stride()) == (want.dtype, want.stride())
        if got.element_size() == 1:  # torch copies no FP4 tensor of other strides
            got, want = got.view(torch.uint8), want.view(torch.uint8)
        require_same(got, want, spec)
    want = ops.scaled_mm(*sides, product, **where, zero_tail=True)
    got = ops.scaled_mm(*there[0], product, **there[1], zero_tail=True)
    require_close(got, want, 2.0**-8, f"{product} of groups")


@pytest.mark.parametrize("spec", ["mxfp8", "mxfp4", "nvfp4"])
def test_a_nan_is_in_every_output_that_reads_it(device, spec):
    x, w = torch.ones(64, 128), torch.ones(48, 128)
    x[3, 40], x[7, 127] = float("nan"), float("inf")
    got = mf.tensor.scaled_mm(*(moved(mf.tensor.quantize(t, spec), device) for t in (x, w))).cpu()
    rows = [3, 7] if spec.startswith("mx") else range(64)  # NVFP4's tensor scale is NaN
    want = torch.full((64, 48), 128.0)
    for row in rows:
        want[row] = float("nan")
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[~got.isnan()], want[~want.isnan()].bfloat16())
