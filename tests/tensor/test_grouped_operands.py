"""Operands with groups: their random bits, amaxes, values and transforms."""

import itertools
import pickle

import minifloat as mf
import numpy as np
import pytest
import torch
from minifloat._native import ops

from tests.support import grouped_oracle, oracle
from tests.support.specs import flagged, has_bf16_values
from tests.tensor.test_groups import (
    ENDS,
    ROWS,
    SPECS_1D,
    UNITS,
    grouped_values,
    int32,
    padded_rows,
    same_bytes,
)
from tests.tensor.test_quantize import same_floats, swizzled, values

TABLE = mf.tensor.group_table(int32(ENDS), ROWS)
WITH_AMAX = [spec for spec in SPECS_1D if oracle.parse(spec).rule in ("tensor", "row", "nvfp4")]


def cast(x, spec, columnwise, **options):
    given = torch.linspace(1, 4, len(ENDS)) if "delayed" in spec else None
    return mf.tensor.quantize(x, spec, columnwise=columnwise, groups=TABLE, amax=given, **options)


def last_column(unit):
    return int(TABLE[1 + UNITS.index(unit), -1])


def groups_under(unit):
    return list(enumerate(grouped_oracle.places(ENDS, ROWS, unit)))


# ---- random bits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["mxfp8+sr", "e4m3/row+sr", "nvfp4+sr+rht", "e4m3/1x128+sr"])
def test_permuted_rows_with_their_ids_give_permuted_bytes(spec):
    x = grouped_values("normal", ROWS, 64, ENDS[-1])
    order = torch.arange(ROWS)
    for begin, end in itertools.pairwise([0, *ENDS]):  # within each group: it has one amax
        order[begin:end] = begin + torch.randperm(end - begin)
    ids = torch.arange(ROWS, dtype=torch.int32) * 3 + 7
    plain = mf.tensor.quantize(x, spec, groups=TABLE, row_ids=ids, seed=1)
    moved = mf.tensor.quantize(x[order], spec, groups=TABLE, row_ids=ids[order], seed=1)
    last = ENDS[-1]
    assert torch.equal(moved.codes[:last], plain.codes[order[:last]])
    unmoved = mf.tensor.quantize(x[order], spec, groups=TABLE, row_ids=ids, seed=1)
    assert not torch.equal(unmoved.codes[:last], plain.codes[order[:last]])
    by_index = mf.tensor.quantize(x, spec, groups=TABLE, seed=1)
    same_ids = torch.arange(ROWS, dtype=torch.int32)
    named = mf.tensor.quantize(x, spec, groups=TABLE, row_ids=same_ids, seed=1)
    assert torch.equal(named.codes[:last], by_index.codes[:last])


