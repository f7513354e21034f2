"""mf.tensor.scaled_mm against a product in float64 of the dequantized operands."""

import sys
from types import SimpleNamespace

import minifloat as mf
import pytest
import torch
from minifloat._native import ops

from tests.support.exact_sums import require_same_sums

scaled_mm = sys.modules["minifloat.tensor.scaled_mm"]  # mf.tensor.scaled_mm is the function
M, K, N = 45, 70, 37
PRODUCTS = [
    ("e4m3/tensor", "e4m3/tensor"),
    ("e5m2/tensor", "e4m3/row"),
    ("e4m3/row+exact", "e4m3/row+exact"),
    ("e4m3/1x128", "e4m3/128x128"),
    ("e4m3/1x128+exact", "e4m3/128x128+exact"),
    ("nvfp4/row", "nvfp4/16x16"),
    ("nvfp4/row+sr+rht", "nvfp4/row+rht"),
    ("e4m3/1x128+exact", "nvfp4/row"),
    ("mxfp8", "mxfp8/32x32"),
    ("nvfp4", "nvfp4/16x16"),
    ("nvfp4+sr+rht", "nvfp4+rht"),
    ("mxfp4", "nvfp4+up"),
    ("nvfp4", None),
    (None, "mxfp8"),
]


def operand(rows, spec, columnwise, seed):
    torch.manual_seed(seed)
    x = torch.randn(rows, K)
    if spec is None:
        return x.bfloat16(), x.bfloat16().double()
    if columnwise:
        q = mf.tensor.quantize(x.t().contiguous(), spec, columnwise=True, seed=seed)
    else:
        q = mf.tensor.quantize(x, spec, seed=seed)
    return q, q.dequantize().double()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize(("a_spec", "b_spec"), PRODUCTS)
