"""The GPU's bytes are the CPU's: every spec, direction, dtype, shape, layout and kind of value.

`-k quick` is the subset for compute-sanitizer: small shapes, every kernel once.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from minifloat._native import ops
from minifloat.spec import Spec

from tests.gpu.sweep import (
    DTYPES,
    EMPTY,
    LARGE,
    LAYOUTS,
    SHAPES,
    SPECS,
    describe,
    each_direction,
    is_stochastic,
    laid_out,
    magnitudes,
    on,
    random_bytes,
    random_operand,
    recipe_pairs,
    require_same_op,
    require_same_quantize,
    rng_tensor,
    values,
)
from tests.support.same_bits import require_same
from tests.support.specs import BASES

pytestmark = pytest.mark.gpu

KINDS = ["wide", "tiny", "huge", "sparse", "zeros", "special", "rare"]
AMAXES = [0.0, 1e-45, 1e-40, 0.5, 3.0, 1e30, 3.4e38, float("inf"), float("nan")]
ROW_BASES = [b for b in BASES if Spec.parse(b).amax_of == "row"]
TENSOR_BASES = [b for b in BASES if Spec.parse(b).amax_of == "tensor"]


# ---- quantize ------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_shapes(device, spec):
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        x = values("wide" if sum(shape) % 2 else "normal", shape, dtype)
        for row, col in each_direction(spec):
            require_same_quantize(device, x, row, col)


@pytest.mark.parametrize("base", BASES)
def test_large_shapes(device, base):
    for shape, dtype, flags in itertools.product(LARGE, DTYPES, ["", "+sr", "+rht", "+sr+rht"]):
        require_same_quantize(device, values("normal", shape, dtype), *[base + flags] * 2)


@pytest.mark.parametrize("spec", SPECS)
def test_kinds_of_values(device, spec):
    for shape, dtype, kind in itertools.product([(40, 161), (2, 128, 128)], DTYPES, KINDS):
        x = values(kind, shape, dtype, seed=3)
        for row, col in each_direction(spec):
            require_same_quantize(device, x, row, col, note=f" ({kind})")


@pytest.mark.parametrize(("row", "col"), recipe_pairs())
def test_kinds_of_values_on_whole_tiles(device, row, col):
    """Runs the preset kernels at the ends of the range."""
    for shape, kind in itertools.product([(128, 128), (256, 384)], KINDS):
        x = values(kind, shape, torch.bfloat16, seed=5)
        for a, b in {(row, col), (row, ""), ("", col), (row, row), (col, col)} - {("", "")}:
            for decoded in (False, True):
                asked = {"decoded_row": decoded and bool(a), "decoded_col": decoded and bool(b)}
                require_same_quantize(device, x, a, b, rng_size=3, note=f" ({kind})", **asked)


@pytest.mark.parametrize("base", BASES)
def test_magnitudes_on_whole_tiles(device, base):
    """Casts a tile of each magnitude, in batches of one."""
    for magnitude in range(-148, 128, 7):
        x = (values("normal", (128, 128), torch.float32) * 2.0**magnitude).to(torch.bfloat16)
        for row, col in each_direction(base):
            require_same_quantize(device, x, row, col, note=f" (2^{magnitude})")
        if magnitude % 2:
            for flags in ("+sr", "+rht", "+sr+rht"):
                note = f" (2^{magnitude})"
                require_same_quantize(device, x, base + flags, base + flags, note=note)


@pytest.mark.parametrize("base", BASES)
def test_every_magnitude(device, base):
    for dtype, rounding in itertools.product(DTYPES, ["", "+sr"]):
        for row, col in each_direction(base + rounding):
            require_same_quantize(device, magnitudes(dtype), row, col, note=" (magnitudes)")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("base", BASES)
def test_layouts(device, base, layout):
    shapes = [(1, 16, 64), (2, 33, 47), (3, 64, 128), (1, 130, 256)]
    for shape, dtype, flags in itertools.product(shapes, DTYPES, ["", "+sr+rht", "+rht64"]):
        x = laid_out(values("normal", shape, dtype), layout)
        for row, col in each_direction(base + flags):
            require_same_quantize(device, x, row, col, note=f" ({layout})")
        if shape[0] == 1:
            require_same_quantize(device, x[0], *[base + flags] * 2, note=f" ({layout})")


@pytest.mark.parametrize("spec", SPECS)
def test_empty(device, spec):
    for shape, (row, col) in itertools.product(EMPTY, each_direction(spec)):
        require_same_quantize(device, torch.empty(shape), row, col)
        require_same_quantize(
            device, torch.empty(shape), row, col, decoded_row=bool(row), decoded_col=bool(col)
        )


@pytest.mark.parametrize("flags", ["", "+sr", "+rht", "+sr+rht128"])
@pytest.mark.parametrize("base", ROW_BASES + TENSOR_BASES)
def test_given_amax(device, base, flags):
    spec = base + flags
    for dtype, kind, amax in itertools.product(DTYPES, ["normal", "special"], AMAXES):
        x = values(kind, (2, 33, 48), dtype)
        row = torch.full((2, 33) if base in ROW_BASES else (2,), amax)
        col = torch.full((2, 48) if base in ROW_BASES else (2,), amax)
        for given in (row, col):
            given[1] = 2.0
        note = f" (given amax {amax})"
        require_same_quantize(device, x, spec, spec, amax_row=row, amax_col=col, note=note)
        require_same_quantize(device, x, spec, spec, amax_row=row, note=note)
        require_same_quantize(device, x, "", spec, amax_col=col, note=note)
        require_same_quantize(device, x[0], spec, "", amax_row=row[0], note=note)


# A warp or a block a row, of one vec16 a thread or several, and rows that no team holds.
@pytest.mark.parametrize("cols", [1, 47, 512, 520, 1024, 2048, 2064, 4096, 7168, 16384, 16400])
@pytest.mark.parametrize("spec", ["e4m3/row", "e4m3/row+exact", "e4m3/row+sr", "nvfp4/row"])
def test_amaxes_of_columns(device, spec, cols):
    for shape, dtype in itertools.product([(1, cols), (65, cols), (3, 70, cols)], DTYPES):
        for kind in ("wide", "special"):
            x = values(kind, shape, dtype)
            require_same_quantize(device, x, spec, "", amaxes_of_columns=True)
            require_same_quantize(device, x, spec, "", decoded_row=True)
        gap = values("normal", (shape[-2], cols + 8), dtype)[:, :cols]
        require_same_quantize(device, gap, spec, "", amaxes_of_columns=True, note=" (a gap)")
    for shape in EMPTY:
        require_same_quantize(device, torch.empty(shape), spec, "", amaxes_of_columns=True)


@pytest.mark.parametrize("flags", ["", "+sr", "+rht", "+sr+rht32"])
@pytest.mark.parametrize("base", ["e4m3/tensor", "e5m2/tensor"])
def test_delayed(device, base, flags):
    spec, kinds = f"{base}+delayed{flags}", ["wide", "special", "rare"]
    for shape in ((2, 33, 130), (256, 384), (48, 160)):  # the last two: preset kernels
        for dtype, kind, amax in itertools.product(DTYPES, kinds, AMAXES[:7]):
            x = values(kind, shape, dtype)
            given = torch.tensor([amax, 0.0] if len(shape) == 3 else amax)
            for row, col in each_direction(spec):
                require_same_quantize(
                    device,
                    x,
                    row,
                    col,
                    amax_row=given if row else None,
                    amax_col=given if col else None,
                    note=f" (active amax {amax})",
                )
                require_same_quantize(device, x, row, col)


@pytest.mark.parametrize("transform", ["", "+rht", "+rht128"])
@pytest.mark.parametrize("base", BASES)
def test_origin_and_rng(device, base, transform):
    spec = f"{base}+sr{transform}"
    # The last lies far out for either direction: rows as read go to 2^32, columns to 2^36.
    origins = [(0, 128), (256, 0), (128 * 1001, 128 * 77), (2**31, 2**31 + 2**30)]
    for origin, size, dtype in itertools.product(origins, (2, 3), DTYPES):
        for shape in ((37, 150), (2, 64, 128)):
            x = values("normal", shape, dtype)
            for row, col in each_direction(spec):
                note = f" (origin {origin}, rng of {size})"
                require_same_quantize(
                    device, x, row, col, origin=list(origin), rng_size=size, note=note
                )


@pytest.mark.parametrize("spec", SPECS)
def test_decoded(device, spec):
    shapes = [(17, 31), (64, 128), (129, 257), (2, 40, 70)]
    for shape, dtype, kind in itertools.product(shapes, DTYPES, ["normal", "wide", "special"]):
        x = values(kind, shape, dtype)
        for row, col in each_direction(spec):
            require_same_quantize(
                device, x, row, col, decoded_row=bool(row), decoded_col=bool(col), note=f" ({kind})"
            )


@pytest.mark.parametrize(("row", "col"), recipe_pairs())
def test_pairs_of_recipes(device, row, col):
    """Casts two directions of different specs in one kernel; each equals its single cast."""
    shapes = [(33, 70), (128, 256), (130, 1000), (2, 64, 96)]
    for shape, dtype, kind in itertools.product(shapes, DTYPES, ["normal", "wide", "rare"]):
        x = values(kind, shape, dtype)
        for decoded in (False, True):
            require_same_quantize(
                device, x, row, col, rng_size=3, decoded_row=decoded, decoded_col=decoded
            )


def test_mixed_pairs(device):
    """Casts any two specs in one read, also pairs that no recipe has."""
    x = values("normal", (70, 200), torch.bfloat16)
    for i, row in enumerate(BASES):
        for step, (a, b) in enumerate([("", "+sr"), ("+rht", ""), ("+sr+rht64", "+sr+rht")]):
            require_same_quantize(device, x, row + a, BASES[(i + 3 + 5 * step) % len(BASES)] + b)


# ---- Sizes that a launch must split --------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("shape", [(1_100_003, 3), (3, 1_100_003), (70_001, 2, 17)])
def test_long_and_many(device, base, shape):
    """Casts more rows, columns and matrices than a grid's second and third dimensions have."""
    x = values("normal", shape, torch.bfloat16)
    for row, col in each_direction(base):
        require_same_quantize(device, x, row, col)


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["e4m3/tensor+sr", "e4m3/1x128", "mxfp8", "nvfp4", "nvfp4+sr+rht", "nvfp4/16x16"]
)
def test_more_than_int32_elements(cuda, spec):
    """Casts 2^31 elements and more: the last rows equal those of a shard that starts there."""
    rows, cols, tail = 65536 + 128, 32768 + 128, 256
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device=cuda)
    last = values("normal", (tail, cols), torch.bfloat16)
    x[-tail:] = last.to(cuda)
    has_amax = "tensor" in spec or "nvfp4" in spec
    amax = torch.tensor(6.5) if has_amax else None
    there = None if amax is None else amax.to(cuda)
    rng = rng_tensor() if is_stochastic(spec) else None
    got = ops.quantize(
        x, spec, spec, amax_row=there, amax_col=there, rng=None if rng is None else rng.to(cuda)
    )
    want = ops.quantize(
        last, spec, spec, amax_row=amax, amax_col=amax, rng=rng, origin=[rows - tail, 0]
    )
    note = f"{spec} of {describe(x)}, last rows"
    require_same(got[0][-tail:], want[0], f"{note}: codes_row")
    require_same(got[4][:, -want[4].shape[1] :], want[4], f"{note}: codes_col")
    if want[1].dim():
        require_same(got[1][-len(want[1]) :], want[1], f"{note}: scale_row")
        require_same(got[5][:, -want[5].shape[1] :], want[5], f"{note}: scale_col")
    if has_amax:
        require_same(ops.amax(x, spec), ops.amax(last, spec), f"{note}: amax")


