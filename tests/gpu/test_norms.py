"""Normalisations and their casts on the GPU: the CPU's bytes, fused and as compositions.

`-k quick` is the subset for compute-sanitizer.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import Tensor

from tests.gpu.sweep import DTYPES, describe, laid_out, on, values
from tests.support.graphs import captured
from tests.support.norm_casts import KINDS, Case, draw, require_same_outputs
from tests.support.same_bits import require_same_bytes

pytestmark = pytest.mark.gpu

# Around a vec16, and the most columns of a warp and of a block with 1, 2 and 4 vec16s a thread.
COLS = [1, 15, 16, 17, 100, 512, 513, 1024, 1040, 2048, 2049, 4096, 4100, 8192, 8208, 16384, 16400]
VALUES = ["normal", "wide", "tiny", "huge", "special", "zeros"]
LAYOUTS = ["dense", "odd base", "odd pitch", "padded rows"]


def compare(device: torch.device, case: Case, what: str) -> None:
    there = case.on(device)
    require_same_bytes(there.norm(), case.norm(), f"{case} {what}")


@pytest.mark.parametrize("cols", COLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_values(device, kind, dtype, cols):
    for rows in (1, 9, 33):
        compare(device, draw(kind, (rows,), cols, dtype), "")
    case = draw(kind, (5,), cols, dtype, has_parameters=False)
    compare(device, case, "without weight")
    other = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    compare(device, draw(kind, (5,), cols, dtype, parameters=other), "of another dtype")


@pytest.mark.parametrize("of", VALUES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_every_magnitude(device, kind, dtype, of):
    for cols in (40, 1024, 4096):
        case = draw(kind, (33,), cols, dtype)
        compare(device, replace(case, x=values(of, (33, cols), dtype, 1)), of)


@pytest.mark.parametrize("layout", LAYOUTS[1:])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_of_any_layout(device, dtype, layout):
    for rows, cols in itertools.product((1, 9), (8, 40, 1024, 4096, 20000)):
        case = draw("layer", (rows,), cols, dtype)
        x = laid_out(values("normal", (rows, cols), dtype, 1)[None], layout)[0]
        want = ops.norm(x, *case.rest)
        got = ops.norm(on(device, x), *case.on(device).rest)
        require_same_bytes(got, want, f"{case} {layout} {describe(x)}")


# ---- Casts ---------------------------------------------------------------------------------------

# Casts that kernels fuse: rowwise, columnwise, both; and some that are compositions on a GPU too.
FUSED: list[tuple[str, str]] = [
    ("e4m3/row", ""),
    ("e4m3/row+exact", ""),
    ("", "e4m3/row"),
    ("e4m3/row", "e4m3/row"),
    ("e4m3/1x128", ""),
    ("", "e4m3/1x128"),
    ("e4m3/1x128", "e4m3/1x128"),
    ("mxfp8", ""),
    ("", "mxfp8"),
    ("mxfp8", "mxfp8"),
    ("mxfp4", ""),
    ("", "mxfp4"),
    ("", "mxfp4+rht"),
    ("mxfp4", "mxfp4+rht"),
    ("e4m3/tensor", ""),
    ("", "e4m3/tensor"),
    ("e4m3/tensor", "e4m3/tensor"),
    ("e4m3/tensor+delayed", ""),
    ("", "e4m3/tensor+delayed"),
    ("e4m3/tensor+delayed", "e4m3/tensor+delayed"),
    ("nvfp4", ""),
    ("nvfp4", "nvfp4"),
    ("nvfp4", "nvfp4+rht"),
    ("nvfp4+pow2", "nvfp4+pow2+rht"),
    ("mxfp8", "nvfp4+rht"),
    ("nvfp4", "mxfp8"),
]
COMPOSED = [
    ("e5m2/tensor", "e5m2/tensor"),
    ("mxfp4+sr", "mxfp4+sr+rht"),
    ("e4m3/128x128", "e4m3/128x128"),
    ("e4m3/row", "mxfp8"),
    ("nvfp4/16x16", "nvfp4+rht128"),
]


def compare_casts(device: torch.device, case: Case, row: str, col: str, **options: Any) -> None:
    options |= {"stream_row": 1234567890123, "stream_col": -42}
    if "+sr" in row + col:
        options["rng"] = torch.tensor([-(2**61) + 3, 9])
    for side, spec in (("row", row), ("col", col)):
        if "+delayed" in spec:
            options[f"amax_{side}"] = torch.tensor(1.75)
    there = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in options.items()}
    want = case.composition(row, col, **options)
    require_same_outputs(case.on(device).cast(row, col, **there), want, f"{case} '{row}' '{col}'")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("row", "col"), [*FUSED, *COMPOSED])
def test_casts(device, row, col, kind):
    for rows, cols in itertools.product((128, 384), (128, 256, 1152, 4096)):
        compare_casts(device, draw(kind, (rows,), cols, torch.bfloat16, scale=3), row, col)
    asked = {"decoded_row": bool(row), "decoded_col": bool(col)}
    compare_casts(device, draw(kind, (128,), 256, torch.bfloat16), row, col, **asked)
    case = draw(kind, (256,), 384, torch.bfloat16, parameters=torch.float32)
    compare_casts(device, case, row, col)
    compare_casts(device, draw(kind, (2, 64), 128, torch.bfloat16, has_parameters=False), row, col)


@pytest.mark.parametrize(("row", "col"), FUSED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_of_any_shape(device, dtype, row, col):
    shapes = itertools.product((0, 1, 33, 130), (1, 8, 48, 144, 512, 2064))
    for rows, cols in (*shapes, (3, 8192), (5, 16384), (2, 16400), (128, 8320)):
        compare_casts(device, draw("rms", (rows,), cols, dtype), row, col)


@pytest.mark.parametrize(("row", "col"), FUSED)
def test_casts_of_special_values(device, row, col):
    case = draw("layer", (256,), 256, torch.bfloat16)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    # A NaN or an infinity in a row makes all of the row NaN, so most rows have none.
    ordered = every.view(256, 256)
    for of in ("special", "wide", "zeros", "huge", "tiny"):
        x = values(of, (256, 256), torch.bfloat16, 3)
        compare_casts(device, replace(case, x=x), row, col)
        compare_casts(device, replace(case, x=x, kind="rms", bias=None), row, col)
    for kind in KINDS:
        bias = case.bias if kind == "layer" else None
        compare_casts(device, replace(case, x=ordered, kind=kind, bias=bias), row, col)


@pytest.mark.parametrize(("row", "col"), FUSED)
def test_casts_by_an_amax_of_the_caller(device, row, col):
    given = {}
    for side, spec, length in (("row", row, 128), ("col", col, 256)):
        if "/row" in spec:
            given[f"amax_{side}"] = torch.rand(length) + 1
        elif "tensor" in spec or "nvfp4" in spec:
            given[f"amax_{side}"] = torch.tensor(2.5)
    compare_casts(device, draw("rms", (128,), 256, torch.bfloat16), row, col, **given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(device, kind, dtype):
    """The device's gradients are torch's: within the rounding of their dtype of the CPU's."""
    case = draw(kind, (37,), 520, dtype)
    g = torch.randn(37, 520, generator=torch.Generator().manual_seed(5)).to(dtype)
    results = []
    for where, of in ((torch.device("cpu"), case), (device, case.on(device))):
        given = [t.detach().requires_grad_() for t in (of.x, of.weight, of.bias) if t is not None]
        y = ops.norm(*given, *([None] * (3 - len(given))), kind, of.eps)
        deferred = ops.deferred_norm(*given, *([None] * (3 - len(given))), kind, of.eps)
        first = torch.autograd.grad(y, given, g.to(where))
        second = torch.autograd.grad(deferred, given, g.to(where))
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)
        results.append([t.cpu().double() for t in first])
    tolerance = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-16  # two roundings, or fp32 sums
    for a, b in zip(*results, strict=True):
        assert ((a - b).abs() <= tolerance * (b.abs().max() + b.abs())).all()


