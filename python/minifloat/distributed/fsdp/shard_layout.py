"""The geometry of a weight that FSDP2 cuts by rows: what each rank holds, sends and must be told.

    W (N, K)    rank 0  ███████████      chunks of ⌈N / world⌉ rows; the last may be short or empty
                rank 1  ███████████
                rank 2  ████
    blocks      ├───┤├───┤├───┤├─┤      a block that two ranks hold part of needs the amax of both

A rank casts a **window** of W as if that were a weight: its own rows, grown to whole blocks; all of
W where rows share their scale. Everything travels in W's row order: codes (rows, bytes of K), and
the scales of blocks, (blocks that begin in the shard, …); what dgrad reads is transposed before,
and again after. A scale that is not a block's does not travel: all ranks know the amaxes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

import torch
from torch import Tensor

from ...spec import Spec
from .plan import Part

CELL_ALIGNMENT = 4  # of the amaxes that partial_amax packs for each part


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


@dataclass(frozen=True)
class Rows:
    """Rows [start, end) of n: those of one rank."""

    n: int
    world: int
    rank: int

    @property
    def chunk(self) -> int:
        return ceil_div(self.n, self.world)

    def begin_of(self, rank: int) -> int:
        return min(rank * self.chunk, self.n)

    @property
    def start(self) -> int:
        return self.begin_of(self.rank)

    @property
    def end(self) -> int:
        return self.begin_of(self.rank + 1)

    def split_blocks(self, block: int) -> list[int]:
        """Blocks of so many rows that more than one rank holds part of."""
        cuts = {self.begin_of(rank) for rank in range(1, self.world)}
        return sorted({cut // block for cut in cuts if cut % block and cut < self.n})

    def fits(self, part: Part) -> bool:
        """Can the pieces be the whole's? A transform does not reach over the ends of shards."""
        if self.split_blocks(part.transform):
            return False
        return not (part.is_transformed and self.split_blocks(part.block))