# ---- amax, dequantize, decode --------------------------------------------------------------------


@pytest.mark.parametrize("transform", ["", "+rht", "+rht32", "+rht64", "+rht128"])
@pytest.mark.parametrize("base", ROW_BASES + TENSOR_BASES)
def test_amax(device, base, transform):
    shapes = [*SHAPES, *LARGE, *EMPTY]
    for shape, dtype, columnwise in itertools.product(shapes, DTYPES, (False, True)):
        for kind in ("wide", "special"):
            x = values(kind, shape, dtype)
            require_same_op(device, ops.amax, (x, base + transform, columnwise), f" ({kind})")
    for layout, columnwise in itertools.product(LAYOUTS, (False, True)):
        x = laid_out(values("normal", (3, 33, 70), torch.bfloat16), layout)
        require_same_op(device, ops.amax, (x, base + transform, columnwise), f" ({layout})")


@pytest.mark.parametrize("transform", ["", "+rht", "+rht128"])
@pytest.mark.parametrize("base", BASES)
def test_dequantize_and_decode(device, base, transform):
    spec = base + transform
    for seed, shape in enumerate([*SHAPES, (1000, 1000)]):
        (codes, scale, amax), cols = random_operand(spec, shape, seed), shape[-1]
        for dtype in DTYPES:
            arguments = (codes, scale, amax, spec, cols)
            require_same_op(device, ops.dequantize, arguments, f" to {dtype}", dtype=dtype)
        require_same_op(device, ops.decode, (codes, scale, spec, cols))
    for shape in EMPTY:
        (codes, scale, amax), cols = random_operand(spec, shape, 1), shape[-1]
        require_same_op(device, ops.dequantize, (codes, scale, amax, spec, cols))
        require_same_op(device, ops.decode, (codes, scale, spec, cols))


