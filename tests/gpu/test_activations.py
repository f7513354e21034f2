"""Activations of dense layers and their casts on the GPU: the CPU's bytes.

`-k quick` is the subset for compute-sanitizer.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from minifloat._native import ops

from tests.gpu.sweep import DTYPES
from tests.support.activation_casts import (
    ACTIVATIONS,
    AS_FP8,
    GRADIENTS_AS_FP8,
    IN_PLACE,
    OF_POW2,
    PRESETS,
    Case,
    draw,
    options_of,
)
from tests.support.same_bits import require_all_same, require_same_bytes

pytestmark = pytest.mark.gpu

# Whole tiles, for which kernels are fused, and others.
TILES = [(128, 128), (256, 640), (1024, 384)]
LARGE = [(384, 512), (130, 1008), (1024, 776)]  # more than one cluster casts
OTHERS = [(1, 8), (33, 72), (130, 256), (128, 136), (127, 128), (0, 128), (5, 0), (40, 261)]
CASTS = [
    ("e4m3/tensor+delayed", "e4m3/tensor+delayed"),
    ("e4m3/tensor", "e4m3/tensor"),
    ("e4m3/tensor", ""),
    ("", "e4m3/tensor"),
    ("e4m3/row", "e4m3/row"),
    ("e4m3/row", ""),
    ("", "e4m3/row"),
    ("e4m3/1x128", "e4m3/1x128"),
    ("mxfp8", "mxfp8"),
    ("mxfp4", "mxfp4+rht"),
    ("nvfp4", "nvfp4+rht"),
    ("nvfp4+pow2", "nvfp4+pow2+rht"),
    ("nvfp4", ""),
    ("nvfp4+rht32", "nvfp4+rht32"),
    ("e5m2/tensor", "mxfp8"),
]


def compare_forward(device: torch.device, case: Case, row: str, col: str, **options: Any) -> None:
    options |= {"stream_row": 1234567890123, "stream_col": -42}
    for side, spec in (("row", row), ("col", col)):
        if "+delayed" in spec:
            options[f"amax_{side}"] = torch.tensor(1.75)
    there = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    what = f"{row}, {col} of {tuple(case.gate.shape)}, {case.gate.dtype}, {case.activation}"
    want = case.forward_composition(row, col, **options)
    require_all_same(case.on(device).forward(row, col, **there), want, what)


def compare_backward(
    device: torch.device, case: Case, row: str, col: str, h_col: str, **options: Any
) -> None:
    moved = case.on(device)
    what = f"{row}, {col}, {h_col} of {tuple(case.gate.shape)}, {case.gate.dtype}, "
    what += f"{case.activation}{'' if case.up is None else ' · up'}"
    want = case.backward_composition(
        row, col, h_col, **options_of(row, col, h_col, case.gate), **options
    )
    there = options_of(row, col, h_col, moved.gate) | options
    require_all_same(moved.backward(row, col, h_col, **there), want, what)


def compare_in_place(device: torch.device, case: Case, h_col: str, **options: Any) -> None:
    what = f"{h_col} of {tuple(case.gate.shape)}, {case.gate.dtype}, {case.activation}"
    what += "" if case.up is None else " · up"
    there = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    want = case.in_place_composition(h_col, **options)
    require_all_same(case.on(device).in_place(h_col, **there), want, what)


def compare_values(device: torch.device, case: Case) -> None:
    moved = case.on(device)
    what = f"{case.activation} of {tuple(case.gate.shape)}, {case.gate.dtype}"
    for name, op, tensors in (
        ("h", ops.activation, ("gate", "up")),
        ("gradients", ops.activation_backward, ("dh", "gate", "up")),
    ):
        want = op(*(getattr(case, t) for t in tensors), case.activation)
        got = op(*(getattr(moved, t) for t in tensors), case.activation)
        both = ((got, want),) if name == "h" else zip(got, want, strict=True)
        for a, b in both:
            require_same_bytes(a, b, f"{name}: {what}")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [True, False])
def test_values(device, activation, dtype, is_gated):
    for shape, special in itertools.product([*TILES, *OTHERS], (False, True)):
        compare_values(
            device, draw(*shape, dtype, activation, is_gated=is_gated, special=special, scale=4)
        )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_of_many_floats(device, activation):
    """Every 4,099th float, and steps of 2^-12 around the ends of the ranges."""
    spread = torch.arange(-(2**31), 2**31, 4099).to(torch.int32).view(torch.float32)
    ends = [torch.arange(a - 0.5, a + 0.5, 2.0**-12) for a in (-88, -13, -10, 10, 13, 87)]
    gate = torch.cat([spread, *ends])
    gate = gate[: gate.numel() // 1024 * 1024].view(-1, 1024)
    compare_values(device, Case(torch.ones_like(gate), gate, None, activation))


def every_bfloat16(activation: str) -> Case:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gate = every.view(256, 256)
    return Case(torch.ones_like(gate), gate, gate.flip(0, 1).contiguous(), activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_bfloat16(device, activation):
    case = every_bfloat16(activation)
    compare_values(device, case)
    for row, col in CASTS:
        compare_forward(device, case, row, col)
    for specs in PRESETS:
        compare_backward(device, case, *specs)
    for row, col, forms in AS_FP8:
        compare_forward(device, case, row, col, **forms)
    for *specs, forms in GRADIENTS_AS_FP8:
        compare_backward(device, case, *specs, **forms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("row", "col", "forms"), AS_FP8)
def test_casts_of_fp4_as_fp8(device, row, col, forms, dtype):
    for shape, activation in itertools.product([*TILES, *OTHERS, *LARGE], ACTIVATIONS):
        for is_gated in (True, False):
            case = draw(*shape, dtype, activation, is_gated=is_gated, special=shape == (256, 640))
            compare_forward(device, case, row, col, **forms)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("row", "col", "h_col", "forms"), GRADIENTS_AS_FP8)
def test_casts_of_gradients_of_fp4_as_fp8(device, row, col, h_col, forms, dtype):
    for shape, activation in itertools.product([*TILES, *OTHERS, *LARGE], ACTIVATIONS):
        for is_gated in (True, False):
            case = draw(*shape, dtype, activation, is_gated=is_gated, special=shape == (256, 640))
            compare_backward(device, case, row, col, h_col, **forms)


def spread(case: Case, seed: int) -> Case:
    """Gives the rows and columns of the inputs far magnitudes, and some of them zeros."""
    g = torch.Generator().manual_seed(seed)
    rows, cols = case.gate.shape

    def far(x: torch.Tensor) -> torch.Tensor:
        x = x.float() * torch.exp2(6 * torch.randn(rows, 1, generator=g))
        x = x * torch.exp2(6 * torch.randn(cols, generator=g))
        x[::5], x[:, 1::7] = 0, -0.0
        return x.bfloat16()

    up = None if case.up is None else far(case.up)
    return Case(far(case.dh), case.gate, up, case.activation)


@pytest.mark.parametrize("is_gated", [True, False])
def test_rows_far_apart_as_fp8(device, is_gated):
    """Each row has a scale of its own, from its amax; rows of zeros too."""
    for shape in (*TILES, *LARGE):
        case = spread(draw(*shape, torch.bfloat16, "silu", is_gated=is_gated), sum(shape))
        compare_forward(device, case, "nvfp4+pow2", "", fp8_row=True)
        compare_backward(device, case, *OF_POW2, fp8_row=True, fp8_col=True, fp8_h=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("row", "col"), CASTS)
def test_casts(device, row, col, dtype):
    for shape, activation in itertools.product([*TILES, *OTHERS], ACTIVATIONS):
        for is_gated in (True, False):
            case = draw(*shape, dtype, activation, is_gated=is_gated, special=shape == (256, 640))
            compare_forward(device, case, row, col)
    case = draw(256, 256, dtype, "silu")
    for side in [side for side, spec in (("row", row), ("col", col)) if spec]:
        compare_forward(device, case, row, col, **{f"decoded_{side}": True})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("specs", PRESETS)
def test_casts_of_gradients(device, specs, dtype):
    for shape, activation in itertools.product([*TILES, *OTHERS], ACTIVATIONS):
        for is_gated in (True, False):
            case = draw(*shape, dtype, activation, is_gated=is_gated, special=shape == (256, 640))
            compare_backward(device, case, *specs)
    case = draw(256, 256, dtype, "silu")
    compare_backward(device, case, *specs[:2], "")
    for side, spec in zip(("row", "col", "h"), specs, strict=True):
        if spec:
            compare_backward(device, case, *specs, **{f"decoded_{side}": True})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("h_col", "options"), IN_PLACE)
def test_gradients_in_place(device, h_col, options, dtype):
    for shape, activation in itertools.product([*TILES, *OTHERS], ACTIVATIONS):
        for is_gated in (True, False):
            case = draw(*shape, dtype, activation, is_gated=is_gated, special=shape == (256, 640))
            compare_in_place(device, case, h_col, **options)
    case = every_bfloat16("silu")
    compare_in_place(device, case, h_col, **options)
    compare_in_place(
        device, Case(case.gate.t().contiguous(), case.gate, case.up, "gelu"), h_col, **options
    )


@pytest.mark.parametrize("specs", PRESETS[:5])
def test_casts_of_gradients_in_other_layouts(device, specs):
    """Rows with gaps are read as they lie; a base or a pitch off 16 bytes takes the composition."""
    wide = draw(128, 512, torch.bfloat16, "silu")
    for first, width in ((8, 256), (3, 256), (0, 384)):
        parts = [t[:, first : first + width] for t in (wide.dh, wide.gate, wide.up)]
        there = [t.to(device)[:, first : first + width] for t in (wide.dh, wide.gate, wide.up)]
        case = Case(*(t.contiguous() for t in parts), "silu")
        want = case.backward_composition(*specs, **options_of(*specs, case.gate))
        got = Case(*there, "silu").backward(*specs, **options_of(*specs, there[0]))
        require_all_same(got, want, f"{specs}, from column {first}")


def test_given_amaxes(device):
    """The caller's amaxes are scaled by, also those of tensors and rows without delayed scaling."""
    case = draw(128, 256, torch.bfloat16, "silu")
    moved = case.on(device)
    given = {"gate_amax_row": torch.tensor(3.0), "up_amax_col": torch.tensor(0.5)}
    specs = ("e5m2/tensor", "e5m2/tensor", "e4m3/tensor")
    there = {name: t.to(device) for name, t in given.items()}
    want = case.backward_composition(*specs, **given)
    require_all_same(moved.backward(*specs, **there), want, "tensor")
    rows = {"gate_amax_row": torch.rand(128) + 1, "h_amax": torch.rand(256) + 1}
    there = {name: t.to(device) for name, t in rows.items()}
    want = case.backward_composition(*["e4m3/row"] * 3, **rows)
    require_all_same(moved.backward(*["e4m3/row"] * 3, **there), want, "rows")


@pytest.mark.parametrize("specs", PRESETS)
def test_quick(device, specs):
    for activation in ACTIVATIONS:
        compare_values(device, draw(5, 40, torch.bfloat16, activation))
        case = draw(128, 128, torch.bfloat16, activation)
        compare_backward(device, case, *specs)
        for h_col, options in IN_PLACE:
            compare_in_place(device, case, h_col, **options)
    for row, col in CASTS:
        compare_forward(device, case, row, col)


def test_the_casts_in_a_graph(cuda):
    """A captured call reads its inputs anew at each replay."""
    cases = [draw(256, 256, torch.bfloat16, "silu", scale=scale) for scale in (1.0, 3.0)]
    for specs in PRESETS[:8]:
        here = cases[0].on(cuda)
        options = options_of(*specs, here.gate)
        here.backward(*specs, **options)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = here.backward(*specs, **options)
        for case in cases:
            for name in ("dh", "gate", "up"):
                getattr(here, name).copy_(getattr(case, name))
            graph.replay()
            want = case.backward_composition(*specs, **options_of(*specs, case.gate))
            require_all_same(got, want, f"{specs}")