def test_nothing_waits_for_the_device(cuda):
    case = draw("rms", (128,), 256, torch.bfloat16).on(cuda)
    history = torch.ones(6, 4, device=cuda)
    for mode in ("default", "error"):  # the first run may allocate lasting state
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for row, col in FUSED:
                given = {}
                for side, spec in (("row", row), ("col", col)):
                    if "+delayed" in spec:
                        given[f"amax_{side}"] = history[0, 0]
                case.cast(row, col, **given)
            for recipe in ("fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "nvfp4", "mxfp8"):
                case.operands(recipe, amax_history=history if "delayed" in recipe else None)
            x = case.x.clone().requires_grad_()
            mf.rms_norm(x, case.weight).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("row", "col"), [p for p in FUSED if "delayed" not in p[0] + p[1]])
def test_a_graph_replays_with_eagers_bytes(cuda, row, col):
    case = draw("rms", (128,), 256, torch.bfloat16).on(cuda)
    graph, outputs = captured(lambda: case.cast(row, col))
    case.x.mul_(1.5)
    want = case.cast(row, col)
    graph.replay()
    require_same_outputs(outputs, want, f"'{row}' '{col}'")


def test_quick(device):
    for kind, dtype in itertools.product(KINDS, DTYPES):
        for cols in (9, 264, 2064, 16400):
            compare(device, draw(kind, (9,), cols, dtype), "")
    for row, col in FUSED:
        compare_casts(device, draw("rms", (128,), 128, torch.bfloat16), row, col)
        compare_casts(device, draw("layer", (9,), 272, torch.bfloat16), row, col)