@pytest.mark.parametrize("base", [b for b in TENSOR_BASES if b.startswith("nvfp4")])
def test_dequantize_under_every_amax(device, base):
    for i, amax in enumerate(AMAXES):
        codes, scale, _ = random_operand(base, (33, 70), i)
        for dtype in DTYPES:
            arguments = (codes, scale, torch.tensor(amax), base, 70)
            require_same_op(device, ops.dequantize, arguments, f" (amax {amax})", dtype=dtype)


# ---- compute-sanitizer ---------------------------------------------------------------------------


def test_quick_quantize(device):
    for base in BASES:
        aligned = values("normal", (64, 256), torch.bfloat16)
        odd = values("special", (33, 150), torch.float32)[:, 1:]
        require_same_quantize(device, aligned, base, base)
        require_same_quantize(device, odd, base, base, decoded_row=True, decoded_col=True)
        require_same_quantize(device, aligned, f"{base}+sr+rht", f"{base}+sr+rht", rng_size=3)


def test_quick_pairs(device):
    for shape in ((128, 128), (2, 17, 45)):
        x = values("normal", shape, torch.bfloat16)
        for row, col in (("nvfp4", "nvfp4+rht"), ("nvfp4+sr", "nvfp4+sr+rht")):
            require_same_quantize(device, x, row, col)
            require_same_quantize(device, x, "", col)
            require_same_quantize(device, x, row, "", amax_row=torch.ones(shape[:-2]))