def test_product(a_spec, b_spec, columnwise, out_dtype):
    a, a_values = operand(M, a_spec, columnwise, 1)
    b, b_values = operand(N, b_spec, columnwise, 2)
    bias = torch.randn(N, dtype=out_dtype)
    y = mf.tensor.scaled_mm(a, b, bias=bias, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    want = a_values @ b_values.t() + bias.double()
    # fp32 sums of 80 products and NVFP4's three scale roundings; bf16: one rounding of the result
    magnitude = a_values.abs() @ b_values.abs().t() + bias.abs().double()
    bound = 96 * 2.0**-23 * magnitude
    if out_dtype == torch.bfloat16:
        bound += 2.0**-8 * want.abs()
    assert ((y.double() - want).abs() <= bound).all()


# ---- FP4 as FP8 ---------------------------------------------------------------------------------

FP4_SPECS = ["mxfp4", "nvfp4+pow2", "nvfp4/16x16+pow2", "mxfp4+sr+rht", "nvfp4+pow2+rht32"]
FP4_SPECS += ["e1m2/1x32", "e1m2/1x16+pow2", "e1m2/16x16+pow2", "e1m2/1x16+pow2+sr+rht"]


def fp4_as_fp8(q):
    return ops.fp4_as_fp8(q.codes, q.scale, q.amax, q.spec, q.shape[-1])


@pytest.mark.parametrize("spec", FP4_SPECS)
def test_fp4_as_fp8_has_the_same_values(spec):
    """Casts normal data, in which no block is 2^14 below the largest of its row."""
    for columnwise in (False, True):
        q = mf.tensor.quantize(torch.randn(M, K), spec, columnwise=columnwise, seed=3)
        codes, row_scale = fp4_as_fp8(q)
        assert codes.dtype == torch.float8_e4m3fn
        assert torch.equal(codes.float() * row_scale[:, None], q.dequantize())


@pytest.mark.parametrize("spec", FP4_SPECS)
def test_fp4_as_fp8_of_blocks_far_apart(spec):
    """Checks exact values from 2^-14 of a row's largest block scale on; below, within 2^-16.

    Of E1M2 from 2^-15 on, and below within 2^-18.
    """
    most, top, binades = (1.75, 8, 15) if spec.startswith("e1m2") else (6, 6, 14)
    torch.manual_seed(0)
    x = torch.randn(M, 256) * 2.0 ** torch.randint(-30, 30, (M, 16)).repeat_interleave(16, 1)
    q = mf.tensor.quantize(x, spec, seed=3)
    codes, row_scale = fp4_as_fp8(q)
    values, got = q.dequantize().double(), (codes.float() * row_scale[:, None]).double()
    largest = 2.0**top * row_scale.double()[:, None]  # 2^K times the tensor's scale
    assert ((got - values).abs() <= 2.0 ** (-10 - top) * largest * (1 + 2.0**-20)).all()
    exact = values.abs() >= most * 2.0**-binades * largest
    assert exact.any()
    assert torch.equal(got[exact], values[exact])


@pytest.mark.parametrize("spec", FP4_SPECS)
def test_product_of_fp4_as_fp8_operands(spec):
    """Checks the exact product, which runs without an FP8 engine: equal values under row factors.

    The bound has four roundings more than the sums: two row factors, the product of the tensor
    factors, and its multiplication with the sum or with each term.
    """
    a, b = (mf.tensor.quantize(torch.randn(rows, K), spec, seed=rows) for rows in (M, N))
    want = mf.tensor.scaled_mm(a, b, out_dtype=torch.float32)
    args = [(*fp4_as_fp8(q), q.amax) for q in (a, b)]
    got = ops.scaled_mm(*args[0], *args[1], f"{spec}*{spec}", k=K, out_dtype=torch.float32)
    left, right = ((codes.float() * scale[:, None]).abs() for codes, scale, _ in args)
    require_same_sums(got, want, left @ right.t(), left.shape[1], roundings=4)
    with pytest.raises(ValueError, match="row scales"):
        ops.scaled_mm(args[0][0], a.scale, a.amax, *args[1], f"{spec}*{spec}", k=K)


@pytest.mark.parametrize("spec", ["nvfp4", "nvfp4+up", "e1m2/1x16", "mxfp8", "e4m3/row"])
def test_only_powers_of_two_convert_to_fp8(spec):
    q = mf.tensor.quantize(torch.ones(4, 32), spec)
    with pytest.raises(ValueError, match="powers of two"):
        fp4_as_fp8(q)


def test_fp4_as_fp8_of_rows_that_are_not_finite():
    x = torch.randn(4, 64)
    x[1, 40], x[2, 3] = float("nan"), float("inf")
    codes, row_scale = fp4_as_fp8(mf.tensor.quantize(x, "mxfp4"))
    values = codes.float() * row_scale[:, None]
    assert values[1, 32:].isnan().all()
    assert values[2, :32].isnan().all()
    assert values[1, :32].isfinite().all()
    assert values[0].isfinite().all()


def test_fast_changes_nothing_in_an_exact_product():
    a, b = (
        mf.tensor.quantize(torch.randn(8, 32), "e4m3/row"),
        mf.tensor.quantize(torch.randn(8, 32), "e4m3/row"),
    )
    assert torch.equal(mf.tensor.scaled_mm(a, b), mf.tensor.scaled_mm(a, b, fast=True))


@pytest.mark.parametrize("spec", ["e4m3/tensor", "nvfp4/16x16", "mxfp8"])
def test_a_quantized_tensor_is_multiplied_as_its_codes(spec):
    """Its product is that of codes, which has no multiplication in high precision, on any side."""
    a, b = (torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (M, N))
    codes = [mf.tensor.quantize(x, spec) for x in (a, b)]
    weights = [mf.QuantizedTensor.from_tensor(x, spec, spec) for x in (a, b)]
    seen = []
    real, scaled_mm.ops = (
        scaled_mm.ops,
        SimpleNamespace(
            scaled_mm=lambda *args, **kwargs: seen.append(args[6]) or ops.scaled_mm(*args, **kwargs)
        ),
    )
    try:
        expected = mf.tensor.scaled_mm(*codes)
        for x, w in ((codes[0], weights[1]), (weights[0], codes[1]), weights):
            assert torch.equal(mf.tensor.scaled_mm(x, w), expected)
    finally:
        scaled_mm.ops = real
    assert seen == [f"{codes[0].spec}*{codes[0].spec}"] * 4
    turned = weights[0].t()  # reads the columnwise codes of a
    expected = mf.tensor.scaled_mm(*[mf.tensor.quantize(a, spec, columnwise=True)] * 2)
    assert torch.equal(mf.tensor.scaled_mm(turned, turned), expected)
    alone = mf.QuantizedTensor.from_tensor(b, None, spec)
    with pytest.raises(ValueError, match="scaled_mm: expected b with rowwise codes"):
        mf.tensor.scaled_mm(codes[0], alone)


def test_the_result_is_rounded_once():
    """Computes 257 and 257 + 1: bf16 has no 257, and rounds this tie to 256.

    A bias of 1, added before the only rounding, gives 258. Two roundings would give 256.
    """
    a = mf.tensor.quantize(torch.ones(1, 257), "e4m3/row")
    b = mf.tensor.quantize(torch.ones(1, 257), "mxfp8")
    assert mf.tensor.scaled_mm(a, b, out_dtype=torch.float32).item() == 257
    assert mf.tensor.scaled_mm(a, b).item() == 256
    assert mf.tensor.scaled_mm(a, b, bias=torch.ones(1, dtype=torch.bfloat16)).item() == 258


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda q, r: mf.tensor.scaled_mm(q, mf.tensor.quantize(torch.ones(4, 48), "nvfp4")),
            ValueError,
            "k = 32 and 48",
        ),
        (
            lambda q, r: mf.tensor.scaled_mm(q, "nvfp4"),
            TypeError,
            "expected b as Quantized or Tensor",
        ),
        (lambda q, r: mf.tensor.scaled_mm(q, r), ValueError, "same transform"),
        (lambda q, r: mf.tensor.scaled_mm(q, q, fast=True), ValueError, "fast"),
        (lambda q, r: mf.tensor.scaled_mm(q, q, bias=torch.ones(5)), ValueError, "expected bias"),
        (lambda q, r: mf.tensor.scaled_mm(q, q, out_dtype=torch.half), ValueError, "out_dtype"),
        (
            lambda q, r: mf.tensor.scaled_mm(q, mf.tensor.quantize(torch.ones(2, 4, 32), "nvfp4")),
            ValueError,
            "dimensions",
        ),
    ],
)
def test_bad_input(call, error, message):
    x = torch.ones(4, 32)
    with pytest.raises(error, match=message):
        call(mf.tensor.quantize(x, "nvfp4"), mf.tensor.quantize(x, "nvfp4+rht"))
