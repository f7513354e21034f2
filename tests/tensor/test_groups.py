"""Casts of groups of rows: bytes against the oracle of groups, over ends, specs, units and dtypes.

Rows past the last group are NaN in every test here: they must change nothing.
"""

import itertools
from dataclasses import dataclass

import minifloat as mf
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support import grouped_oracle, oracle
from tests.support.same_bits import same_bytes
from tests.support.specs import SPECS, flagged
from tests.tensor.test_quantize import FLAGS, values, with_strides

SPECS_1D = [spec for spec in SPECS if oracle.parse(spec).block[0] <= 1]
UNITS = (16, 32, 64, 128)
SIZES = [0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129]  # rows of a group
ENDS = [0, 1, 18, 18, 50, 65, 194]  # the first group and one within are empty
ROWS = 207


def int32(numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def grouped_values(kind, rows, cols, last_end, seed=0):
    x = values(kind, (rows, cols), seed)
    x[last_end:] = float("nan")
    return x


def passed_amax(spec, rows, cols, count, columnwise):
    """Returns an active amax of each group for a spec that needs one, else None."""
    if "delayed" not in spec and "row+exact" not in spec:
        return None
    of_rows = (count, cols) if columnwise else (rows,)
    shape = of_rows if oracle.parse(spec).has_rows else (count,)
    return torch.linspace(0.25, 6, int(np.prod(shape))).reshape(shape)


def require_same(name, got, want):
    """Compares the written entries of a tensor with the oracle's, bit for bit; NaNs are equal."""
    if got.dtype != torch.float32:
        got = got.view(torch.uint8)
    got = got.numpy()
    assert got.shape == want.values.shape, f"{name}: {got.shape} for {want.values.shape}"
    both_nan = np.zeros(got.shape, bool)
    if got.dtype == np.float32:
        both_nan = np.isnan(got) & np.isnan(want.values)
    bits = [t.view(np.int32) if t.dtype == np.float32 else t for t in (got, want.values)]
    wrong = (bits[0] != bits[1]) & ~both_nan & want.is_written
    first = tuple(np.argwhere(wrong)[0]) if wrong.any() else None
    assert not wrong.any(), (
        f"{name}: {wrong.sum()} of {want.is_written.sum()} differ, first at {first}: "
        f"{got[first]} for {want.values[first]}"
    )


def require_bytes(q, want):
    require_same(f"{q.spec} codes", q.codes, want.codes)
    require_same(f"{q.spec} scale", q.scale, want.scale)
    if want.amax is not None:
        require_same(f"{q.spec} amax", q.amax, want.amax)
    else:
        assert q.amax.shape == (0,)


# ---- the oracle ----------------------------------------------------------------------------------


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("spec", SPECS_1D)
def test_every_spec_and_flag(spec, columnwise):
    ids = torch.randint(0, 2**31 - 1, (ROWS,), dtype=torch.int32)
    groups = mf.tensor.group_table(int32(ENDS), ROWS)
    key = oracle.mix_seed(5, 0)
    for i, flag in enumerate(FLAGS):
        kind = ("normal", "wide", "special", "tiny")[i % 4]
        x = grouped_values(kind, ROWS, 37, ENDS[-1], seed=len(spec) + i)
        amax = passed_amax(spec, ROWS, 37, len(ENDS), columnwise)
        options = {"row_ids": None if i % 2 else ids, "first_expert": 3}
        q = mf.tensor.quantize(
            x,
            flagged(spec, flag),
            columnwise=columnwise,
            groups=groups,
            amax=amax,
            seed=5,
            **options,
        )
        want = grouped_oracle.quantize(
            x.numpy(),
            flagged(spec, flag),
            ENDS,
            columnwise,
            given_amax=None if amax is None else amax.numpy(),
            row_ids=None if i % 2 else ids.numpy(),
            first_expert=3,
            key=key,
        )
        require_bytes(q, want)
        unit = grouped_oracle.least_unit(flagged(spec, flag))
        total = grouped_oracle.length(ROWS, len(ENDS), unit)
        assert q.shape == ((37, total) if columnwise else (ROWS, 37))
        assert q.group_unit == (unit if columnwise else 0)
        assert q.groups is groups


@dataclass(frozen=True)
class Layout:
    ends: list[int]
    rows: int


@st.composite
def layouts(draw):
    """Draws groups of sizes around those of blocks; the last end may lie below the rows."""
    count = draw(st.one_of(st.integers(1, 4), st.integers(1, 40)))
    few = st.sampled_from(SIZES if count <= 8 else SIZES[:9])
    sizes = draw(st.lists(few, min_size=count, max_size=count))
    empty = draw(st.sampled_from(["", "", "first", "last", "first last", "all"]))
    sizes[0] = 0 if "first" in empty else sizes[0]
    sizes[-1] = 0 if "last" in empty else sizes[-1]
    sizes = [0] * count if empty == "all" else sizes
    ends = np.cumsum(sizes).tolist()
    return Layout(ends, ends[-1] + draw(st.sampled_from([0, 0, 1, 16, 40])))


@given(
    layout=layouts(),
    spec=st.sampled_from(SPECS_1D),
    flag=st.sampled_from(FLAGS),
    cols=st.sampled_from([1, 2, 15, 16, 17, 33, 64, 130]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    memory=st.sampled_from(["contiguous", "strided"]),
    kind=st.sampled_from(["normal", "wide", "sparse", "special"]),
    columnwise=st.booleans(),
    unit=st.sampled_from((0, *UNITS)),
    seed=st.integers(0, 1000),
)
@example(Layout([0], 0), "nvfp4", "+sr", 16, torch.float32, "contiguous", "normal", True, 0, 0)
@example(Layout([0], 5), "e4m3/row", "", 16, torch.float32, "contiguous", "normal", False, 0, 0)
@settings(max_examples=400, deadline=None)
def test_any_groups(layout, spec, flag, cols, dtype, memory, kind, columnwise, unit, seed):
    x = grouped_values(kind, layout.rows, cols, layout.ends[-1], seed)
    x = with_strides(x.to(dtype), memory)
    count = len(layout.ends)
    ids = torch.randperm(2**20, generator=torch.Generator().manual_seed(seed))[: layout.rows]
    amax = passed_amax(spec, layout.rows, cols, count, columnwise)
    q = mf.tensor.quantize(
        x,
        flagged(spec, flag),
        columnwise=columnwise,
        amax=amax,
        seed=seed,
        stream=-7,
        groups=mf.tensor.group_table(int32(layout.ends), layout.rows),
        group_unit=unit,
        row_ids=ids.int(),
        first_expert=seed % 3,
    )
    want = grouped_oracle.quantize(
        x.float().numpy(),
        flagged(spec, flag),
        layout.ends,
        columnwise,
        unit,
        given_amax=None if amax is None else amax.numpy(),
        row_ids=ids.numpy(),
        first_expert=seed % 3,
        key=oracle.mix_seed(seed, 0),
        stream=-7 & oracle.MASK,
    )
    require_bytes(q, want)


@given(
    rows=st.sampled_from([0, 1, 17, 200, 2**31 - 128 * 44]),
    near=st.lists(st.integers(-5, 205), max_size=40),
    far=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=3),
)
@settings(max_examples=200, deadline=None)
def test_ends_that_are_not_legal_are_moved(rows, near, far):
    offs = near[: len(near) // 2] + far + near[len(near) // 2 :]
    got = mf.tensor.group_table(int32(offs), rows)
    assert got.dtype == torch.int32
    assert np.array_equal(got.numpy(), grouped_oracle.table(offs, rows))
    legal = grouped_oracle.ends(offs, rows)
    assert torch.equal(got, mf.tensor.group_table(int32(legal), rows))


def test_casts_of_moved_ends():
    x = grouped_values("normal", 60, 40, 50)
    for columnwise, ends in itertools.product(
        (False, True), ([-3, 20, 7, 50, 40], [20, 0, 50, 50, -(2**31)], [50, 2, 3, 4, 5])
    ):
        table = mf.tensor.group_table(int32(ends), 60)
        q = mf.tensor.quantize(x, "nvfp4", columnwise=columnwise, groups=table)
        require_bytes(q, grouped_oracle.quantize(x.numpy(), "nvfp4", ends, columnwise))
    past = mf.tensor.group_table(int32([20, 2**31 - 1]), 60)
    x = x.nan_to_num(1.0)
    q = mf.tensor.quantize(x, "nvfp4", groups=past)
    require_bytes(q, grouped_oracle.quantize(x.numpy(), "nvfp4", [20, 60]))


@pytest.mark.parametrize("spec", SPECS_1D)
def test_no_groups_at_all(spec):
    table = mf.tensor.group_table(int32([]), 40)
    assert table.tolist() == [[0]] * 5
    x = torch.full((40, 36), float("nan"))
    parsed = oracle.parse(spec)
    for columnwise in (False, True):
        amax = passed_amax(spec, 40, 36, 0, columnwise)
        q = mf.tensor.quantize(x, spec, columnwise=columnwise, groups=table, amax=amax)
        unit = grouped_oracle.least_unit(spec)
        total = grouped_oracle.length(40, 0, unit)
        assert q.shape == ((36, total) if columnwise else (40, 36))
        padded = 36 + -36 % max(oracle.parse(spec).points, 1)  # of whole transforms
        assert mf.tensor.dequantize(q).shape == ((36, total) if columnwise else (40, padded))
        if parsed.rule in ("tensor", "nvfp4") and not parsed.has_rows:
            assert q.amax.shape == (0,)
            assert mf.tensor.amax(x, spec, columnwise=columnwise, groups=table).shape == (0,)
        if parsed.has_rows:
            assert q.amax.shape == ((0, 36) if columnwise else (40,))


# ---- dense casts of the same rows ----------------------------------------------------------------


def padded_rows(x, group):
    """Returns a group's rows, and rows of zeros to whole units."""
    rows = x[group.begin : group.end]
    return torch.nn.functional.pad(rows, (0, 0, 0, group.cols - len(rows)))


def cut_columns(q, group):
    """Returns the group's columns of the codes and of the scales."""
    bits, block = oracle.parse(q.spec).elements.bits, oracle.parse(q.spec).block[1]
    first, end = group.first, group.first + group.cols
    codes = q.codes[:, first * bits // 8 : end * bits // 8]
    return codes, q.scale[:, first // block : end // block] if block else None


@pytest.mark.parametrize("flag", ["+sr", "+rht", "+sr+rht128"])
@pytest.mark.parametrize("spec", SPECS_1D)
def test_each_group_is_the_dense_cast_of_its_rows(spec, flag):
    """Compares with dense casts at the groups' origins, of their rows alone and of padded rows."""
    x = grouped_values("wide", ROWS, 48, ENDS[-1])
    table = mf.tensor.group_table(int32(ENDS), ROWS)
    spec = flagged(spec, flag)
    unit, bits = grouped_oracle.least_unit(spec), oracle.parse(spec).elements.bits
    given = torch.linspace(1, 4, len(ENDS)) if "delayed" in spec else None
    row = mf.tensor.quantize(x, spec, groups=table, amax=given, seed=1)
    col = mf.tensor.quantize(x, spec, columnwise=True, groups=table, amax=given, seed=1)
    for e, group in enumerate(grouped_oracle.places(ENDS, ROWS, unit)):
        amax = None if given is None else given[e]
        rows = slice(group.begin, group.end)
        one = mf.tensor.quantize(x[rows], spec, amax=amax, seed=1, origin=(group.begin, 0))
        assert same_bytes(row.codes[rows], one.codes)
        of_rows = oracle.parse(spec).has_rows or oracle.parse(spec).block[1]
        assert same_bytes(row.scale[rows] if of_rows else row.scale[e], one.scale)
        if one.amax.shape != (0,):
            assert same_bytes(row.amax[rows] if one.amax.dim() else row.amax[e], one.amax)

        codes, scale = cut_columns(col, group)
        options = {"columnwise": True, "amax": amax, "seed": 1, "origin": (0, e * 48)}
        whole = mf.tensor.quantize(padded_rows(x, group), spec, **options)
        assert same_bytes(codes, whole.codes)
        assert same_bytes(col.scale[e] if scale is None else scale, whole.scale)
        if whole.amax.shape != (0,):
            assert same_bytes(col.amax[e], whole.amax)
        alone = mf.tensor.quantize(x[rows], spec, **options)
        count = (group.end - group.begin) * bits // 8  # whole bytes of its rows' codes
        assert same_bytes(codes[:, :count], alone.codes[:, :count])
        if scale is not None and alone.scale.numel() > 0:
            assert same_bytes(scale[:, : alone.scale.shape[1]], alone.scale)


@given(
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=8),
    added=st.sampled_from([1, 3, 16, 40, 128]),
    spec=st.sampled_from(SPECS_1D),
    flag=st.sampled_from(FLAGS),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_zero_rows_at_a_groups_end_change_no_other_code(sizes, added, spec, flag, data):
    spec = flagged(spec, flag)
    longer = data.draw(st.integers(0, len(sizes) - 1))
    ends = np.cumsum(sizes).tolist()
    last = ends[-1]
    x = values("normal", (last, 33), 1)
    more = torch.cat([x[: ends[longer]], torch.zeros(added, 33), x[ends[longer] :]])
    kept = torch.ones(len(more), dtype=torch.bool)
    kept[ends[longer] : ends[longer] + added] = False
    ids = int32(range(len(more)))
    moved = [end + added * (e >= longer) for e, end in enumerate(ends)]
    tables = (
        mf.tensor.group_table(int32(ends), last),
        mf.tensor.group_table(int32(moved), len(more)),
    )
    for columnwise in (False, True):
        amax = torch.linspace(1, 2, len(sizes)) if "delayed" in spec else None
        options = {"columnwise": columnwise, "amax": amax, "seed": 3}
        before = mf.tensor.quantize(x, spec, groups=tables[0], row_ids=ids[kept], **options)
        after = mf.tensor.quantize(more, spec, groups=tables[1], row_ids=ids, **options)
        if not columnwise:
            assert same_bytes(before.codes, after.codes[kept])
            continue
        units = [t[UNITS.index(before.group_unit) + 1].tolist() for t in tables]
        bits = oracle.parse(spec).elements.bits
        for e in range(len(sizes)):
            bytes_of = [u[e] * bits // 8 for u in units]
            count = (units[0][e + 1] - units[0][e]) * bits // 8
            old, new = (
                q.codes[:, first : first + count] for q, first in zip((before, after), bytes_of)
            )
            assert same_bytes(old, new), f"group {e}"