@pytest.mark.parametrize("spec", ["mxfp8+sr", "nvfp4+sr", "e4m3/tensor+sr"])
def test_first_expert_counts_groups_from_the_first_global_expert(spec):
    """Casts the last groups alone, as a rank that holds those experts does."""
    x, first = values("normal", (ROWS, 48), 2)[: ENDS[-1]], 3
    begin = ENDS[first - 1]
    table = mf.tensor.group_table(int32([end - begin for end in ENDS[first:]]), ENDS[-1] - begin)
    whole = cast(x, spec, True, seed=1)
    rest = mf.tensor.quantize(
        x[begin:], spec, columnwise=True, groups=table, seed=1, first_expert=first
    )
    bits = oracle.parse(spec).elements.bits
    places = [group for _, group in groups_under(whole.group_unit)]
    skipped, end = (places[i].first * bits // 8 for i in (first, -1))
    end += places[-1].cols * bits // 8
    assert torch.equal(whole.codes[:, skipped:end], rest.codes[:, : end - skipped])
    other = mf.tensor.quantize(x[begin:], spec, columnwise=True, groups=table, seed=1)
    assert not torch.equal(other.codes[:, : end - skipped], rest.codes[:, : end - skipped])

    weights = values("normal", (5, 32, 48), 3)
    for columnwise in (False, True):
        whole = mf.tensor.quantize(weights, spec, columnwise=columnwise, seed=1)
        rest = mf.tensor.quantize(weights[2:], spec, columnwise=columnwise, seed=1, first_expert=2)
        assert torch.equal(whole.codes[2:], rest.codes)


# ---- amaxes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("spec", WITH_AMAX)
def test_amaxes_are_those_of_groups(spec, columnwise):
    x = grouped_values("special", ROWS, 40, ENDS[-1], seed=4)
    has_row = oracle.parse(spec).has_rows
    for flag in ("", "+rht", "+rht64"):
        text = flagged(spec, flag)
        got = mf.tensor.amax(x, text, columnwise=columnwise, seed=2, stream=3, groups=TABLE)
        assert got.shape == (((len(ENDS), 40) if columnwise else (ROWS,)) if has_row else (7,))
        points = oracle.parse(text).points
        signs = oracle.eden_signs(oracle.mix_seed(2, 0), 3) if "eden" in text else oracle.SIGNS
        for e, group in groups_under(128):
            part = padded_rows(x, group) if columnwise else x[group.begin : group.end]
            part = (part.t().contiguous() if columnwise else part).numpy()
            if points and part.size > 0:
                with np.errstate(invalid="ignore"):
                    part = oracle.hadamard(part, points, signs)
            by_row = slice(group.begin, group.end) if has_row and not columnwise else e
            want = oracle.largest(part, 1 if has_row else None)
            same_floats(got[by_row], want, f"{text}, group {e}")


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("spec", ["nvfp4", "e4m3/tensor", "e4m3/row", "e4m3/row+exact+rht"])
def test_amaxes_that_are_passed(spec, columnwise):
    """Passes the amaxes of other values; those of the values themselves change no byte."""
    x = grouped_values("normal", ROWS, 40, ENDS[-1])
    current = mf.tensor.amax(x, spec, columnwise=columnwise, groups=TABLE)
    plain = cast(x, spec, columnwise)
    with_same = mf.tensor.quantize(x, spec, columnwise=columnwise, groups=TABLE, amax=current)
    for passed in (current, current * 1.5 + 0.1):
        q = mf.tensor.quantize(x, spec, columnwise=columnwise, groups=TABLE, amax=passed)
        want = grouped_oracle.quantize(x.numpy(), spec, ENDS, columnwise, given_amax=passed.numpy())
        for name in ("codes", "scale", "amax"):
            got, expected = getattr(q, name), getattr(want, name)
            got = got if got.dtype == torch.float32 else got.view(torch.uint8)
            same = torch.from_numpy(expected.values) == got
            assert same[torch.from_numpy(expected.is_written)].all(), name
    written = torch.from_numpy(want.codes.is_written)
    assert torch.equal(plain.codes[written], with_same.codes[written])


# ---- values and transforms -----------------------------------------------------------------------


def dense_groups(x, q):
    """Yields each group's part of an operand, and the dense cast of its rows.

    A part is where the group lies in rows or columns of the operand's elements.
    """
    for e, group in groups_under(q.group_unit or 128):
        amax = None
        if "delayed" in q.spec:
            amax = torch.linspace(1, 4, len(ENDS))[e]
        rows = padded_rows(x, group) if q.columnwise else x[group.begin : group.end]
        origin = (0, e * x.shape[1]) if q.columnwise else (group.begin, 0)  # of random bits
        one = mf.tensor.quantize(rows, q.spec, columnwise=q.columnwise, amax=amax, origin=origin)
        columns = slice(group.first, group.first + group.cols)
        yield e, one, (slice(None), columns) if q.columnwise else slice(group.begin, group.end)


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("spec", SPECS_1D)
def test_values_are_those_of_dense_operands(spec, columnwise):
    for flag, unit in (("", 0), ("+rht", 0), ("+rht32", 128)):
        x = grouped_values("wide", ROWS, 44, ENDS[-1], seed=5)
        q = cast(x, flagged(spec, flag), columnwise, group_unit=unit)
        fp32, bf16 = mf.tensor.dequantize(q), q.dequantize(torch.bfloat16)
        groups = {"groups": q.groups, "group_unit": q.group_unit}
        decoded = ops.decode(q.codes, q.scale, q.spec, q.shape[-1], **groups)
        for e, one, at in dense_groups(x, q):
            for got, want in (
                (fp32, mf.tensor.dequantize(one)),
                (bf16, mf.tensor.dequantize(one, torch.bfloat16)),
                (decoded, ops.decode(one.codes, one.scale, one.spec, one.shape[-1])),
            ):
                assert same_bytes(got[at], want), f"{q.spec}, group {e}"


@pytest.mark.parametrize("spec", filter(has_bf16_values, SPECS_1D))
def test_decoded_values_of_a_cast(spec):
    x = grouped_values("normal", ROWS, 44, ENDS[-1], seed=6)
    given = torch.ones(7) if "delayed" in spec else None
    out = ops.quantize(
        x, spec, spec, groups=TABLE, amax_row=given, amax_col=given, decoded_row=True,
        decoded_col=True, rng=torch.tensor([1, 2]),
    )  # fmt: skip
    unit = grouped_oracle.least_unit(spec)
    total = grouped_oracle.length(ROWS, len(ENDS), unit)
    for first, cols, group_unit in ((0, 44, 0), (4, total, unit)):
        codes, scale, _, decoded = out[first : first + 4]
        want = ops.decode(codes, scale, spec, cols, groups=TABLE, group_unit=group_unit)
        written = slice(ENDS[-1]) if first == 0 else (slice(None), slice(last_column(unit)))
        assert same_bytes(decoded[written], want[written])


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("spec", ["mxfp4", "mxfp4+rht", "nvfp4+pow2", "nvfp4+pow2+rht64"])
def test_fp4_as_fp8_has_a_factor_for_each_row_of_a_group(spec, columnwise):
    for kind, unit in (("wide", 0), ("special", 0), ("sparse", 128)):
        x = grouped_values(kind, ROWS, 44, ENDS[-1], seed=7)
        q = cast(x, spec, columnwise, group_unit=unit)
        codes, factor = ops.fp4_as_fp8(
            q.codes, q.scale, q.amax, q.spec, q.shape[-1], groups=TABLE, group_unit=q.group_unit
        )
        assert factor.shape == ((len(ENDS), 44) if columnwise else (ROWS,))
        for e, one, at in dense_groups(x, q):
            want = ops.fp4_as_fp8(one.codes, one.scale, one.amax, one.spec, one.shape[-1])
            assert same_bytes(codes[at], want[0]), f"group {e}"
            same_floats(factor[e] if columnwise else factor[at], want[1].numpy(), f"group {e}")


@pytest.mark.parametrize("unit", [0, *UNITS])
@pytest.mark.parametrize("points", [16, 32, 64, 128])
def test_hadamard_of_groups(points, unit):
    x = grouped_values("normal", ROWS, 70, ENDS[-1], seed=8)
    rowwise = mf.tensor.hadamard(x, points, groups=TABLE)
    assert rowwise.shape == (ROWS, 70 + -70 % points)
    assert same_bytes(rowwise[: ENDS[-1]], mf.tensor.hadamard(x[: ENDS[-1]], points))
    taken = max(unit, points)
    y = mf.tensor.hadamard(x, points, columnwise=True, groups=TABLE, group_unit=unit)
    assert y.shape == (70, grouped_oracle.length(ROWS, len(ENDS), taken))
    for _, group in groups_under(taken):
        want = oracle.hadamard(grouped_oracle.padded_columns(x.numpy(), group), points)
        same_floats(y[:, group.first : group.first + group.cols].float(), want, f"{group}")


def test_a_grouped_operand_pickles_with_its_groups():
    q = cast(grouped_values("normal", ROWS, 32, ENDS[-1]), "nvfp4", True)
    twin = pickle.loads(pickle.dumps(q))
    assert torch.equal(twin.groups, TABLE)
    assert (twin.shape, twin.group_unit, twin.columnwise) == (q.shape, 32, True)
    written = (slice(None), slice(last_column(32)))
    assert same_bytes(mf.tensor.dequantize(twin)[written], mf.tensor.dequantize(q)[written])


@pytest.mark.parametrize(
    ("groups", "ends"),
    [
        ("m", [0, 130, 130, 300]),
        ("k", [3, 3, 16, 22]),
        ("m", [0, 130, 130, 200]),
        ("k", [3, 3, 16, 18]),
    ],
)
def test_grouped_swizzle_and_back(groups, ends):
    """The groups may end before the last row or column of scales."""
    scale = torch.randint(0, 256, (300, 22), dtype=torch.uint8)
    offs = int32(ends)
    tiled = mf.tensor.swizzle_scales(scale, offs=offs, groups=groups)
    start, at = 0, 0
    for end in ends:
        part = scale[start:end] if groups == "m" else scale[:, start:end]
        want = swizzled(part.numpy()) if end > start else np.zeros(0, np.uint8)
        assert (tiled.flatten()[at : at + len(want)].numpy() == want).all()
        start, at = end, at + len(want)
    back = mf.tensor.unswizzle_scales(tiled, 300, 22, offs=offs, groups=groups)
    inside = (slice(0, ends[-1]),) if groups == "m" else (slice(None), slice(0, ends[-1]))
    assert back.shape == scale.shape
    assert torch.equal(back[inside], scale[inside])