# ---- one part of a shard -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Layout:
    """One part of a weight (N, K) on one rank: its window, what is exchanged, what is sent."""

    part: Part
    rows: Rows
    cols: int

    def grown(self, n: int) -> int:
        """Rows of W with those that a transform adds."""
        return round_up(n, self.part.transform)

    # ---- codes

    @cached_property
    def code_bytes(self) -> int:
        """Of a row of W as it travels."""
        spec = Spec.parse(self.part.spec)
        if self.part.columnwise:
            return ceil_div(self.cols, 2) if spec.code_bits == 4 else self.cols
        return spec.sizes(1, self.cols).code_cols

    @cached_property
    def sent_bytes(self) -> int:
        return self.grown(self.rows.chunk) * self.code_bytes

    @cached_property
    def held_bytes(self) -> int:
        """Without those of rows that make a short shard a chunk."""
        return self.grown(self.rows.end - self.rows.start) * self.code_bytes

    # ---- the window

    @cached_property
    def window(self) -> range:
        """Rows of W that the cast takes for a weight of its own."""
        rows, block = self.rows, self.part.block
        if not Spec.parse(self.part.spec).has_blocks:
            return range(rows.n)
        if rows.start == rows.end:  # the tensor's amax is still wanted
            return range(min(block, rows.n))
        return range(rows.start // block * block, min(round_up(rows.end, block), rows.n))

    @cached_property
    def geometry(self) -> tuple[bool, int, int]:
        """Columnwise, rows, columns: what a partial cast is told of the window."""
        return self.part.columnwise, len(self.window), self.cols

    @cached_property
    def first_element(self) -> int:
        """Of the shard in the window."""
        is_empty = self.rows.start == self.rows.end
        return 0 if is_empty else (self.rows.start - self.window.start) * self.cols

    @cached_property
    def cells(self) -> tuple[int, int]:
        """Of elements that share an amax: in the window's rows and columns."""
        if Spec.parse(self.part.spec).has_blocks:
            return ceil_div(len(self.window), self.part.block), ceil_div(self.cols, self.part.width)
        if self.part.amaxes == "tensor":
            return 1, 1
        return (1, self.cols) if self.part.columnwise else (len(self.window), 1)

    @cached_property
    def has_outer_amax(self) -> bool:
        """NVFP4: the tensor's amax, behind those of its blocks."""
        return Spec.parse(self.part.spec).has_blocks and self.part.amaxes == "tensor"

    @cached_property
    def packed(self) -> int:
        """Amaxes of the window, as partial_amax packs them."""
        return round_up(prod(self.cells) + self.has_outer_amax, CELL_ALIGNMENT)

    @cached_property
    def scale_shape(self) -> tuple[int, ...]:
        """Of the window's scales, as read."""
        height, width = self.cells
        if Spec.parse(self.part.spec).has_blocks:
            return (width, height) if self.part.columnwise else (height, width)
        return () if self.part.amaxes == "tensor" else (height * width,)

    @cached_property
    def scale_dtype(self) -> torch.dtype:
        return Spec.parse(self.part.spec).scale_dtype

    @cached_property
    def amax_shape(self) -> tuple[int, ...]:
        if self.part.amaxes == "row":
            return self.scale_shape
        return () if self.part.amaxes == "tensor" else (0,)

    @cached_property
    def exchanged(self) -> tuple[int, tuple[tuple[int, int, int], ...]]:
        """What ranks tell each other: how many amaxes, and which of them this rank holds.

        The latter as (first of the exchanged, first of the window's cells, how many).
        """
        height, width = self.cells
        if not Spec.parse(self.part.spec).has_blocks:
            return height * width, ((0, 0, height * width),)
        first = self.window.start // self.part.block
        held, at = [], 0
        for block in self.rows.split_blocks(self.part.block):
            if first <= block < first + height:
                held.append((at, (block - first) * width, width))
            at += width
        if self.has_outer_amax:
            held.append((at, height * width, 1))
            at += 1
        return at, tuple(held)

    # ---- the scales that travel

    @cached_property
    def table_shape(self) -> tuple[int, int]:
        """Of those that one rank sends; a row's comes with its amax."""
        most = ceil_div(self.grown(self.rows.chunk), self.part.block)
        if self.part.columnwise:
            return most, ceil_div(self.cols, self.part.width)
        is_of_rows = self.part.amaxes == "row"
        if is_of_rows:
            return most, 2
        return most, Spec.parse(self.part.spec).sizes(self.part.block, self.cols).scale_cols

    @cached_property
    def table_dtype(self) -> torch.dtype:
        return torch.float32 if self.scale_dtype == torch.float32 else torch.uint8

    @cached_property
    def table_bytes(self) -> int:
        return 0 if self.part.is_shared else prod(self.table_shape) * self.table_dtype.itemsize

    @cached_property
    def table_rows(self) -> tuple[int, int]:
        """Of the window's scales those of blocks that begin in the shard: first, and how many."""
        begin, end = (ceil_div(row, self.part.block) for row in (self.rows.start, self.rows.end))
        return begin - self.window.start // self.part.block, max(end - begin, 0)

    @cached_property
    def places(self) -> list[int] | None:
        """Where the scales of W's blocks are among those that all ranks sent; None: one by one."""
        n, chunk, block = self.grown(self.rows.n), self.grown(self.rows.chunk), self.part.block
        most = ceil_div(chunk, block)
        found: list[int] = []
        for rank in range(self.rows.world):
            first, last = (ceil_div(min(r * chunk, n), block) for r in (rank, rank + 1))
            found += range(rank * most, rank * most + last - first)
        return None if found == list(range(len(found))) else found


layout_of = lru_cache(maxsize=4096)(Layout)  # weights that are alike have one


@dataclass(frozen=True, eq=False)
class Piece:
    """What a rank sends of one part, and what all ranks have without sending."""

    codes: Tensor  # uint8, flat: (chunk, grown, code bytes)
    table: Tensor | None  # (blocks that may begin in a chunk, …) scales; None: `scale` is of all
    scale: Tensor  # as read
    amax: Tensor
    exchanged: Tensor  # int32: what the ranks told each other, for other values of the same amaxes
