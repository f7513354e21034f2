"""mf.scaled_mm against a product in float64 of the dequantized operands."""

import minifloat as mf
import pytest
import torch

M, K, N = 45, 70, 37
PRODUCTS = [
    ("e4m3/tensor", "e4m3/tensor"),
    ("e5m2/tensor", "e4m3/row"),
    ("e4m3/row+exact", "e4m3/row+exact"),
    ("e4m3/1x128", "e4m3/128x128"),
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
        q = mf.quantize(x.t().contiguous(), spec, columnwise=True, seed=seed)
    else:
        q = mf.quantize(x, spec, seed=seed)
    return q, q.dequantize().double()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize(("a_spec", "b_spec"), PRODUCTS)
def test_product(a_spec, b_spec, columnwise, out_dtype):
    a, a_values = operand(M, a_spec, columnwise, 1)
    b, b_values = operand(N, b_spec, columnwise, 2)
    bias = torch.randn(N, dtype=out_dtype)
    y = mf.scaled_mm(a, b, bias=bias, out_dtype=out_dtype)
    assert y.dtype == out_dtype
    want = a_values @ b_values.t() + bias.double()
    # fp32 sums of 80 products and NVFP4's three scale roundings; bf16: one rounding of the result
    magnitude = a_values.abs() @ b_values.abs().t() + bias.abs().double()
    bound = 96 * 2.0**-23 * magnitude
    if out_dtype == torch.bfloat16:
        bound += 2.0**-8 * want.abs()
    assert ((y.double() - want).abs() <= bound).all()


def test_fast_changes_nothing_in_an_exact_product():
    a, b = mf.quantize(torch.randn(8, 32), "e4m3/row"), mf.quantize(torch.randn(8, 32), "e4m3/row")
    assert torch.equal(mf.scaled_mm(a, b), mf.scaled_mm(a, b, fast=True))


def test_the_result_is_rounded_once():
    """Integers that bf16 holds, a sum that it does not: 257 is a tie of bf16 and rounds to 256."""
    a = mf.quantize(torch.ones(1, 257), "e4m3/row")
    b = mf.quantize(torch.ones(1, 257), "mxfp8")
    assert mf.scaled_mm(a, b, out_dtype=torch.float32).item() == 257
    assert mf.scaled_mm(a, b).item() == 256
    assert mf.scaled_mm(a, b, bias=torch.ones(1, dtype=torch.bfloat16)).item() == 258


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda q, r: mf.scaled_mm(q, mf.quantize(torch.ones(4, 48), "nvfp4")),
            ValueError,
            "k = 32 and 48",
        ),
        (lambda q, r: mf.scaled_mm(q, "nvfp4"), TypeError, "expected b as Quantized or Tensor"),
        (lambda q, r: mf.scaled_mm(q, r), ValueError, "same transform"),
        (lambda q, r: mf.scaled_mm(q, q, fast=True), ValueError, "fast"),
        (lambda q, r: mf.scaled_mm(q, q, bias=torch.ones(5)), ValueError, "expected bias"),
        (lambda q, r: mf.scaled_mm(q, q, out_dtype=torch.half), ValueError, "out_dtype"),
        (
            lambda q, r: mf.scaled_mm(q, mf.quantize(torch.ones(2, 4, 32), "nvfp4")),
            ValueError,
            "dimensions",
        ),
    ],
)
def test_bad_input(call, error, message):
    x = torch.ones(4, 32)
    with pytest.raises(error, match=message):
        call(mf.quantize(x, "nvfp4"), mf.quantize(x, "nvfp4+rht"))
