"""MS-EDEN on the GPU: the CPU's bytes, where the sweeps of test_bytes.py and test_groups.py stop.

The preset kernels take bf16 matrices, rowwise of whole transforms and columnwise of whole tiles;
the general ones all others.
"""

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
    STREAMS,
    describe,
    each_direction,
    laid_out,
    magnitudes,
    on,
    require_same_op,
    require_same_quantize,
    rng_tensor,
    values,
)
from tests.gpu.test_bytes import AMAXES, KINDS
from tests.support.same_bits import require_same

pytestmark = pytest.mark.gpu

EDEN = "nvfp4+eden"
WHOLE = [(128, 128), (128, 1024), (1024, 128), (256, 384), (8, 128), (1, 256), (3, 2048)]


@pytest.mark.parametrize("kind", ["normal", *KINDS])
def test_whole_tiles(device, kind):
    for shape, size in itertools.product(WHOLE, (2, 3)):
        x = values(kind, shape, torch.bfloat16, seed=7)
        for row, col in each_direction(EDEN):
            for decoded in (False, True):
                asked = {"decoded_row": decoded and bool(row), "decoded_col": decoded and bool(col)}
                note = f" ({kind}, rng of {size})"
                require_same_quantize(device, x, row, col, rng_size=size, note=note, **asked)


def test_many_seeds(device):
    """Casts one matrix under 100 seeds: signs, bits and corrections of all kinds."""
    x = values("normal", (128, 256), torch.bfloat16)
    x[:, ::16] *= 4
    there = on(device, x)
    for seed in range(100):
        rng = torch.tensor([seed, seed * 7])
        want = ops.quantize(x, EDEN, EDEN, rng=rng, **STREAMS)
        got = ops.quantize(there, EDEN, EDEN, rng=rng.to(device), **STREAMS)
        for a, b in zip(got, want):
            require_same(a, b, f"seed {seed}")


def test_values_that_cancel(device):
    """Casts transforms with zeros of both signs, of columns that cancel or have zeros alone."""
    for shape, most in itertools.product(WHOLE, (1, 3)):
        g = torch.Generator().manual_seed(shape[0] + most)
        x = torch.randint(-most, most + 1, shape, generator=g).to(torch.bfloat16)
        x *= torch.randint(0, 2, shape, generator=g) * 2 - 1  # zeros of both signs
        x[:, : shape[1] // 2] *= torch.rand(shape[0], shape[1] // 2, generator=g) < 0.03
        for row, col in each_direction(EDEN):
            require_same_quantize(device, x, row, col, note=f" (integers up to {most})")


def test_every_magnitude(device):
    """Casts a tile of each magnitude beside one row that sets the tensor's amax."""
    for magnitude in range(-148, 127, 3):
        tile = (values("normal", (128, 128), torch.float32) * 2.0**magnitude).to(torch.bfloat16)
        for largest in (1.0, 2.0**10, 2.0**20):
            x = tile.clone()
            x[0] = (x[0].float() * largest).clamp(-3.3e38, 3.3e38)
            for row, col in each_direction(EDEN):
                require_same_quantize(device, x, row, col, note=f" (2^{magnitude}, {largest})")
    for dtype in DTYPES:
        for row, col in each_direction(EDEN):
            require_same_quantize(device, magnitudes(dtype), row, col, note=" (magnitudes)")


def test_given_amax(device):
    for shape, kind, amax in itertools.product(
        ((2, 33, 48), (128, 256)), ("normal", "special"), AMAXES
    ):
        for dtype in DTYPES:
            x = values(kind, shape, dtype)
            given = torch.tensor([amax, 2.0] if len(shape) == 3 else amax)
            note = f" (given amax {amax}, {kind})"
            for row, col in each_direction(EDEN):
                asked = {"amax_row": given if row else None, "amax_col": given if col else None}
                require_same_quantize(device, x, row, col, note=note, **asked)


def test_origins(device):
    origins = [(0, 128), (256, 0), (128 * 1001, 128 * 77), (2**31, 2**31 + 2**30)]
    for origin, shape, dtype in itertools.product(
        origins, ((37, 150), (2, 64, 128), (128, 256)), DTYPES
    ):
        x = values("normal", shape, dtype)
        for row, col in each_direction(EDEN):
            note = f" (origin {origin})"
            require_same_quantize(device, x, row, col, origin=list(origin), rng_size=3, note=note)


def test_large_shapes_and_layouts(device):
    for shape, dtype in itertools.product(LARGE, DTYPES):
        for row, col in each_direction(EDEN):
            require_same_quantize(device, values("normal", shape, dtype), row, col)
    shapes = [(1, 16, 64), (2, 33, 47), (3, 64, 128), (1, 130, 256)]
    for layout, shape, dtype in itertools.product(LAYOUTS, shapes, DTYPES):
        x = laid_out(values("normal", shape, dtype), layout)
        for row, col in each_direction(EDEN):
            require_same_quantize(device, x, row, col, note=f" ({layout})")


def test_amax(device):
    for shape, dtype, columnwise in itertools.product(
        [*SHAPES, *LARGE, *EMPTY, *WHOLE], DTYPES, (False, True)
    ):
        for kind in ("normal", "wide", "special"):
            x = values(kind, shape, dtype)
            arguments = {"rng": rng_tensor(3), "stream": 5}
            require_same_op(device, ops.amax, (x, EDEN, columnwise), f" ({kind})", **arguments)


def test_amax_of_groups(device):
    x = values("normal", (300, 200), torch.bfloat16)
    table = ops.group_table(torch.tensor([0, 127, 127, 190, 289], dtype=torch.int32), 300)
    arguments = {"rng": rng_tensor(), "stream": 5, "groups": table}
    for dtype, columnwise in itertools.product(DTYPES, (False, True)):
        require_same_op(device, ops.amax, (x.to(dtype), EDEN, columnwise), **arguments)


def test_quick_eden(device):
    for shape, dtype in (((128, 128), torch.bfloat16), ((33, 150), torch.float32)):
        x = values("normal", shape, dtype)
        for row, col in each_direction(EDEN):
            require_same_quantize(device, x, row, col, rng_size=3)
        for row, col in (("nvfp4", EDEN), ("nvfp4/16x16", EDEN)):
            require_same_quantize(device, x, row, col, note=describe(x))
