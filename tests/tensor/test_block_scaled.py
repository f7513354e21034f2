"""Operands in the layout of block-scaled products: read by the published layout, and by torch's
checks.

The layout (cuBLAS documentation, "1D Block Scaling Factors Layout"): tiles of 128 rows by 4 scales,
row-major; in a tile, row r and column c lie at 16 (r mod 32) + 4 (r div 32) + c. No code is shared
with the library: tables of values, and the layout as a permutation of axes. torchao writes the same
layout.
"""

import itertools

import minifloat as mf
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from minifloat._native import ops
from torch.nn.functional import ScalingType, SwizzleType

from tests.support import oracle

# (a, b): along the contraction dimension both have blocks of one row, or b has 2D blocks
PRODUCTS = [
    ("mxfp8", "mxfp8"),
    ("mxfp8+floor", "mxfp8/32x32"),
    ("mxfp8/e5m2+sr", "mxfp8"),
    ("mxfp4", "mxfp4"),
    ("nvfp4", "nvfp4/16x16"),
    ("nvfp4+pow2", "nvfp4/16x16+up"),
    ("nvfp4+sr+rht", "nvfp4+rht"),
    ("mxfp4+sr+rht32", "mxfp4+rht32"),
]
# Rows about 128, scale columns about 4; the last is padded by transforms of 16 and 32.
SHAPES = [(1, 16, 32), (33, 48, 64), (127, 144, 96), (128, 128, 160), (200, 272, 544)]
PADDED = (130, 80, 50)


# Every shape under one MX and one NVFP4 product; the other products under one odd shape.
CASES = [
    pytest.param(a, b, m, n, k, id=f"{a}*{b}-{m}x{n}x{k}")
    for a, b in PRODUCTS
    for m, n, k in [
        *(SHAPES if a in ("mxfp8", "nvfp4") else SHAPES[2:3]),
        *([PADDED] if "rht" in a else []),
    ]
]


