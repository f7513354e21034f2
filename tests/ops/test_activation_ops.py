"""Activations, their gradients and the casts of both: values, and the bytes of the composition."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from minifloat._native import ops

from tests.support.activation_casts import (
    ACTIVATIONS,
    AS_FP8,
    GRADIENTS_AS_FP8,
    IN_PLACE,
    PRESETS,
    RNG,
    draw,
    options_of,
)
from tests.support.same_bits import bits, require_all_same
from tests.support.specs import SPECS, flagged, has_bf16_values

TORCH = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
# The same in float64 without cancellation.
EXACT = {
    "silu": lambda x: x * x.sigmoid(),
    "gelu": lambda x: x * (-x * 0.5**0.5).erfc() / 2,
    "gelu_tanh": lambda x: x * (2 * (2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).sigmoid(),
}
FLAGS = ("", "+sr", "+rht", "+sr+rht")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("is_gated", [True, False])
def test_values_of_every_bfloat16(activation, is_gated):
    """h is the exact value rounded, or its neighbour where fp32's last places decide."""
    gate = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = gate[gate.isfinite()].view(-1, 16)
    up = gate.flip(0) if is_gated else None
    x = gate.double()
    want = EXACT[activation](x) * (1 if up is None else up.double())
    got = ops.activation(gate, up, activation)
    near = want.to(torch.bfloat16)
    is_small = EXACT[activation](x).abs() < 2.0**-100  # where sigmoid or Phi may be 0
    far = (bits(got).int() - bits(near).int()).abs() > 1
    assert not (far & ~is_small & near.isfinite()).any()
    assert (bits(got) == bits(near)).double().mean() > 0.99


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(40,), (3, 40), (2, 3, 40), (0, 8), (3, 0)])
@pytest.mark.parametrize("is_gated", [True, False])
def test_gradients_are_torchs(activation, shape, is_gated):
    g = torch.Generator().manual_seed(0)
    dh, gate, up = (torch.randn(shape, generator=g) * 3 for _ in range(3))
    leaves = [t.double().requires_grad_() for t in (gate, up)]
    h = TORCH[activation](leaves[0]) * (leaves[1] if is_gated else 1)
    h.backward(dh.double())
    d_gate, d_up = ops.activation_backward(dh, gate, up if is_gated else None, activation)
    assert d_gate.shape == shape
    # The terms of a derivative are of at most 1.2, and cancel.
    torch.testing.assert_close(d_gate.double(), leaves[0].grad, rtol=1e-5, atol=1e-5)
    if is_gated:
        torch.testing.assert_close(d_up.double(), leaves[1].grad, rtol=2e-6, atol=1e-7)
    else:
        assert d_up.numel() == 0
    values = ops.activation(gate, up if is_gated else None, activation)
    torch.testing.assert_close(values.double(), h.detach(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_silu_has_the_bits_of_swiglu(dtype):
    case = draw(33, 261, dtype, "silu", special=True)
    ones = torch.ones(33)
    h = ops.swiglu(case.gate, case.up, ones)
    assert torch.equal(bits(ops.activation(case.gate, case.up, "silu")), bits(h))
    want = ops.swiglu_backward(case.dh, case.gate, case.up, ones)
    got = ops.activation_backward(case.dh, case.gate, case.up, "silu")
    for a, b in zip(got, want, strict=False):
        assert torch.equal(bits(a), bits(b))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_absent_up_is_ones(activation):
    case = draw(17, 72, torch.bfloat16, activation, special=True)
    ones = torch.ones_like(case.gate)
    assert torch.equal(
        bits(ops.activation(case.gate, None, activation)),
        bits(ops.activation(case.gate, ones, activation)),
    )
    got = ops.activation_backward(case.dh, case.gate, None, activation)[0]
    want = ops.activation_backward(case.dh, case.gate, ones, activation)[0]
    assert torch.equal(bits(got), bits(want))


def test_any_layout():
    case = draw(12, 48, torch.float32, "gelu")
    tensors = [case.dh, case.gate, case.up]
    turned = [t.t().contiguous().t() for t in tensors]
    padded = [torch.cat([t, t], 1)[:, 3:51].clone().as_strided((12, 45), (48, 1)) for t in tensors]
    for moved in (turned, padded):
        dense = [t.contiguous() for t in moved]
        assert torch.equal(ops.activation(*moved[1:], "gelu"), ops.activation(*dense[1:], "gelu"))
        for a, b in zip(
            ops.activation_backward(*moved, "gelu"),
            ops.activation_backward(*dense, "gelu"),
            strict=True,
        ):
            assert torch.equal(a, b)
        for a, b in zip(
            ops.quantize_activation_backward(*moved, "gelu", "mxfp8", "mxfp8", "mxfp8"),
            ops.quantize_activation_backward(*dense, "gelu", "mxfp8", "mxfp8", "mxfp8"),
            strict=True,
        ):
            assert torch.equal(a, b)


@pytest.mark.parametrize(("h_col", "options"), IN_PLACE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_in_place(h_col, options, dtype):
    shapes = ((128, 256), (33, 72), (1, 8), (0, 16), (3, 0))
    for shape, is_gated, activation in itertools.product(shapes, (True, False), ACTIVATIONS):
        case = draw(*shape, dtype, activation, is_gated=is_gated, special=shape == (33, 72))
        what = f"{h_col} of {shape}, {dtype}, {activation}{' · up' if is_gated else ''}"
        require_all_same(
            case.in_place(h_col, **options), case.in_place_composition(h_col, **options), what
        )


def test_gradients_in_place_of_any_layout():
    case = draw(12, 48, torch.bfloat16, "silu")
    tensors = [t.t().contiguous().t() for t in (case.dh, case.gate, case.up)]
    d_gate, before = tensors[0], tensors[0]._version
    d_up, amaxes, *_ = ops.activation_gradients_(*tensors, "silu", "")
    want = case.in_place_composition("")
    require_all_same({"d_gate": d_gate, "d_up": d_up, "amaxes": amaxes}, want, "columns first")
    assert d_gate._version > before
    with pytest.raises(ValueError, match="with memory for each element"):
        ops.activation_gradients_(case.dh[:1].expand(12, 48), case.gate, case.up, "silu", "")


@given(
    st.sampled_from(SPECS),
    st.sampled_from(FLAGS),
    st.sampled_from([(True, False), (False, True), (True, True)]),
    st.sampled_from([(1, 8), (33, 72), (128, 128), (130, 256), (0, 16), (3, 0)]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(ACTIVATIONS),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "decoded_row", "decoded_col"]),
)
@settings(max_examples=150, deadline=None)
def test_casts_are_those_of_the_composition(
    spec, flags, directions, shape, dtype, activation, is_gated, special, decoded
):
    spec = flagged(spec, flags)
    row, col = (spec if asked else "" for asked in directions)
    case = draw(*shape, dtype, activation, is_gated=is_gated, special=special)
    options = {"stream_row": 2**60 + 7, "stream_col": -5, "origin": (256, 128)}
    if "+sr" in spec or "+eden" in spec:
        options["rng"] = RNG
    for side, text in (("row", row), ("col", col)):
        if "+delayed" in text:
            options[f"amax_{side}"] = torch.tensor(1.75)
    if decoded and (row if decoded.endswith("row") else col) and has_bf16_values(spec):
        options[decoded] = True
    what = f"{row}, {col}, {shape}, {dtype}, {activation}"
    require_all_same(
        case.forward(row, col, **options), case.forward_composition(row, col, **options), what
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("specs", PRESETS)
@pytest.mark.parametrize("is_gated", [True, False])
def test_casts_of_gradients_are_those_of_the_composition(specs, dtype, is_gated):
    for activation, shape, special in (
        ("silu", (128, 256), False),
        ("silu", (33, 72), True),
        ("gelu", (130, 40), True),
        ("gelu_tanh", (1, 16), False),
        ("silu", (0, 32), False),
        ("silu", (5, 0), False),
    ):
        case = draw(*shape, dtype, activation, is_gated=is_gated, special=special)
        options = options_of(*specs, case.gate)
        what = f"{specs}, {shape}, {dtype}, {activation}"
        require_all_same(
            case.backward(*specs, **options), case.backward_composition(*specs, **options), what
        )


@pytest.mark.parametrize("decoded", ["decoded_row", "decoded_col", "decoded_h"])
def test_values_for_an_exact_product(decoded):
    case = draw(40, 64, torch.bfloat16, "silu")
    options = {decoded: True}
    require_all_same(
        case.backward("mxfp8", "e4m3/row", "nvfp4", **options),
        case.backward_composition("mxfp8", "e4m3/row", "nvfp4", **options),
        decoded,
    )


SHAPES = [(128, 256), (33, 72), (0, 32), (5, 0)]


@pytest.mark.parametrize(("row", "col", "forms"), AS_FP8)
def test_casts_of_fp4_as_fp8(row, col, forms):
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        case = draw(*shape, dtype, "silu", special=shape == (33, 72))
        want = case.forward_composition(row, col, **forms)
        got = case.forward(row, col, **forms)
        require_all_same(got, want, f"{row}, {col}, {shape}, {dtype}")
        assert all(got[f"codes{form[3:]}"].dtype == torch.float8_e4m3fn for form in forms)
        meta = case.on(torch.device("meta")).forward(row, col, **forms)
        assert [(t.shape, t.dtype) for t in meta.values()] == [
            (t.shape, t.dtype) for t in want.values()
        ]


@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize(("row", "col", "h_col", "forms"), GRADIENTS_AS_FP8)
def test_casts_of_gradients_of_fp4_as_fp8(row, col, h_col, forms, is_gated):
    specs = row, col, h_col
    for shape in SHAPES:
        case = draw(*shape, torch.bfloat16, "gelu", is_gated=is_gated, special=shape == (33, 72))
        options = options_of(*specs, case.gate) | forms
        want = case.backward_composition(*specs, **options)
        require_all_same(case.backward(*specs, **options), want, f"{specs}, {shape}")
        moved = case.on(torch.device("meta"))
        meta = moved.backward(*specs, **options_of(*specs, moved.gate), **forms)
        assert [(t.shape, t.dtype) for t in meta.values()] == [
            (t.shape, t.dtype) for t in want.values()
        ]


X = torch.ones(4, 32)
NAMES = "expected activation 'silu', 'gelu' or 'gelu_tanh', got 'relu'"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.activation(X, None, "relu"), NAMES),
        (lambda: ops.activation_backward(X, X, X, "relu"), NAMES),
        (lambda: ops.quantize_activation(X, None, "relu", "mxfp8", ""), NAMES),
        (lambda: ops.activation(X, X[:2], "silu"), r"activation: expected up as gate"),
        (lambda: ops.activation(X, X.bfloat16(), "silu"), r"expected up as gate"),
        (lambda: ops.activation(X.double(), None, "silu"), "gate in float32 or bfloat16"),
        (lambda: ops.activation(X.sum(), None, "silu"), "got 0 dimensions"),
        (lambda: ops.activation_backward(X[:1], X, X, "silu"), "expected dh as gate"),
        (lambda: ops.quantize_activation(X[0], None, "silu", "mxfp8", ""), r"gate \(rows, cols\)"),
        (lambda: ops.quantize_activation(X, None, "silu", "", ""), "neither"),
        (lambda: ops.quantize_activation(X, None, "silu", "mxfp4+sr", ""), "needs rng"),
        (
            lambda: ops.quantize_activation_backward(X, X, X, "silu", "", "", "mxfp8"),
            "rowwise or a columnwise operand",
        ),
        (
            lambda: ops.quantize_activation_backward(X, X, X, "silu", "mxfp8", "", "", fp8_h=True),
            "a spec of h",
        ),
        (
            lambda: ops.quantize_activation(X, None, "silu", "nvfp4", "", fp8_row=True),
            "powers of two",
        ),
        (
            lambda: ops.quantize_activation_backward(
                X, X, X, "silu", "mxfp4+sr", "", "", gate_rng=RNG
            ),
            "needs rng",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_the_ops_alone_have_no_derivative():
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="derivative for minifloat::activation is not impl"):
        ops.activation(x, None, "gelu").sum().backward()
    assert not any(t.requires_grad for t in ops.quantize_activation(x, None, "silu", "mxfp8", ""))
    out = ops.quantize_activation_backward(x, x, x, "silu", "mxfp8", "", "")
    assert not any(t.requires_grad for t in out)
