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
from functools import lru_cache

import torch

from .gather import Part
from .parts import code_bits, is_blocked, sizes
from .quantized import scale_dtype


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


def grown(part: Part, n: int) -> int:
    """Rows of W with those that a transform adds."""
    return round_up(n, part.transform)


def code_bytes(part: Part, cols: int) -> int:
    """Of a row of W as it travels."""
    if part.columnwise:
        return ceil_div(cols, 2) if code_bits(part.spec) == 4 else cols
    return sizes(part.spec, 1, cols)[0]


# ---- windows -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Rows [low, high) of W, which a cast takes for a weight of its own."""

    low: int
    high: int

    @property
    def height(self) -> int:
        return self.high - self.low


@lru_cache(maxsize=4096)
def window_of(part: Part, rows: Rows) -> Window:
    if not is_blocked(part.spec):
        return Window(0, rows.n)
    block = part.block
    if rows.start == rows.end:  # the tensor's amax is still wanted
        return Window(0, min(block, rows.n))
    return Window(rows.start // block * block, min(round_up(rows.end, block), rows.n))


@lru_cache(maxsize=4096)
def cell_grid(part: Part, rows: Rows, cols: int) -> tuple[int, int]:
    """Cells, which share an amax, in the rows and columns of the window."""
    height = window_of(part, rows).height
    if is_blocked(part.spec):
        return ceil_div(height, part.block), ceil_div(cols, part.width)
    if part.amaxes == "tensor":
        return 1, 1
    return (1, cols) if part.columnwise else (height, 1)


def has_outer_amax(part: Part) -> bool:
    """NVFP4: the tensor's amax, beside those of its blocks."""
    return is_blocked(part.spec) and part.amaxes == "tensor"


@lru_cache(maxsize=4096)
def exchanged_cells(part: Part, rows: Rows, cols: int) -> tuple[int, tuple[tuple[int, int, int], ...]]:
    """What ranks tell each other of a part: how many amaxes, and which of them this rank holds.

    The latter as (first of the exchanged, first of the window's cells, how many).
    """
    height, width = cell_grid(part, rows, cols)
    if not is_blocked(part.spec):
        return height * width, ((0, 0, height * width),)
    first = window_of(part, rows).low // part.block
    held, at = [], 0
    for block in rows.split_blocks(part.block):
        if first <= block < first + height:
            held.append((at, (block - first) * width, width))
        at += width
    if has_outer_amax(part):
        held.append((at, height * width, 1))
        at += 1
    return at, tuple(held)


# ---- the scales that travel -------------------------------------------------------------------------


def table_shape(part: Part, rows: Rows, cols: int) -> tuple[int, int]:
    """Of the scales that one rank sends; a row's scale comes with its amax."""
    most = ceil_div(grown(part, rows.chunk), part.block)
    if part.columnwise:
        return most, ceil_div(cols, part.width)
    return most, 2 if part.amaxes == "row" else sizes(part.spec, part.block, cols)[3]


def table_dtype(part: Part) -> torch.dtype:
    return torch.float32 if scale_dtype(part.spec) == torch.float32 else torch.uint8


def table_bytes(part: Part, rows: Rows, cols: int) -> int:
    if part.is_shared:
        return 0
    height, width = table_shape(part, rows, cols)
    return height * width * table_dtype(part).itemsize


@lru_cache(maxsize=1024)
def block_places(part: Part, rows: Rows, device: torch.device) -> torch.Tensor | None:
    """Where the scales of W's blocks are among those that all ranks sent; None: one by one."""
    n, chunk = grown(part, rows.n), grown(part, rows.chunk)
    most, found = ceil_div(chunk, part.block), []
    for rank in range(rows.world):
        first, last = (ceil_div(min(r * chunk, n), part.block) for r in (rank, rank + 1))
        found += range(rank * most, rank * most + last - first)
    if found == list(range(len(found))):
        return None
    return torch.tensor(found, device=device)
