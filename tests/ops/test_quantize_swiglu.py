"""SwiGLU and its cast as one op: the bytes of the composition."""

from __future__ import annotations

from typing import Any

import minifloat as mf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from minifloat._native import ops

from tests.support.same_bits import require_same
from tests.support.specs import SPECS, flagged
from tests.support.swiglu_casts import ENDS, draw, require_same_cast

RNG = torch.tensor([-(2**61) + 3, 9])
FLAGS = ("", "+sr", "+rht", "+sr+rht")
STREAMS = {"stream_row": 2**60 + 7, "stream_col": -5}


def is_2d(spec: str) -> bool:
    return any(block in spec for block in ("128x128", "32x32", "16x16"))


def options_of(row: str, col: str, groups: int | None) -> dict[str, Any]:
    """Returns the options of a cast: random bits, and the amaxes that delayed scaling takes."""
    options: dict[str, Any] = dict(STREAMS)
    if "+sr" in row + col or "+eden" in row + col:
        options["rng"] = RNG
    for side, spec in (("row", row), ("col", col)):
        if "+delayed" in spec:
            options[f"amax_{side}"] = torch.full(() if groups is None else (groups,), 1.75)
    return options


@given(
    st.sampled_from(SPECS),
    st.sampled_from(FLAGS),
    st.sampled_from([(True, False), (False, True), (True, True)]),
    st.sampled_from(ENDS),
    st.sampled_from([1, 8, 40, 128, 200, 256]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["two", "apart", "interleaved"]),
    st.sampled_from([{}, {"limit": 1.0, "alpha": 1.5}]),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_bytes_are_those_of_the_composition(
    spec, flags, directions, ends, width, dtype, parts, form, has_pairs
):
    offs, rows = ends
    spec = flagged(spec, flags)
    if offs is not None and is_2d(spec):
        spec = "mxfp8"
    case = draw(offs, rows, width, dtype, parts, has_pairs=has_pairs, **form)
    row, col = (spec if asked else "" for asked in directions)
    options = options_of(row, col, None if offs is None else len(offs))
    if offs is not None and row:
        options |= {"row_ids": torch.randperm(rows).int(), "first_expert": 3}
    require_same_cast(
        case, case.cast(row, col, **options), case.composition(row, col, **options), row, col
    )


@pytest.mark.parametrize(("offs", "rows"), ENDS)
def test_amaxes_of_columns(offs, rows):
    case = draw(offs, rows, 48, torch.bfloat16, "two")
    found = case.cast("e4m3/row", "", amaxes_of_columns=True)
    want = case.composition("e4m3/row", "", amaxes_of_columns=True)
    require_same_cast(case, found, want, "e4m3/row", "")
    require_same(found[6], case.composition("", "e4m3/row")[6])


@pytest.mark.parametrize("decoded", ["decoded_row", "decoded_col"])
@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4", "e4m3/row", "mxfp4+rht"])
def test_values_for_an_exact_product(spec, decoded):
    case = draw([30, 30, 60], 70, 128, torch.bfloat16, "apart")
    row, col = (spec, "") if decoded == "decoded_row" else ("", spec)
    options = {decoded: True}
    require_same_cast(
        case, case.cast(row, col, **options), case.composition(row, col, **options), row, col
    )


def state_of(recipe: str) -> dict[str, Any]:
    parsed = mf.Recipe(recipe)
    state: dict[str, Any] = {}
    if parsed.is_stochastic:
        state["rng"] = RNG
    if parsed.is_delayed:
        state["amax_history"] = torch.rand(6, 4, 4, generator=torch.Generator().manual_seed(2))
    return state


@pytest.mark.parametrize("recipe", [name for name in mf.presets() if name != "bf16"])
def test_operands_make_the_products_of_the_values(recipe):
    """The product of operands equals that of h, which casts h itself, and so does its history."""
    case = draw([20, 20, 45, 60], 64, 128, torch.bfloat16, "apart")
    offs = torch.tensor([20, 20, 45, 60], dtype=torch.int32)
    b, ids = torch.randn(4, 128, 48).to(torch.bfloat16), torch.randperm(64).int()
    h = ops.swiglu(case.product, case.other, case.weights, **case.form)
    h, g = h.detach(), torch.randn(64, 48).to(torch.bfloat16)
    common = {"row_ids": ids, "stream": 12345, "first_expert": 2}
    states = [state_of(recipe) for _ in range(2)]
    found, wanted = [], []
    for state, results, is_fused in ((states[0], found, True), (states[1], wanted, False)):
        for rowwise in (True, False):
            operands = None
            if is_fused:
                tensors = case.product, case.other, case.weights
                operands = ops.swiglu_operands.default(
                    *tensors,
                    recipe,
                    **case.form,
                    **state,
                    **common,
                    rowwise=rowwise,
                    columnwise=not rowwise,
                )
            options = {**common, **state, "a_operands": operands}
            if operands is not None and not any(t.numel() for t in operands):
                options["a_operands"] = None  # bf16
            if rowwise:
                results.append(ops.scaled_grouped_mm(h, b, offs, recipe, **options))
            else:
                needed = [False, True, False]
                results.append(
                    ops.scaled_grouped_mm_backward(g, h, b, offs, recipe, needed, **options)[1]
                )
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    if "amax_history" in states[0]:
        assert torch.equal(states[0]["amax_history"], states[1]["amax_history"])


ONES = torch.ones(4)
X = torch.ones(4, 32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.quantize_swiglu(X[:, :5], None, ONES, "mxfp8", ""), "same width, got 5"),
        (lambda: ops.quantize_swiglu(X, None, ONES, "", ""), "rowwise or a columnwise operand"),
        (
            lambda: ops.quantize_swiglu(X.to("meta"), None, ONES.to("meta"), "", ""),
            "rowwise or a columnwise operand",
        ),
        (lambda: ops.quantize(X.to("meta"), "", ""), "rowwise or a columnwise operand"),
        (
            lambda: ops.quantize(
                X.to("meta"), "e4m3/128x128", "", groups=torch.zeros(5, 2).int().to("meta")
            ),
            "blocks of one row for values in groups",
        ),
        (lambda: ops.quantize_swiglu(X, None, ONES, "bf16", ""), "bf16 is the identity"),
        (lambda: ops.quantize_swiglu(X, None, ONES, "mxfp4+sr", ""), "needs rng"),
        (
            lambda: ops.quantize_swiglu(X, None, ONES, "e4m3/row", "", amax_row=ONES[:2]),
            r"expected amax as float32 \(4\), got Float \(2\)|expected amax as float32 \[4\]",
        ),
        (
            lambda: ops.quantize_swiglu(X, None, ONES, "mxfp8", "", row_ids=torch.arange(4).int()),
            "row_ids with groups",
        ),
        (
            lambda: ops.swiglu_operands(X, None, ONES, "fp8_delayed"),
            "needs amax_history",
        ),
        (lambda: ops.swiglu_operands(X[0], None, ONES, "mxfp8"), "product of 2 dimensions, got 1"),
        (
            lambda: ops.swiglu_operands(X, None, ONES, "mxfp8", amax_history=torch.rand(6, 2, 3)),
            "expected amax_history as float32",
        ),
        (
            lambda: ops.swiglu_operands(X, None, ONES, "mxfp8", groups=torch.zeros(3).int()),
            "swiglu_operands: expected groups as group_table returns them",
        ),
        (
            lambda: ops.swiglu_operands(
                X, None, ONES, "fprop=mxfp4+sr*mxfp4 dgrad=bf16*bf16 wgrad=bf16*bf16"
            ),
            r"swiglu_operands: mxfp4\+sr rounds stochastically and needs rng",
        ),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_codes_have_no_derivative():
    product = X.clone().requires_grad_()
    assert not any(t.requires_grad for t in ops.quantize_swiglu(product, None, ONES, "mxfp8", ""))
