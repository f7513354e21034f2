"""Casts of groups of rows in numpy, without code of the library: docs/numerics.md, section 10.

Each group is cast by oracle.py as a matrix of its own. Ends, places, lengths and the rows of the
random counter are computed here. Bytes of no group are unspecified: `is_written` leaves them out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.support import oracle

F32 = np.float32


@dataclass(frozen=True)
class Group:
    begin: int  # rows of x
    end: int
    first: int  # columns of the columnwise operand
    cols: int


@dataclass(frozen=True)
class Written:
    """An array, and which of its entries belong to a group."""

    values: np.ndarray
    is_written: np.ndarray

    @staticmethod
    def nothing(shape: tuple[int, ...], dtype: type) -> Written:
        return Written(np.zeros(shape, dtype), np.zeros(shape, bool))

    def put(self, at: tuple[slice | int, ...], values: np.ndarray) -> None:
        self.values[at] = values
        self.is_written[at] = True


@dataclass(frozen=True)
class Operand:
    codes: Written
    scale: Written
    amax: Written | None


def least_unit(spec: str) -> int:
    """Returns the unit of a spec: 16 columns of 8 bits or 32 of 4, its block and its transform."""
    p = oracle.parse(spec)
    return max(16 if p.elements.bits == 8 else 32, p.block[1], p.points)


def ends(offs: list[int], rows: int) -> list[int]:
    """Returns the groups' ends: each the largest so far, from 0 to `rows`."""
    return np.clip(np.maximum.accumulate([0, *offs]), 0, rows)[1:].tolist()


def table(offs: list[int], rows: int) -> np.ndarray:
    """Returns the boundaries among rows, and among columns under units 16, 32, 64 and 128."""
    lines = [[0, *ends(offs, rows)]]
    for unit in (16, 32, 64, 128):
        found = places(offs, rows, unit)
        lines.append([0, *(group.first + group.cols for group in found)])
    return np.array(lines, np.int32)


def places(offs: list[int], rows: int, unit: int) -> list[Group]:
    """Lists the groups among rows of x, and among columns in whole units, at least one a group."""
    found, begin, first = [], 0, 0
    for end in ends(offs, rows):
        cols = unit * max(1, int(np.ceil((end - begin) / unit)))
        found.append(Group(begin, end, first, cols))
        begin, first = end, first + cols
    return found


def length(rows: int, groups: int, unit: int) -> int:
    """Returns the columns that are allocated for any ends."""
    return int(np.ceil(rows / unit)) * unit + unit * groups


def padded_columns(x: np.ndarray, group: Group) -> np.ndarray:
    """Returns a group's rows as the columns of the operand, with its columns of zeros."""
    rows = x[group.begin : group.end]
    return np.pad(rows, ((0, group.cols - len(rows)), (0, 0))).T.copy()


def cast_rows(x, spec, groups, given_amax, ids, random) -> Operand:
    """Casts groups along rows. ids: the row of the random counter of each row."""
    p = oracle.parse(spec)
    rows, cols = x.shape
    padded = cols + -cols % p.points if p.points else cols
    has_row, has_blocks = p.has_rows, p.block != (0, 0)
    of_tensor = (rows,) if has_row else (len(groups),)
    blocks = (rows, -(-padded // p.block[1])) if has_blocks else of_tensor
    code_cols = -(-padded // 2) if p.elements.bits == 4 else padded
    codes = Written.nothing((rows, code_cols), np.uint8)
    scale = Written.nothing(blocks, np.uint8 if p.rule in ("mx", "nvfp4") else F32)
    amax = Written.nothing(of_tensor, F32) if p.rule in ("row", "tensor", "nvfp4") else None
    for e, group in enumerate(groups):
        of_rows = slice(group.begin, group.end)
        part = (of_rows if has_row else e,)
        given = None if given_amax is None else given_amax[part]
        if group.begin == group.end:  # an amax of 0, but no row of codes
            if amax is not None and not has_row:
                current = "delayed" in p.flags or given is None
                amax.put(part, F32(0) if current else given)
            if p.rule == "tensor":
                found = F32(0) if given is None else given
                with np.errstate(divide="ignore"):
                    scale.put(part, oracle.fp8_factors(found, p.elements.max, False)[1])
            continue
        first = (ids[of_rows] - np.arange(group.end - group.begin))[:, None]
        one = oracle.quantize(x[of_rows], spec, given_amax=given, origin=(first, 0), **random)
        codes.put((of_rows,), one[0])
        scale.put((of_rows,) if has_blocks else part, one[1])
        if amax is not None:
            amax.put(part, one[2])
    return Operand(codes, scale, amax)


def cast_columns(x, spec, groups, given_amax, total, first_expert, random) -> Operand:
    """Casts groups along the contraction dimension. total: the columns of the operand."""
    p = oracle.parse(spec)
    rows, bits, width = x.shape[1], p.elements.bits, p.block[1]
    of_tensor = (len(groups), rows) if p.has_rows else (len(groups),)
    codes = Written.nothing((rows, total * bits // 8), np.uint8)
    scale = Written.nothing(
        (rows, total // width) if width else of_tensor,
        np.uint8 if p.rule in ("mx", "nvfp4") else F32,
    )
    amax = Written.nothing(of_tensor, F32) if p.rule in ("row", "tensor", "nvfp4") else None
    for e, group in enumerate(groups):
        one = oracle.quantize(
            padded_columns(x, group),
            spec,
            given_amax=None if given_amax is None else given_amax[e],
            origin=((first_expert + e) * rows, 0),
            columnwise=True,
            **random,
        )
        first, end = group.first, group.first + group.cols
        codes.put((slice(None), slice(first * bits // 8, end * bits // 8)), one[0])
        window = (slice(None), slice(first // width, end // width)) if width else (e,)
        scale.put(window, one[1])
        if amax is not None:
            amax.put((e,), one[2])
    return Operand(codes, scale, amax)


def quantize(
    x: np.ndarray,
    spec: str,
    offs: list[int],
    columnwise: bool = False,
    unit: int = 0,
    given_amax: np.ndarray | None = None,
    row_ids: np.ndarray | None = None,
    first_expert: int = 0,
    **random: int,
) -> Operand:
    """Casts the groups of x, fp32 (rows, cols). random: key and stream of oracle.quantize."""
    unit = max(unit, least_unit(spec))
    groups = places(offs, len(x), unit)
    if columnwise:
        total = length(len(x), len(offs), unit)
        return cast_columns(x, spec, groups, given_amax, total, first_expert, random)
    ids = np.arange(len(x)) if row_ids is None else row_ids.astype(np.int64)
    return cast_rows(x, spec, groups, given_amax, ids, random)
