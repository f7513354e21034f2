"""Groups of rows on the GPU: the CPU's bytes inside of groups, whatever lies outside.

`-k quick` is the subset for compute-sanitizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from minifloat._native import ops
from minifloat.spec import Spec
from torch import Tensor

from tests.gpu.sweep import (
    DTYPES,
    OUTPUTS,
    STREAMS,
    describe,
    each_direction,
    is_stochastic,
    on,
    random_bytes,
    recipe_pairs,
    rng_tensor,
    values,
)
from tests.support.same_bits import on_cpu, require_same
from tests.support.specs import BASES as ALL_BASES
from tests.support.specs import has_bf16_values

pytestmark = pytest.mark.gpu


def has_blocks_2d(spec: str) -> bool:
    return spec.split("+")[0].endswith(("128x128", "32x32", "16x16"))


BASES = [b for b in ALL_BASES if not has_blocks_2d(b)]
PAIRS = [pair for pair in recipe_pairs() if not any(map(has_blocks_2d, pair))]
FLAGS = ["", "+sr", "+rht", "+sr+rht", "+rht64", "+sr+rht128"]
ROW_BASES = [b for b in BASES if Spec.parse(b).amax_of == "row"]
TENSOR_BASES = [b for b in BASES if Spec.parse(b).amax_of == "tensor"]

# Ends of groups, and the rows of x: empty groups in every place, sizes around each unit, a last end
# below the rows, one group, more groups than a warp has lanes, and ends that must be moved.
ENDS: list[tuple[list[int], int]] = [
    ([40], 40),
    ([0, 0, 0], 50),
    ([0, 1, 16, 33, 33, 160], 160),
    ([15, 31, 63, 190, 190], 300),
    ([127, 255, 384, 513], 513),
    ([17, 17, 49, 113, 242, 370], 400),
    ([*range(0, 41 * 3, 3)], 140),
    ([50, 20, -7, 60, 900, 70], 128),
    ([256, 384, 384, 640], 768),
]
COLS = [1, 33, 128, 144, 384]


# ---- Groups --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grouped:
    """Rows in groups: x, with NaN after the last group, and the table."""

    x: Tensor
    table: Tensor
    count: int

    @property
    def end(self) -> int:
        return int(self.table[0, -1])

    def last_col(self, unit: int) -> int:
        """Returns the columns of all groups under a unit."""
        return int(self.table[{16: 1, 32: 2, 64: 3, 128: 4}[unit], -1])


def grouped(
    offs: list[int], rows: int, cols: int, dtype: torch.dtype, kind: str = "normal"
) -> Grouped:
    table = ops.group_table(torch.tensor(offs, dtype=torch.int32), rows)
    x = values(kind, (rows, cols), dtype, seed=rows).clone()
    x[int(table[0, -1]) :] = float("nan")
    return Grouped(x, table, len(offs))


def unit_of(spec: str, at_least: int = 0) -> int:
    """Returns the unit of the columnwise operand."""
    return max(Spec.parse(spec).group_unit, at_least)


def written(name: str, out: Tensor, g: Grouped, spec: str, unit: int) -> Tensor:
    """Returns the part of an output that lies in groups."""
    part, side = name.split("_")
    if side == "row":
        is_of_rows = part in ("codes", "decoded") or out.dim() == 2 or "/row" in spec
        return out[: g.end] if is_of_rows and out.dim() else out
    if part == "amax" or out.dim() != 2 or (spec.startswith("e4m3/row") and part == "scale"):
        return out
    length = unit * ((g.x.shape[0] + unit - 1) // unit + g.count)
    return out[:, : g.last_col(unit) * out.shape[1] // length]


def require_same_groups(
    device: torch.device,
    g: Grouped,
    row: str,
    col: str,
    *,
    unit: int = 0,
    note: str = "",
    **kw: Any,
) -> None:
    """Compares quantize on the device with the CPU, each output inside of groups."""
    arguments: dict[str, Any] = {**STREAMS, "groups": g.table, "group_unit": unit, **kw}
    for side, spec in (("decoded_row", row), ("decoded_col", col)):
        arguments[side] = arguments.get(side, False) and has_bf16_values(spec)
    if is_stochastic(row) or is_stochastic(col):
        arguments["rng"] = rng_tensor()
    want = ops.quantize(g.x, row, col, **arguments)
    there = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in arguments.items()}
    got = on_cpu(ops.quantize(on(device, g.x), row, col, **there))
    what = f"'{row}', '{col}' of {describe(g.x)}, ends {g.table[0].tolist()[:9]}{note}"
    for name, a, b in zip(OUTPUTS, got, want):
        spec = row if name.endswith("row") else col
        assert a.shape == b.shape, f"{what}: {name} {tuple(a.shape)} for {tuple(b.shape)}"
        if not spec:
            continue
        cut = (g, spec, unit_of(col, unit) if col else 0)
        require_same(written(name, a, *cut), written(name, b, *cut), f"{what}: {name}")


def cases(cols: list[int] = COLS) -> Iterator[Grouped]:
    """Yields every list of ends, with each width and both dtypes in turn."""
    for i, (offs, rows) in enumerate(ENDS):
        for j, dtype in enumerate(DTYPES):
            for k in (0, 1):
                yield grouped(offs, rows, cols[(i + 2 * j + k) % len(cols)], dtype)


# ---- The table -----------------------------------------------------------------------------------


def test_quick_table(device):
    """Builds tables of 0 to 1,023 groups: ends that rise, fall, are negative or too large."""
    g = torch.Generator().manual_seed(3)
    for groups in (0, 1, 2, 31, 32, 33, 64, 100, 255, 256, 992, 993, 1023):
        rising = torch.randint(0, 300, (groups,), generator=g).cumsum(0)
        for offs in (rising, torch.randint(-500, 5000, (groups,), generator=g), rising * 0):
            for rows in (0, 1, 1000, int(rising.sum()) // 2, 300 * groups):
                ends = offs.to(torch.int32)
                got = ops.group_table(ends.to(device), rows)
                require_same(got, ops.group_table(ends, rows), f"{groups} groups of {rows} rows")


# ---- quantize ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("base", BASES)
def test_quantize(device, base, flags):
    spec = base + flags
    for g in cases():
        for row, col in each_direction(spec):
            require_same_groups(device, g, row, col)


@pytest.mark.parametrize(("row", "col"), PAIRS)
def test_recipes(device, row, col):
    """Runs the preset kernels: bf16, whole tiles of columns."""
    pairs = {(row, col), (row, ""), ("", col), (row, row), (col, col)} - {("", "")}
    for (offs, rows), cols in itertools.product(ENDS, (128, 512)):
        for kind in ("normal", "special", "wide"):
            g = grouped(offs, rows, cols, torch.bfloat16, kind)
            amax = {}
            if "+delayed" in row + col:
                amax = {
                    "amax_row": torch.rand(g.count) + 0.5,
                    "amax_col": torch.rand(g.count) + 0.5,
                }
            for a, b in pairs:
                given = {k: v for k, v in amax.items() if (a if k == "amax_row" else b)}
                for decoded in (False, True):
                    asked = {"decoded_row": decoded and bool(a), "decoded_col": decoded and bool(b)}
                    require_same_groups(device, g, a, b, note=f" ({kind})", **given, **asked)


@pytest.mark.parametrize("spec", ["e4m3/tensor", "e4m3/row", "mxfp8", "mxfp4+rht", "nvfp4+sr+rht"])
def test_larger_units(device, spec):
    for unit in (32, 64, 128):
        for g in cases([128, 144]):
            require_same_groups(device, g, spec, spec, unit=unit, note=f" (unit {unit})")
            require_same_groups(device, g, "", spec, unit=unit, note=f" (unit {unit})")


@pytest.mark.parametrize("base", ["e4m3/tensor", "e4m3/row", "mxfp8", "mxfp4", "nvfp4+pow2"])
def test_random_counter(device, base):
    """Rounds by row ids and from a first expert, in general and preset kernels."""
    for cols, flags in itertools.product((128, 33), ("+sr", "+sr+rht")):
        g = grouped([15, 31, 63, 190, 190], 300, cols, torch.bfloat16)
        ids = torch.randperm(100_000, generator=torch.Generator().manual_seed(1))[:300]
        for row, col in each_direction(base + flags):
            for row_ids, first in itertools.product((None, ids.to(torch.int32)), (0, 5)):
                require_same_groups(device, g, row, col, row_ids=row_ids, first_expert=first)


def test_amaxes_of_columns(device):
    for cols, dtype in itertools.product((1, 48, 128, 512), (torch.float32, torch.bfloat16)):
        for offs, rows in ENDS:
            g = grouped(offs, rows, cols, dtype, "special")
            require_same_groups(device, g, "e4m3/row", "", amaxes_of_columns=True)


@pytest.mark.parametrize("base", ROW_BASES + TENSOR_BASES)
def test_given_amax(device, base):
    specs = [base] if Spec.parse(base).rule != "tensor" else [base, base + "+delayed"]
    for spec, g in itertools.product(specs, cases([128, 33])):
        rows, cols = g.x.shape
        is_of_rows = base in ROW_BASES
        amax_row = torch.rand(rows if is_of_rows else g.count) + 0.1
        amax_col = torch.rand((g.count, cols) if is_of_rows else (g.count,)) + 0.1
        for row, col in each_direction(spec):
            given = {"amax_row": amax_row if row else None, "amax_col": amax_col if col else None}
            require_same_groups(device, g, row, col, note=" (given amax)", **given)


def test_many_groups(device):
    g = torch.Generator().manual_seed(9)
    sizes = torch.randint(0, 70, (300,), generator=g)
    many = grouped(sizes.cumsum(0).tolist(), int(sizes.sum()) + 77, 256, torch.bfloat16)
    for row, col in PAIRS:
        if "+delayed" not in row + col:
            require_same_groups(device, many, row, col)


@pytest.mark.parametrize("base", BASES)
def test_padded_rows(device, base):
    """Casts a view with a gap between its rows."""
    g = grouped([15, 31, 63, 190, 190], 200, 160, torch.bfloat16)
    view = Grouped(g.x[:, 16:144], g.table, g.count)
    for row, col in each_direction(base):
        require_same_groups(device, view, row, col)


def test_quick_casts(device):
    for base in BASES:
        for cols, dtype in ((128, torch.bfloat16), (33, torch.float32)):
            g = grouped([0, 17, 17, 160], 200, cols, dtype)
            require_same_groups(device, g, base, base, decoded_row=True, decoded_col=True)
            require_same_groups(device, g, base + "+sr", base + "+sr+rht")


# ---- Gathered rows -------------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "col"), PAIRS)
def test_gathered_rows(device, row, col):
    """Casts rows through an index: the bytes of gathering first. No index past the end is read."""
    g = torch.Generator().manual_seed(4)
    for (offs, rows), cols in itertools.product(ENDS, (128, 512, 33)):
        dtype = torch.float32 if cols == 33 else torch.bfloat16
        source = values("normal", (57, cols), dtype, seed=cols)
        table = ops.group_table(torch.tensor(offs, dtype=torch.int32), rows)
        index = torch.randint(57, (rows,), generator=g, dtype=torch.int32)
        gathered = Grouped(source[index.long()], table, len(offs))
        index[gathered.end :] = 2**30
        kw: dict[str, Any] = {**STREAMS, "groups": table}
        if is_stochastic(row) or is_stochastic(col):
            kw["rng"] = rng_tensor()
        if "+delayed" in row + col:
            kw |= {"amax_row": torch.ones(len(offs)), "amax_col": torch.ones(len(offs))}
        there = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in kw.items()}
        there["rows_from"] = index.to(device)
        for a, b in ((row, col), (row, ""), ("", col)):
            given = [
                k for k in ("amax_row", "amax_col") if k in kw and not (a if "row" in k else b)
            ]
            if not (a or b):
                continue
            drop = lambda d: {k: v for k, v in d.items() if k not in given}  # noqa: B023, E731
            want = ops.quantize(gathered.x, a, b, **drop(kw))
            got = ops.quantize(source.to(device), a, b, **drop(there))
            for name, x, y in zip(OUTPUTS, got, want):
                spec = a if name.endswith("row") else b
                if spec:
                    cut = (gathered, spec, unit_of(b) if b else 0)
                    what = f"'{a}', '{b}' of {rows} rows from {describe(source)}: {name}"
                    require_same(written(name, x.cpu(), *cut), written(name, y, *cut), what)


@pytest.mark.parametrize("flags", ["", "+rht", "+rht128"])
@pytest.mark.parametrize("base", ROW_BASES + TENSOR_BASES)
def test_amax_of_gathered_rows(device, base, flags):
    g = torch.Generator().manual_seed(5)
    for (offs, rows), cols, columnwise in itertools.product(ENDS, (33, 256), (False, True)):
        source = values("special", (57, cols), torch.bfloat16)
        table = ops.group_table(torch.tensor(offs, dtype=torch.int32), rows)
        index = torch.randint(57, (rows,), generator=g, dtype=torch.int32)
        want = ops.amax(source[index.long()], base + flags, columnwise, groups=table)
        index[int(table[0, -1]) :] = 2**30
        got = ops.amax(
            source.to(device),
            base + flags,
            columnwise,
            groups=table.to(device),
            rows_from=index.to(device),
        ).cpu()
        if base in ROW_BASES and not columnwise:
            got, want = got[: table[0, -1]], want[: table[0, -1]]
        require_same(got, want, f"{base}{flags} of {rows} rows from {describe(source)}")


# ---- amax, hadamard, values ----------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["", "+rht", "+rht32", "+rht128"])
@pytest.mark.parametrize("base", ROW_BASES + TENSOR_BASES)
def test_amax(device, base, flags):
    spec = base + flags
    for g, kind in itertools.product(cases([128, 33, 256]), ("normal", "special")):
        rows, cols = g.x.shape
        x = grouped(g.table[0, 1:].tolist(), rows, cols, g.x.dtype, kind).x
        for columnwise in (False, True):
            want = ops.amax(x, spec, columnwise, groups=g.table)
            got = ops.amax(on(device, x), spec, columnwise, groups=g.table.to(device))
            if base in ROW_BASES and not columnwise:
                got, want = got[: g.end], want[: g.end]
            ends = g.table[0].tolist()[:9]
            require_same(got, want, f"amax {spec} of {describe(x)}, {columnwise}, ends {ends}")


@pytest.mark.parametrize("points", [16, 32, 64, 128])
def test_hadamard(device, points):
    for g, columnwise in itertools.product(cases([128, 33]), (False, True)):
        unit = points if columnwise else 0
        arguments = (points, columnwise, 55272)
        want = ops.hadamard(g.x, *arguments, groups=g.table, group_unit=unit)
        got = ops.hadamard(
            on(device, g.x), *arguments, groups=g.table.to(device), group_unit=unit
        ).cpu()
        inside = (..., slice(g.last_col(unit))) if columnwise else (slice(g.end),)
        require_same(got[inside], want[inside], f"hadamard of {describe(g.x)}, {columnwise}")


@pytest.mark.parametrize("flags", ["", "+rht128"])
@pytest.mark.parametrize("base", BASES)
def test_values_of_codes(device, base, flags):
    """Dequantizes, decodes for products and converts FP4 to FP8, along rows and along columns."""
    spec = base + flags
    for g, columnwise in itertools.product(cases([128, 48]), (False, True)):
        row, col = ("", spec) if columnwise else (spec, "")
        out = ops.quantize(g.x, row, col, groups=g.table)
        codes, scale, amax = out[4:7] if columnwise else out[:3]
        unit = unit_of(spec) if columnwise else 0
        cols = codes.shape[1] * 8 // Spec.parse(spec).code_bits if columnwise else g.x.shape[1]
        # Bytes of no group are unspecified: any of them may be read, and none matters.
        inside = (slice(None), slice(g.last_col(unit))) if columnwise else (slice(g.end),)
        kw = {"groups": g.table, "group_unit": unit}
        there = {"groups": g.table.to(device), "group_unit": unit}
        operand = (codes, scale, amax)
        moved = tuple(t.to(device) for t in operand)
        note = f"{spec} of {describe(g.x)}, {columnwise}, ends {g.table[0].tolist()[:9]}"
        for dtype in DTYPES:
            got = ops.dequantize(*moved, spec, cols, dtype=dtype, **there).cpu()
            want = ops.dequantize(*operand, spec, cols, dtype=dtype, **kw)
            require_same(got[inside], want[inside], f"dequantize {note}")
        got = ops.decode(*moved[:2], spec, cols, **there).cpu()
        require_same(got[inside], ops.decode(*operand[:2], spec, cols, **kw)[inside], note)
        if Spec.parse(spec).is_fp4_by_powers_of_two:
            got, got_scale = ops.fp4_as_fp8(*moved, spec, cols, **there)
            want, want_scale = ops.fp4_as_fp8(*operand, spec, cols, **kw)
            got, want = got.view(torch.uint8).cpu(), want.view(torch.uint8)
            require_same(got[inside], want[inside], f"fp4_as_fp8 {note}")
            rows = slice(None) if columnwise else slice(g.end)
            require_same(got_scale[rows], want_scale[rows], f"row scale {note}")


# ---- Scales --------------------------------------------------------------------------------------


@pytest.mark.parametrize("along", ["m", "k"])
def test_quick_swizzles(device, along):
    """Swizzles groups whose last end may lie below the length, and ends that must be moved."""
    for offs, length in ENDS:
        for other in (1, 7, 24, 64, 200):
            shape = (length, other) if along == "m" else (other, length)
            scale, ends = random_bytes(*shape), torch.tensor(offs, dtype=torch.int32)
            moved = ops.group_table(ends, length)[0, 1:].contiguous()
            want = ops.swizzle_scales(scale, offs=moved, groups=along)
            # The CPU reads the ends, and raises for those that must be moved.
            for given in (moved, ends) if device.type == "cuda" else (moved,):
                there = ops.swizzle_scales(scale.to(device), offs=given.to(device), groups=along)
                require_same(there, want, f"swizzle of {shape} along {along}, ends {offs[:9]}")