def operand(rows, k, spec, columnwise, seed):
    """Draws normal data in blocks of different magnitudes, so that all scales differ."""
    torch.manual_seed(seed)
    x = (
        torch.randn(rows, k)
        * 2.0 ** torch.randint(-4, 5, (rows, -(-k // 16))).repeat_interleave(16, 1)[:, :k]
    )
    if columnwise:
        return mf.tensor.quantize(x.t().contiguous(), spec, columnwise=True, seed=seed)
    return mf.tensor.quantize(x, spec, seed=seed)


def engine_operand(q, k):
    return ops.block_scaled_operand(q.codes, q.scale, q.amax, q.spec, k)


def unswizzle(scale, rows, cols):
    """Returns the (rows, cols) bytes of a swizzled scale."""
    tiles = scale.view(torch.uint8).numpy().reshape(-(-rows // 128), -(-cols // 4), 32, 4, 4)
    # [row tile, column tile, r mod 32, r div 32, c], of which the rows are 0, 3, 2
    matrix = tiles.transpose(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -(-cols // 4) * 4)
    return matrix[:rows, :cols]


def scale_values(spec, scale_bytes):
    if spec.startswith("mx"):
        return np.ldexp(1.0, scale_bytes.astype(int) - 127)
    return oracle.E4M3.values()[scale_bytes]


def code_values(spec, codes):
    fmt = oracle.E2M1 if "fp4" in spec else oracle.E5M2 if "e5m2" in spec else oracle.E4M3
    if fmt is oracle.E2M1:
        codes = np.stack([codes & 0xF, codes >> 4], -1).reshape(codes.shape[0], -1)
    half = 2 ** (fmt.bits - 1)
    return np.where(codes & half, -1.0, 1.0) * fmt.values()[codes & (half - 1)]


def values_of(spec, parts):
    """Computes the values that the engine multiplies, in float64, from its arguments only."""
    codes, scales, scaling, _ = parts
    values = code_values(spec, codes.view(torch.uint8).numpy())
    block = 32 if ScalingType(scaling[0]) == ScalingType.BlockWise1x32 else 16
    rows, cols = values.shape
    scale_bytes = unswizzle(scales[0], rows, -(-cols // block))
    return values * scale_values(spec, scale_bytes).repeat(block, 1)[:, :cols]


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize(("a_spec", "b_spec", "m", "n", "k"), CASES)
def test_the_product_read_by_the_layout_is_the_exact_one(a_spec, b_spec, m, n, k, columnwise):
    a, b = operand(m, k, a_spec, columnwise, 1), operand(n, k, b_spec, columnwise, 2)
    parts = engine_operand(a, k), engine_operand(b, k)
    left, right = values_of(a_spec, parts[0]), values_of(b_spec, parts[1])
    factor = np.prod([float(p[1][1]) for p in parts if len(p[1]) > 1])
    want = torch.from_numpy(left @ right.T * factor)
    magnitude = torch.from_numpy(np.abs(left) @ np.abs(right).T * factor)
    got = mf.tensor.scaled_mm(a, b, out_dtype=torch.float32)
    # The values are the same numbers, exact in bf16; the exact product sums `length` of them in
    # fp32, then multiplies by the fp32 product of the factors: at most length + 2 roundings, each
    # of 2^-23 of the magnitudes or less.
    length = left.shape[1]
    assert ((got.double() - want).abs() <= (length + 2) * 2.0**-23 * magnitude).all()
    assert (want != 0).any()


@given(
    spec=st.sampled_from(sorted({spec for pair in PRODUCTS for spec in pair})),
    rows=st.integers(1, 400),
    k=st.integers(1, 20).map(lambda n: 32 * n),
    columnwise=st.booleans(),
)
@example("nvfp4+sr+rht", 130, 50, False)  # padded by transforms
@settings(max_examples=100, deadline=None)
def test_codes_scales_and_padding_to_the_byte(spec, rows, k, columnwise):
    """Compares scales with torchao's layout of them, padding included."""
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked
    q = operand(rows, k, spec, columnwise, 3)
    codes, scales, scaling, swizzle = engine_operand(q, k)
    assert torch.equal(codes.view(torch.uint8), q.codes)
    is_mx = spec.startswith("mx")
    block = 32 if is_mx else 16
    height = block if f"/{block}x{block}" in spec else 1
    of_rows = q.scale.view(torch.uint8).repeat_interleave(height, 0)[:rows]
    assert torch.equal(scales[0].view(torch.uint8).flatten(), to_blocked(of_rows))
    if is_mx:
        assert (list(scaling), list(swizzle)) == (
            [ScalingType.BlockWise1x32.value],
            [SwizzleType.SWIZZLE_32_4_4.value],
        )
    else:
        assert (list(scaling), list(swizzle)) == (
            [ScalingType.BlockWise1x16.value, ScalingType.TensorWise.value],
            [SwizzleType.SWIZZLE_32_4_4.value, SwizzleType.NO_SWIZZLE.value],
        )
        top = 1536.0 if "pow2" in spec or "4over6" in spec else 2688.0
        encode = np.float32(top) / np.float32(q.amax)  # S, which 1 / S undoes
        assert np.float32(scales[1]) == np.float32(1) / encode
        assert scales[1].dtype == torch.float32


def as_meta(t):
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


def product(parts, out_dtype):
    (a, *of_a), (b, *of_b) = parts
    return torch.ops.aten._scaled_mm_v2(a, b.t(), *of_a, *of_b, None, out_dtype)


def product_on_meta(parts, out_dtype):
    return product(
        [(as_meta(a), [as_meta(s) for s in scale], *of) for a, scale, *of in parts], out_dtype
    )


HAS_CPU_PRODUCT = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")


def refusal(parts, out_dtype):
    """Returns the error of aten::_scaled_mm_v2's checks of the operands; None: no error.

    A torch with a CPU kernel runs the checks first, and refuses swizzled operands after them. In an
    older torch the Meta kernel has the checks.
    """
    try:
        (product if HAS_CPU_PRODUCT else product_on_meta)(parts, out_dtype)
    except (RuntimeError, ValueError) as error:
        return None if "CPU does not support swizzle" in str(error) else str(error)
    return None


def resized(parts, change):
    """Returns an operand whose scale has other bytes."""
    codes, (scale, *others), *layout = parts
    changed = change(scale.view(torch.uint8).flatten()).view(scale.dtype)
    return [codes, [changed, *others], *layout]


@given(
    pair=st.sampled_from([p for p in PRODUCTS if p[0][:5] != "mxfp4" and "e5m2" not in p[0]]),
    m=st.integers(1, 400),
    n=st.integers(1, 25).map(lambda n: 16 * n),
    k=st.integers(1, 20).map(lambda n: 32 * n),
    out_dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    capability=st.sampled_from([100, 103, 120, 121]),
)
@settings(max_examples=100, deadline=None)
def test_torch_accepts_the_operands(pair, m, n, k, out_dtype, capability):
    """Runs aten::_scaled_mm_v2's checks of shapes, strides, dtypes, recipes, sizes and swizzles."""
    asked = {"m": m, "n": n, "k": k, "out_dtype": out_dtype}
    assert ops.engine_of("*".join(pair), capability, **asked) == "block_scaled"
    parts = [engine_operand(operand(r, k, s, False, 4), k) for r, s in zip((m, n), pair)]
    out = product_on_meta(parts, out_dtype)
    assert (out.shape, out.dtype) == ((m, n), out_dtype)
    assert refusal(parts, out_dtype) is None
    swapped = list(parts[0])
    swapped[3] = [SwizzleType.NO_SWIZZLE.value] * len(swapped[3])
    assert "SWIZZLE_32_4_4" in refusal([swapped, parts[1]], out_dtype)
    for side, change in itertools.product((0, 1), (lambda s: s[:-1], lambda s: s.repeat(2))):
        wrong = list(parts)
        wrong[side] = resized(parts[side], change)
        with pytest.raises(RuntimeError, match="scaling scale_a must have"):
            product_on_meta(wrong, out_dtype)


@pytest.mark.parametrize("k", [32, 160, 512])
def test_mxfp4_has_a_scale_for_32_elements_not_for_32_bytes(k):
    """Checks MXFP4's scales, which torch 2.11's Meta kernel counts by bytes.

    Its CUDA kernel and the checks of newer torches count by elements, as here. The Meta kernel
    accepts them where both counts need equally many tiles."""
    parts = [engine_operand(operand(rows, k, "mxfp4", False, 5), k) for rows in (130, 48)]
    assert [p[1][0].numel() for p in parts] == [
        -(-rows // 128) * 128 * -(-k // 32 // 4) * 4 for rows in (130, 48)
    ]
    if HAS_CPU_PRODUCT or -(-k // 128) == -(-k // 256):
        assert refusal(parts, torch.bfloat16) is None
        assert product_on_meta(parts, torch.bfloat16).shape == (130, 48)
    else:
        assert "MX scaling" in refusal(parts, torch.bfloat16)


def test_nan_scales_reach_the_result():
    x = torch.randn(40, 64)
    x[3, 40] = float("nan")
    for spec, nan in (("mxfp8", 0xFF), ("nvfp4", 0x7F)):
        q = mf.tensor.quantize(x, spec)
        block = 32 if spec == "mxfp8" else 16
        inside = unswizzle(engine_operand(q, 64)[1][0], 40, 64 // block)
        assert inside[3, 40 // block] == nan


def test_bad_operands_are_refused():
    q = mf.tensor.quantize(torch.randn(32, 64), "e4m3/tensor")
    with pytest.raises(ValueError, match="expected an MX or NVFP4 spec, got e4m3/tensor"):
        engine_operand(q, 64)
    q = mf.tensor.quantize(torch.randn(32, 64), "nvfp4")
    with pytest.raises(ValueError, match="expected uint8 codes"):
        ops.block_scaled_operand(q.codes, q.scale, q.amax, "nvfp4", 96)
    with pytest.raises(ValueError, match="expected one-byte scales"):
        ops.block_scaled_operand(q.codes, q.scale[:1], q.amax, "nvfp4", 64)


@pytest.mark.parametrize("spec", ["mxfp8", "mxfp4", "nvfp4/16x16"])
def test_without_values(spec):
    q = mf.tensor.quantize(torch.randn(33, 64), spec)
    codes, scales, *of_scales = engine_operand(q, 64)
    args = [as_meta(t) for t in (q.codes, q.scale.view(torch.uint8), q.amax)]
    meta_codes, meta_scales, *of_meta_scales = ops.block_scaled_operand(*args, q.spec, 64)
    assert of_meta_scales == of_scales
    for meta, real in zip([meta_codes, *meta_scales], [codes, *scales], strict=True):
        assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)
