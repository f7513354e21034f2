"""The arguments of torch's grouped block-scaled product, read as its kernels read them.

The model here is of torch 2.11 (GroupedBlas.cpp, and the kernels of MSLK that it calls). From the
arguments alone, with flat offsets into their memory, it computes the product of each group:

    along rows             (M, k) · (E, n, k)ᵀ -> (M, n)      groups of a's rows, a matrix each of b
    along the contraction  (m, L) · (n, L)ᵀ -> (E, m, n)      groups of the columns of both

No GPU has run this yet: the model shows that the arguments are right, not that the kernels are.
What torch checks of them is in tests/support/grouped_blas.py, line by line.
"""

import itertools
import re
from dataclasses import dataclass

import minifloat as mf
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from minifloat._native import ops

from tests.support import grouped_blas, grouped_oracle, oracle
from tests.support.grouped_blas import round_up
from tests.tensor.test_groups import UNITS, Layout, int32, layouts

# (a, b): along rows b may have 2D blocks, and along the contraction dimension neither may
ALONG_ROWS = [
    ("mxfp8", "mxfp8"),
    ("mxfp8+floor", "mxfp8/32x32"),
    ("mxfp4", "mxfp4"),
    ("mxfp4+sr+rht32", "mxfp4+rht32"),
    ("nvfp4", "nvfp4/16x16"),
    ("nvfp4+pow2", "nvfp4+up"),
    ("nvfp4+sr+rht", "nvfp4+rht"),
]
ALONG_CONTRACTION = [pair for pair in ALONG_ROWS if not any("x" in s[5:] for s in pair)]
ENDS = [0, 1, 18, 18, 50, 65, 194, 194]  # the first, the last and one group within are empty
ROWS = 207


# ---- the model -----------------------------------------------------------------------------------


@dataclass
class Side:
    """One operand in memory: bytes of codes and of scales, as the kernels address them."""

    codes: np.ndarray  # flat
    scales: np.ndarray  # flat
    per_byte: int
    block: int
    is_e4m3: bool

    def read(self, first, rows, cols, pitch, scales_at):
        """Reads (rows, cols) elements from byte `first`, rows at `pitch` bytes, in float64."""
        width = cols // self.per_byte
        at = first + np.arange(rows)[:, None] * pitch + np.arange(width)
        codes = self.codes[at]
        if not self.is_e4m3:
            codes = np.stack([codes & 0xF, codes >> 4], -1).reshape(rows, cols)
        values = oracle.decode(codes, oracle.E4M3 if self.is_e4m3 else oracle.E2M1)
        count = cols // self.block
        r, c = np.arange(rows)[:, None], np.arange(count)
        tile = r // 128 * (round_up(count, 4) // 4) + c // 4
        scale = self.scales[scales_at + tile * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]
        if self.block == 16:
            scale = oracle.decode(scale, oracle.E4M3)
        else:
            scale = np.ldexp(1.0, scale.astype(int) - 127)
        return values.astype(np.float64) * scale.repeat(self.block, 1)


def flat(t):
    """Returns the bytes of a tensor's memory, in their order there."""
    assert t.storage_offset() == 0
    return t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy()