def test_quick_amax_and_decoding(device):
    x = values("normal", (45, 130), torch.bfloat16)
    for spec, columnwise in itertools.product(["nvfp4", "e4m3/row", "nvfp4+rht"], (False, True)):
        require_same_op(device, ops.amax, (x, spec, columnwise))
    for base in BASES[::2]:
        codes, scale, amax = random_operand(base, (33, 70), 1)
        require_same_op(device, ops.dequantize, (codes, scale, amax, base, 70))
        require_same_op(device, ops.decode, (codes, scale, base, 70))


def test_quick_transforms(device):
    x = values("normal", (45, 130), torch.bfloat16)
    for points, columnwise in itertools.product((16, 32, 64, 128), (False, True)):
        require_same_op(device, ops.hadamard, (x, points, columnwise))
    scale = random_bytes(130, 9)
    offs = {"m": [0, 100, 130], "k": [4, 4, 9]}
    for groups in ("", "m", "k"):
        ends = torch.tensor(offs[groups], dtype=torch.int32) if groups else None
        arguments = {"offs": ends, "groups": groups}
        require_same_op(device, ops.swizzle_scales, (scale,), **arguments)
        tiled = ops.swizzle_scales(scale, **arguments)
        require_same_op(device, ops.unswizzle_scales, (tiled, 130, 9), **arguments)
    require_same_op(device, ops.transpose_codes, (random_bytes(33, 65), 129))


def test_quick_on_another_stream(cuda):
    """Runs kernels on torch's current stream, after the kernel that filled x there."""
    x = values("normal", (256, 512), torch.bfloat16)
    want = ops.quantize(x, "nvfp4", "mxfp8")
    source, there = on(cuda, x), torch.zeros(x.shape, dtype=x.dtype, device=cuda)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        there.copy_(source)
        got = ops.quantize(there, "nvfp4", "mxfp8")
        tiled = ops.swizzle_scales(got[5])
    stream.synchronize()
    for a, b in zip(got, want):
        require_same(a, b, "quantize on a side stream")
    require_same(tiled, ops.swizzle_scales(want[5]), "swizzle_scales on a side stream")
