"""The GPU's bytes are the CPU's: Hadamard transforms, swizzled scales, transposed codes."""

from __future__ import annotations

import itertools

import pytest
import torch
from minifloat._native import ops

from tests.gpu.sweep import (
    DTYPES,
    EMPTY,
    LARGE,
    LAYOUTS,
    SHAPES,
    laid_out,
    random_bytes,
    require_same_op,
    values,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("points", [16, 32, 64, 128])
def test_hadamard(device, points, columnwise):
    for shape, dtype in itertools.product([*SHAPES, *LARGE, *EMPTY], DTYPES):
        for kind, signs in (("normal", 0xD7E8), ("wide", 1), ("special", 0xD7E8), ("huge", 0)):
            x = values(kind, shape, dtype)
            require_same_op(device, ops.hadamard, (x, points, columnwise, signs), f" ({kind})")
    for layout in LAYOUTS:
        x = laid_out(values("normal", (3, 33, 70), torch.float32), layout)
        require_same_op(device, ops.hadamard, (x, points, columnwise), f" ({layout})")


def test_swizzle(device):
    shapes = [(1, 1), (31, 3), (127, 4), (128, 4), (129, 5), (300, 22), (1000, 63), (1024, 512)]
    shapes += [(0, 4), (4, 0)]
    for rows, cols in shapes:
        for scale in (random_bytes(rows, cols), random_bytes(3, rows, cols)):
            require_same_op(device, ops.swizzle_scales, (scale,))
            tiled = ops.swizzle_scales(scale)
            require_same_op(device, ops.unswizzle_scales, (tiled, rows, cols))


@pytest.mark.parametrize(
    ("groups", "ends"),
    [
        ("m", [300]), ("m", [0, 130, 130, 300]), ("m", [1, 2, 3, 4, 300]), ("m", [128, 300, 300]),
        ("k", [22]), ("k", [3, 3, 16, 22]), ("k", [0, 0, 22, 22]), ("k", [1, 2, 3, 22]),
    ],
)  # fmt: skip
def test_grouped_swizzle(device, groups, ends):
    scale, offs = random_bytes(300, 22), torch.tensor(ends, dtype=torch.int32)
    arguments = {"offs": offs, "groups": groups}
    require_same_op(device, ops.swizzle_scales, (scale,), f" ({groups} {ends})", **arguments)
    tiled = ops.swizzle_scales(scale, **arguments)
    note = f" ({groups} {ends})"
    require_same_op(device, ops.unswizzle_scales, (tiled, 300, 22), note, **arguments)


def test_transpose_codes(device):
    for shape in [*SHAPES, *LARGE, *EMPTY, (70_001, 2, 17)]:
        *batch, rows, cols = shape
        codes = random_bytes(*batch, rows, (cols + 1) // 2)
        require_same_op(device, ops.transpose_codes, (codes, cols))