def parts_of_groups(*arguments):
    """Yields for each group its rows or columns, a's and b's values, and the factor of the sums."""
    recipe = grouped_blas.require_accepted(*arguments)
    a, b, a_scales, _, _, b_scales, _, _, ends = arguments
    groups, m, n = len(ends), a.shape[0], b.shape[-1]
    is_e4m3, block = recipe == "mxfp8", 16 if recipe == "nvfp4" else 32
    left, right = (
        Side(flat(matrix), flat(scales[0]), 1 if is_e4m3 else 2, block, is_e4m3)
        for matrix, scales in ((a, a_scales), (b.transpose(-2, -1), b_scales))
    )
    pitch = a.shape[1]
    factor = np.ones(groups, np.float32)
    if len(a_scales) == 2:
        factor = (a_scales[1] * b_scales[1]).numpy()
    a_scales_at = b_scales_at = 0
    for group, (begin, end) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        if b.dim() == 3:
            k = pitch * left.per_byte
            across = round_up(k // block, 4)
            x = left.read(begin * pitch, end - begin, k, pitch, a_scales_at)
            w = right.read(group * n * pitch, n, k, pitch, group * round_up(n, 128) * across)
            a_scales_at += round_up(end - begin, 128) * across
        else:
            cols = end - begin
            assert cols > 0  # the kernel writes no result for a group of no columns
            across, first = round_up(cols // block, 4), begin // left.per_byte
            assert first % 16 == 0
            x = left.read(first, m, cols, pitch, a_scales_at)
            w = right.read(first, n, cols, pitch, b_scales_at)
            a_scales_at += round_up(m, 128) * across
            b_scales_at += round_up(n, 128) * across
        yield begin, end, x, w, factor[group]


# ---- operands ------------------------------------------------------------------------------------


def draw(*shape, seed):
    """Draws normal data in blocks of different magnitudes, so that all scales differ."""
    g = torch.Generator().manual_seed(seed)
    blocks = torch.randint(-4, 5, (*shape[:-1], round_up(shape[-1], 16) // 16), generator=g)
    size = (2.0**blocks).repeat_interleave(16, -1)[..., : shape[-1]]
    return torch.randn(shape, generator=g) * size


@dataclass
class Call:
    """A product: the operands of scaled_mm, and the arguments that the engine makes of them."""

    a: mf.tensor.Quantized
    b: mf.tensor.Quantized
    table: torch.Tensor
    k: int
    unit: int

    @property
    def product(self):
        return f"{self.a.spec}*{self.b.spec}"

    def run(self, op, **options):
        a, b = self.a, self.b
        sides = (a.codes, a.scale, a.amax, b.codes, b.scale, b.amax, self.product)
        where = {"k": self.k, "groups": self.table, "group_unit": self.unit}
        return op(*sides, **where, **options)

    def arguments(self):
        return self.run(ops.block_scaled_grouped_operands)

    def exact(self):
        return self.run(ops.scaled_mm, out_dtype=torch.float32, zero_tail=True).double().numpy()

    def decoded(self):
        groups = {"groups": self.table, "group_unit": self.unit}
        of_b = groups if self.unit else {}
        for q, where in ((self.a, groups), (self.b, of_b)):
            values = ops.decode(q.codes, q.scale, q.spec, q.shape[-1], **where)
            yield values.double().numpy()


def along_rows(layout, pair, n, k, seed):
    table = mf.tensor.group_table(int32(layout.ends), layout.rows)
    x = draw(layout.rows, k, seed=seed)
    if layout.ends:
        x[layout.ends[-1] :] = float("nan")
    a = mf.tensor.quantize(x, pair[0], groups=table, seed=seed)
    b = mf.tensor.quantize(draw(len(layout.ends), n, k, seed=seed + 1), pair[1], seed=seed)
    return Call(a, b, table, k, 0)


def along_contraction(layout, pair, m, n, unit, seed):
    table = mf.tensor.group_table(int32(layout.ends), layout.rows)
    unit = max(unit, *(grouped_oracle.least_unit(spec) for spec in pair))
    sides = []
    for spec, cols in zip(pair, (m, n), strict=True):
        x = draw(layout.rows, cols, seed=seed + cols)
        x[layout.ends[-1] :] = float("nan")
        how = {"columnwise": True, "groups": table, "group_unit": unit}
        sides.append(mf.tensor.quantize(x, spec, seed=seed, **how))
    return Call(*sides, table, layout.rows, unit)


def require_exact(name, got, magnitude, want, length):
    """Compares sums of `length` terms with the exact product's.

    The terms are the same numbers. The exact product adds them in fp32 and multiplies by a factor:
    at most length + 3 roundings, each of 2^-23 of the magnitudes or less.
    """
    bound = (length + 3) * 2.0**-23 * magnitude
    assert (np.abs(got - want) <= bound).all(), name


def engine(call, capability, m, n, groups, **asked):
    length = call.a.shape[-1]
    where = {"m": m, "n": n, "k": length, "groups": groups}
    return ops.engine_of(call.product, capability, **where, **asked)


# ---- products ------------------------------------------------------------------------------------


@given(
    layout=layouts(),
    pair=st.sampled_from(ALONG_ROWS),
    n=st.sampled_from([16, 48, 144]),
    k=st.sampled_from([32, 64, 160]),
    seed=st.integers(0, 1000),
)
@example(Layout([0], 1), ("mxfp8", "mxfp8"), 16, 32, 0)
@example(Layout(ENDS, ROWS), ("nvfp4", "nvfp4/16x16"), 144, 160, 0)
@example(Layout([300, 300, 430], 431), ("mxfp4", "mxfp4"), 272, 544, 0)
@settings(max_examples=200, deadline=None)
def test_along_rows(layout, pair, n, k, seed):
    call = along_rows(layout, pair, n, k, seed)
    if layout.rows:
        assert engine(call, 100, layout.rows, n, "m") == "block_scaled_grouped"
    want, (x_values, w_values) = call.exact(), call.decoded()
    is_written = np.zeros(layout.rows, bool)
    for group, (begin, end, x, w, factor) in enumerate(parts_of_groups(*call.arguments())):
        assert np.array_equal(x, x_values[begin:end])
        assert np.array_equal(w, w_values[group])
        got, magnitude = x @ w.T * factor, np.abs(x) @ np.abs(w).T * factor
        require_exact(f"group {group}", got, magnitude, want[begin:end], k)
        is_written[begin:end] = True
    assert not want[~is_written].any()


@given(
    layout=layouts(),
    pair=st.sampled_from(ALONG_CONTRACTION),
    m=st.sampled_from([1, 33, 130]),
    n=st.sampled_from([16, 144]),
    unit=st.sampled_from(UNITS),
    seed=st.integers(0, 1000),
)
@example(Layout([0], 0), ("mxfp8", "mxfp8"), 33, 16, 16, 0)
@example(Layout(ENDS, ROWS), ("nvfp4+pow2", "nvfp4+up"), 130, 144, 16, 0)
@example(Layout([300, 300, 430], 431), ("mxfp4", "mxfp4"), 272, 144, 128, 0)
@settings(max_examples=200, deadline=None)
def test_along_the_contraction(layout, pair, m, n, unit, seed):
    call = along_contraction(layout, pair, m, n, unit, seed)
    assert engine(call, 103, m, n, "k") == "block_scaled_grouped"
    want, (x_values, w_values) = call.exact(), call.decoded()
    assert want.shape == (len(layout.ends), m, n)
    for group, (begin, end, x, w, factor) in enumerate(parts_of_groups(*call.arguments())):
        assert np.array_equal(x, x_values[:, begin:end])
        assert np.array_equal(w, w_values[:, begin:end])
        got, magnitude = x @ w.T * factor, np.abs(x) @ np.abs(w).T * factor
        require_exact(f"group {group}", got, magnitude, want[group], end - begin)


@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4"])
def test_scales_of_one_matrix_are_not_those_of_groups(spec):
    """Checks that the model sees a wrong layout: scales swizzled without groups."""
    layout = Layout(ENDS, ROWS)
    for call in (
        along_rows(layout, (spec, spec), 48, 64, 1),
        along_contraction(layout, (spec, spec), 33, 48, 0, 1),
    ):
        given_scales = call.arguments()[2][0]
        plain = ops.swizzle_scales(call.a.scale.view(torch.uint8)).view(given_scales.dtype)
        wrong = list(call.arguments())
        wrong[2] = [torch.zeros_like(given_scales.view(torch.uint8)).view(given_scales.dtype)]
        wrong[2][0].view(-1).view(torch.uint8)[: plain.numel()] = plain.view(-1).view(torch.uint8)
        wrong[2] += call.arguments()[2][1:]
        pairs = zip(parts_of_groups(*call.arguments()), parts_of_groups(*wrong), strict=True)
        assert any(not np.array_equal(right[2], other[2]) for right, other in pairs)


# ---- torch's checks ------------------------------------------------------------------------------


def meta_product(a, b, a_scales, *others):
    """Computes MXFP8's product by the Meta kernel of the op's first version, which has checks."""
    *_, b_scales, _, _, ends = others
    given = (a, b, a_scales[0], b_scales[0], ends)
    metas = (torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in given)
    return torch.ops.aten._scaled_grouped_mm(*metas, out_dtype=torch.bfloat16)


@given(
    layout=layouts(),
    along=st.sampled_from(["rows", "contraction"]),
    pair=st.sampled_from([p for p in ALONG_ROWS if "mxfp8" in p[0]]),
    m=st.integers(1, 300),
    n=st.integers(1, 20),
    k=st.integers(1, 20),
)
@settings(max_examples=100, deadline=None)
def test_torchs_meta_kernel_accepts_mxfp8(layout, along, pair, m, n, k):
    if along == "rows":
        call = along_rows(layout, pair, 16 * n, 32 * k, 0)
        shape = (layout.rows, 16 * n)
    else:
        call = along_contraction(layout, ("mxfp8", "mxfp8+floor"), m, 16 * n, 0, 0)
        shape = (len(layout.ends), m, 16 * n)
    arguments = list(call.arguments())
    grouped_blas.require_accepted(*arguments)
    assert meta_product(*arguments).shape == shape
    is_batch = along == "rows"
    arguments[5] = [t[..., :-1] if is_batch else t[0] for t in arguments[5]]
    with pytest.raises(RuntimeError, match="For MXFP8, "):
        meta_product(*arguments)
    with pytest.raises(AssertionError, match=r"GroupedBlas\.cpp:"):
        grouped_blas.require_accepted(*arguments)


def changed(arguments, index, change):
    arguments = list(arguments)
    arguments[index] = change(arguments[index])
    return arguments


def on_first(change):
    return lambda scales: [change(scales[0]), *scales[1:]]


A, B, A_SCALES, A_SWIZZLE, B_SCALES, B_SCALING, ENDS_OF = 0, 1, 2, 4, 5, 6, 8
REFUSED = [  # along rows: what is changed, and the check that refuses it
    (A, lambda t: t.view(torch.uint8).t().contiguous().t().view(t.dtype), "GroupedBlas.cpp:525"),
    (B, lambda t: t.view(torch.uint8).contiguous().view(t.dtype), "GroupedBlas.cpp:526"),
    (A, lambda t: t[:, 16:], "GroupedBlas.cpp:542"),
    (B, lambda t: t[..., :24], "GroupedBlas.cpp:551"),
    (ENDS_OF, lambda t: t.view(1, -1), "GroupedBlas.cpp:564"),
    (ENDS_OF, torch.Tensor.long, "GroupedBlas.cpp:565"),
    (ENDS_OF, lambda t: t[1:], "GroupedMMUtils.h:50"),
    (A_SCALES, on_first(lambda t: t.view(torch.uint8)), "GroupedBlas.cpp:597"),
    (B_SCALING, lambda names: names[::-1] + names[:1], "GroupedBlas.cpp:597"),
    (A_SCALES, on_first(torch.Tensor.flatten), "GroupedBlas.cpp:330"),
    (A_SCALES, on_first(lambda t: t[: ROWS - 1]), "GroupedBlas.cpp:342"),
    (B_SCALES, on_first(lambda t: t[:, :-512]), "GroupedBlas.cpp:373"),
    (A_SCALES, on_first(lambda t: t[:256]), "grouped_common.cuh:100"),
    (ENDS_OF, lambda t: t.flip(0), "grouped_common.cuh:100"),
]
OF_MXFP8 = [(A_SWIZZLE, lambda names: [0], "GroupedBlas.cpp:620")]
OF_NVFP4 = [
    (A_SCALES, lambda scales: scales[:1], "GroupedBlas.cpp:597"),
    (B_SCALES, lambda scales: [scales[0], scales[1].sum()], "grouped_common.cuh:79"),
]


@pytest.mark.parametrize("spec", ["mxfp8", "mxfp4", "nvfp4"])
def test_each_check_refuses_what_torch_would(spec):
    arguments = along_rows(Layout(ENDS, ROWS), (spec, spec), 48, 64, 1).arguments()
    grouped_blas.require_accepted(*arguments)
    own = {"mxfp8": OF_MXFP8, "nvfp4": OF_NVFP4}.get(spec, [])
    for index, change, where in REFUSED + own:
        with pytest.raises(AssertionError, match=re.escape(where)):
            grouped_blas.require_accepted(*changed(arguments, index, change))


@given(layout=layouts(), spec=st.sampled_from(["mxfp8", "mxfp4", "nvfp4"]), cols=st.integers(1, 20))
@settings(max_examples=60, deadline=None)
def test_scales_are_torchaos(layout, spec, cols):
    """Compares each group's scales with those that torchao gives to the same kernels."""
    to_blocked = pytest.importorskip("torchao.prototype.mx_formats.utils").to_blocked

    def bytes_of(parts):
        parts = [to_blocked(part.view(torch.uint8)).flatten() for part in parts if part.numel()]
        return torch.cat([torch.empty(0, dtype=torch.uint8), *parts])

    def require_begins_with(scale, want):
        got = scale.view(torch.uint8).flatten()[: want.numel()]
        assert torch.equal(got, want)

    call = along_rows(layout, (spec, spec), 48, 32 * cols, 2)
    a_scales, b_scales, ends = (call.arguments()[i] for i in (A_SCALES, B_SCALES, ENDS_OF))
    pairs = list(itertools.pairwise([0, *ends.tolist()]))
    require_begins_with(a_scales[0], bytes_of(call.a.scale[i:j] for i, j in pairs))
    assert b_scales[0].numel() == bytes_of(call.b.scale).numel()
    require_begins_with(b_scales[0], bytes_of(call.b.scale))
    call = along_contraction(layout, (spec, spec), 33, 144, 0, 2)
    a_scales, b_scales, ends = (call.arguments()[i] for i in (A_SCALES, B_SCALES, ENDS_OF))
    blocks = ends // (16 if spec == "nvfp4" else 32)
    pairs = list(itertools.pairwise([0, *blocks.tolist()]))
    for side, scales in ((call.a, a_scales), (call.b, b_scales)):
        require_begins_with(scales[0], bytes_of(side.scale[:, i:j] for i, j in pairs))


@pytest.mark.parametrize(
    ("spec", "nan", "count"),
    [("mxfp8", 0xFF, 1), ("nvfp4", 0x7F, 32 * 4)],  # of a block; of the group, whose amax is NaN
)
def test_a_nan_scale_lies_in_its_group(spec, nan, count):
    x = torch.ones(40, 64)
    x[20, 40] = float("nan")
    table = mf.tensor.group_table(int32([8, 40]), 40)
    w = mf.tensor.quantize(torch.ones(2, 16, 64), spec)
    call = Call(mf.tensor.quantize(x, spec, groups=table), w, table, 64, 0)
    tiles = call.arguments()[2][0].view(torch.uint8).flatten().numpy()
    second = 128 * 4  # one tile of rows after the first group's
    assert tiles[second + (20 - 8) * 16 + 40 // (32 if spec == "mxfp8" else 16)] == nan
    assert (tiles == nan).sum() == (tiles[second:] == nan).sum() == count


def test_without_groups():
    call = along_rows(Layout([], 5), ("nvfp4", "nvfp4"), 16, 64, 0)
    a, b, *_, ends = call.arguments()
    assert (a.shape, b.shape, ends.shape) == ((5, 32), (0, 32, 16), (0,))


# ---- which products and sizes --------------------------------------------------------------------

SIZES = {"m": 64, "n": 64, "k": 64}


@pytest.mark.parametrize("groups", ["m", "k"])
@pytest.mark.parametrize("capability", [100, 103])
def test_products_that_the_engine_supports(capability, groups):
    def of(product):
        return ops.engine_of(product, capability, **SIZES, groups=groups)

    for product in ("mxfp8*mxfp8", "mxfp4+sr+rht*mxfp4+rht", "nvfp4*nvfp4+up", "nvfp4+pow2*nvfp4"):
        assert of(product) == "block_scaled_grouped"
    # The kernel reads E5M2 as E4M3, and has no product of two formats.
    for product in ("mxfp8/e5m2*mxfp8", "mxfp8*mxfp8/e5m2", "mxfp8*mxfp4", "nvfp4*mxfp4"):
        assert of(product) == "exact_grouped"
    for other in (0, 80, 89, 90, 110, 120, 121):
        assert ops.engine_of("mxfp8*mxfp8", other, **SIZES, groups=groups) != "block_scaled_grouped"


@pytest.mark.parametrize("product", ["mxfp8*mxfp8", "mxfp4*mxfp4", "nvfp4*nvfp4"])
def test_sizes_that_the_engine_takes(product):
    def of(groups="m", **changes):
        return ops.engine_of(product, 100, **{**SIZES, **changes}, groups=groups)

    for groups in ("m", "k"):
        for taken in ({"m": 1}, {"n": 16}, {"k": 32}, {"bias": groups == "m"}):
            assert of(groups, **taken) == "block_scaled_grouped"
        for left in ({"m": 0}, {"n": 0}, {"k": 0}, {"n": 24}, {"k": 48}):
            assert of(groups, **left) == "exact_grouped"
        assert of(groups, out_dtype=torch.float32) == "exact_grouped"
    # The kernel counts the bytes of a's scales in int32 along the contraction.
    large = {"m": 1 << 20, "k": 1 << 16}
    assert of("m", **large) == "block_scaled_grouped"
    assert of("k", **large) == "exact_grouped"


# ---- errors --------------------------------------------------------------------------------------


def test_bad_operands_are_refused():
    call = along_rows(Layout(ENDS, ROWS), ("mxfp8", "mxfp8"), 16, 64, 0)

    def run(**changes):
        return Call(**{**vars(call), **changes}).arguments()

    for spec in ("e4m3/row", "mxfp8/e5m2"):
        a = mf.tensor.quantize(torch.ones(ROWS, 64), spec, groups=call.table)
        with pytest.raises(ValueError, match="expected both operands under MXFP8 in E4M3"):
            run(a=a)
    with pytest.raises(ValueError, match="expected a of 96 columns"):
        run(k=96)
    with pytest.raises(ValueError, match="groups"):
        run(table=torch.zeros(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="matrices, one a group"):
        run(table=mf.tensor.group_table(int32([1]), ROWS))
    narrow = along_contraction(Layout(ENDS, ROWS), ("mxfp8", "mxfp8"), 16, 16, 0, 0)
    length = grouped_oracle.length(ROWS, len(ENDS), 16)
    codes = [torch.zeros(16, length, dtype=torch.uint8)] * 2
    scale = torch.zeros(16, -(-length // 32), dtype=torch.uint8)
    sides = (codes[0], scale, narrow.a.amax, codes[1], scale, narrow.b.amax, "mxfp8*mxfp8")
    with pytest.raises(ValueError, match="group_unit 0, 32, 64 or 128, got 16"):
        ops.block_scaled_grouped_operands(*sides, k=ROWS, groups=narrow.table, group_unit=16)
