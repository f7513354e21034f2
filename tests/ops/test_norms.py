"""Normalisations: values and gradients against torch in float64, and the bytes of their casts.

A result in bfloat16 is the float64 result rounded once, within the error of fp32.
"""

from __future__ import annotations

from typing import Any

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from minifloat._native import ops

from tests.support.norm_casts import KINDS, Case, draw, require_same_outputs
from tests.support.specs import SPECS

RNG = torch.tensor([-(2**61) + 3, 9])
FLAGS = ("", "+sr", "+rht", "+sr+rht")
STREAMS = {"stream_row": 2**60 + 7, "stream_col": -5}
DTYPES = [torch.float32, torch.bfloat16]
# The relative error of a sum of 2^15 terms in the order of core/norm.h is below 2^-18: at most 8
# additions a partial, 16 levels of the tree, and the roundings of a term, of 2^-24 each.
FP32 = 2.0**-18
EPSILONS = {torch.float32: FP32, torch.bfloat16: 2.0**-8}


def exact(case: Case) -> torch.Tensor:
    """Computes y in float64; of "rms_rounded" without the rounding in between."""
    x = case.x.double()
    w, b = (None if t is None else t.double() for t in (case.weight, case.bias))
    shape = x.shape[-1:]
    if case.kind == "layer":
        return F.layer_norm(x, shape, w, b, case.eps)
    return F.rms_norm(x, shape, w, case.eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cols", [2, 7, 16, 40, 257, 1000, 4096, 20000])
def test_values_are_those_of_float64(kind, dtype, cols):
    case = draw(kind, (3, 5), cols, dtype)
    got, want = case.norm().double(), exact(case)
    twice = 2 if kind == "rms_rounded" else 1
    error = twice * EPSILONS[dtype] * want.abs() + 8 * FP32 * (1 + want.abs())
    assert ((got - want).abs() <= error).all()
    assert got.shape == case.x.shape


def test_an_rms_norm_that_rounds_twice_is_hugging_faces():
    case = draw("rms_rounded", (64,), 512, torch.bfloat16)
    x = case.x.float()
    # A sum of equal powers of two is exact in any order.
    x = torch.where(x > 0, 1.5, -1.5)
    factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.25)  # 1 / sqrt(2.5)
    want = case.weight * (x * factor).to(torch.bfloat16)
    got = ops.norm(x.to(torch.bfloat16), case.weight, None, "rms_rounded", 0.25)
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_deferred", [False, True])
def test_gradients_are_those_of_float64(kind, dtype, is_deferred):
    case = draw(kind, (4, 9), 72, dtype)
    given = [t for t in (case.x, case.weight, case.bias) if t is not None]
    for t in given:
        t.requires_grad_()
    op = ops.deferred_norm if is_deferred else ops.norm
    y = op(case.x, case.weight, case.bias, kind, case.eps)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    got = torch.autograd.grad(y, given, g)
    want = torch.autograd.grad(exact(case), given, g.double())
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        error = EPSILONS[dtype] * b.double().abs().max() * 2 + 1e-4
        assert ((a.double() - b.double()).abs() <= error).all()


def test_a_deferred_norm_has_no_memory():
    x = torch.randn(4, 8, 64, dtype=torch.bfloat16, requires_grad=True)
    y = ops.deferred_norm(x, None, None, "rms", 1e-6)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert y.untyped_storage().nbytes() == 2
    assert not y.any()


@pytest.mark.parametrize("kind", KINDS)
def test_backward_is_differentiable(kind):
    case = draw(kind, (2,), 6, torch.float32)
    x, w = case.x.requires_grad_(), case.weight.requires_grad_()

    def first(x, w):
        y = ops.norm(x, w, case.bias, kind, case.eps)
        return torch.autograd.grad(y.sin().sum(), (x, w), create_graph=True)

    def exact_first(x, w):
        y = exact(Case(x, w, case.bias, kind, case.eps))
        return torch.autograd.grad(y.sin().sum(), (x, w), create_graph=True)

    got = torch.autograd.grad(sum(t.cos().sum() for t in first(x, w)), (x, w))
    want = torch.autograd.grad(sum(t.cos().sum() for t in exact_first(x, w)), (x, w))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)  # fp32 against float64


def options_of(row: str, col: str) -> dict[str, Any]:
    """Returns the options of a cast: random bits, and the amaxes that delayed scaling takes."""
    options: dict[str, Any] = dict(STREAMS)
    if "+sr" in row + col:
        options["rng"] = RNG
    for side, spec in (("row", row), ("col", col)):
        if "+delayed" in spec:
            options[f"amax_{side}"] = torch.tensor(1.75)
    return options


@given(
    st.sampled_from(SPECS),
    st.sampled_from(FLAGS),
    st.sampled_from([(True, False), (False, True), (True, True)]),
    st.sampled_from([(), (0,), (1,), (40,), (4, 32), (3, 50)]),
    st.sampled_from([1, 7, 40, 128, 200, 256]),
    st.sampled_from(DTYPES),
    st.sampled_from(KINDS),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_bytes_are_those_of_the_composition(
    spec, flags, directions, lead, cols, dtype, kind, decoded
):
    spec = spec + flags
    row, col = (spec if asked else "" for asked in directions)
    case = draw(kind, lead, cols, dtype)
    options = options_of(row, col) | {f"decoded_{side}": decoded for side in ("row", "col")}
    options["origin"] = (256, 128)
    what = f"{case} '{row}' '{col}'"
    require_same_outputs(
        case.cast(row, col, **options), case.composition(row, col, **options), what
    )


@pytest.mark.parametrize("recipe", [name for name in mf.presets() if name != "bf16"])
def test_operands_are_those_of_the_values(recipe):
    """The operands equal those of y, and so does the history."""
    case = draw("rms", (4, 32), 128, torch.bfloat16)
    parsed = mf.Recipe(recipe)
    state: dict[str, Any] = {"rng": torch.tensor([1, 2, 3])} if parsed.is_stochastic else {}
    histories = [torch.rand(6, 4, generator=torch.Generator().manual_seed(2)) for _ in range(2)]
    if not parsed.is_delayed:
        histories = [None, None]
    w = torch.randn(32, 128).to(torch.bfloat16).requires_grad_()  # wgrad reads x too
    got = case.operands(recipe, amax_history=histories[0], **state)
    y = case.norm()
    want = ops.linear(y, w, None, recipe, amax_history=histories[1], **state)
    again = None if histories[0] is None else histories[0].clone()
    x = ops.deferred_norm(case.x, case.weight, None, "rms", case.eps)
    found = ops.linear(x, w, None, recipe, amax_history=again, x_operands=got, **state)
    assert torch.equal(found, want)
    if histories[0] is not None:
        assert torch.equal(histories[0][[0, 5]], histories[1][[0, 5]])


def test_nothing_is_returned_of_bf16():
    x = torch.randn(4, 64)
    assert not any(t.numel() for t in ops.norm_operands(x, None, None, "rms", 1e-6, "bf16"))


def test_one_nan():
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    x[1, 3] = -float("nan")
    x[2, 5] = float("inf")
    for kind in KINDS:
        y = ops.norm(x, None, None, kind, 1e-6)
        assert y[1].isnan().all()
        assert (y[1].view(torch.int16) == 0x7FC0).all()
        assert (y[2].view(torch.int16)[y[2].isnan()] == 0x7FC0).all()
        assert y[[0, 3]].isfinite().all()


X = torch.ones(4, 32)
W = torch.ones(32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.norm(X, None, None, "group", 1e-6), 'expected kind as "rms"'),
        (lambda: ops.norm(X, W[:5], None, "rms", 1e-6), "expected weight of 32 elements"),
        (lambda: ops.norm(X, W, W, "rms", 1e-6), "a bias with kind"),
        (lambda: ops.norm(X, W, W[:3], "layer", 1e-6), "expected bias of 32 elements"),
        (lambda: ops.norm(X, W, None, "rms", -1.0), "expected eps of 0 or more"),
        (lambda: ops.norm(X, W, None, "rms", float("nan")), "expected eps of 0 or more"),
        (lambda: ops.norm(X.double(), None, None, "rms", 1e-6), "float32 or bfloat16"),
        (lambda: ops.norm(X, W.half(), None, "rms", 1e-6), "float32 or bfloat16"),
        (lambda: ops.norm(X.sum(), None, None, "rms", 1e-6), "got a number"),
        (lambda: ops.norm(X, W.to("meta"), None, "rms", 1e-6), "expected weight on cpu"),
        (lambda: ops.deferred_norm(X, W[:5], None, "rms", 1e-6), "expected weight of 32"),
        (lambda: ops.quantize_norm(X, None, None, "rms", 1e-6, "", ""), "rowwise or a columnwise"),
        (lambda: ops.quantize_norm(X, None, None, "rms", 1e-6, "bf16", ""), "bf16 is the identity"),
        (lambda: ops.quantize_norm(X, None, None, "rms", 1e-6, "mxfp4+sr", ""), "needs rng"),
        (
            lambda: ops.quantize_norm(X, None, None, "rms", 1e-6, "e4m3/row", "", amax_row=W[:2]),
            "expected amax as float32",
        ),
        (
            lambda: ops.norm_operands(X, None, None, "rms", 1e-6, "fp8_delayed"),
            "norm_operands: .* needs amax_history",
        ),
        (lambda: mf.rms_norm(X, rounded=1), "rounded: expected True or False"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_codes_have_no_derivative():
    x = X.clone().requires_grad_()
    outputs = ops.quantize_norm(x, None, None, "rms", 1e-6, "mxfp8", "")
    assert not any(t.requires_grad for t in outputs)


def test_a_layer_that_reads_a_deferred_norm_compiles():
    torch.manual_seed(0)
    x, w, gamma = (torch.randn(*s, requires_grad=True) for s in ((6, 64), (32, 64), (64,)))

    def layer(x, w, gamma):
        h = x.relu() + x
        codes = ops.norm_operands(h, gamma, None, "rms", 1e-6, "mxfp8")
        anchor = ops.deferred_norm(h, gamma, None, "rms", 1e-6)
        return ops.linear(anchor, w, None, "mxfp8", x_operands=codes)

    def plain(x, w, gamma):
        return mf.linear(mf.rms_norm(x.relu() + x, gamma, 1e-6), w, None, "mxfp8")

    g = torch.randn(6, 32)
    want = plain(x, w, gamma)
    wanted = torch.autograd.grad(want, (x, w, gamma), g)
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        got = function(x, w, gamma)
        assert torch.equal(got, want)
        for a, b in zip(torch.autograd.grad(got, (x, w, gamma), g), wanted, strict=True):
            assert torch.equal(a, b)
