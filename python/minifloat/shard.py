"""Quantizing rows of a weight so that the ranks' pieces are, byte for byte, the whole weight's.

    W (N, K)    rank 0  ███████████      FSDP2 cuts dim 0 into chunks of ⌈N / world⌉ rows; the last
                rank 1  ███████████      may be short or empty
                rank 2  ████
    blocks      ├───┤├───┤├───┤├─┤      a block that two ranks hold part of needs the amax of both

What a rank cannot know alone is a maximum: of the tensor, of a column, of a block that is split.
`own_amaxes` lists them in an order that all ranks share, and one MAX over the ranks settles all.

A split block gets its whole amax by a **witness**: the shard is grown to whole blocks, with zeros,
and a row that is another rank's holds the block's amax. The cast then sees the amax that it would
see in the whole, and the rows that were added are cut off again. So there is one cast, not two.

Everything travels in W's row order: codes (rows, bytes of K), scales (blocks that begin in the
shard, …); what dgrad reads is transposed before, and again after.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ._native import ops
from .gather import Part
from .parts import code_bits, is_blocked, sizes, transpose_codes_into
from .quantized import Quantized, raw_scale, read_direction, scale_dtype

EACH_ROW = "e4m3/row"  # whose amax op reduces rows, or columnwise columns


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


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


@lru_cache(maxsize=4096)
def places(n: int, world: int, chunk: int, block: int) -> list[int]:
    """Where each block's scales are among those that all ranks sent."""
    most, found = ceil_div(chunk, block), []
    for rank in range(world):
        first, last = (ceil_div(min(r * chunk, n), block) for r in (rank, rank + 1))
        found += [rank * most + i for i in range(last - first)]
    return found


def grown(part: Part, n: int) -> int:
    """Rows of W with those that a transform adds."""
    return ceil_div(n, part.transform) * part.transform


# ---- what ranks tell each other ------------------------------------------------------------------


def block_amaxes(x: Tensor, width: int) -> Tensor:
    """max |x| of blocks that are all of x's rows and `width` columns."""
    columns = ops.amax(x, EACH_ROW, True)
    if width == 1:
        return columns
    padding = -len(columns) % width
    return ops.amax(torch.nn.functional.pad(columns, (0, padding)).view(-1, width), EACH_ROW)


def amax_sizes(part: Part, rows: Rows, cols: int) -> tuple[int, int]:
    """How many amaxes: of the tensor or of columns, and of split blocks."""
    whole = 0
    if part.amaxes == "tensor" and not part.is_delayed:
        whole = 1
    elif part.amaxes == "row" and part.columnwise:
        whole = cols
    return whole, len(rows.split_blocks(part.block)) * ceil_div(cols, part.width)


def own_amaxes(x: Tensor, part: Part, rows: Rows) -> Tensor:
    """The maxima of this shard x that the others must know: float32, amax_sizes many."""
    pieces = []
    if amax_sizes(part, rows, x.shape[1])[0]:
        pieces.append(ops.amax(x, part.spec, part.columnwise).view(-1))
    for block in rows.split_blocks(part.block):
        held = slice(
            *(min(max(i * part.block - rows.start, 0), len(x)) for i in (block, block + 1))
        )
        pieces.append(block_amaxes(x[held], part.width))
    return torch.cat(pieces) if pieces else x.new_empty(0, dtype=torch.float32)


# ---- the cast of a shard -------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """What a rank sends of one part, and what all ranks have without sending."""

    codes: Tensor  # uint8 (chunk, grown, code bytes)
    table: Tensor | None  # (blocks that may begin in a chunk, …) scales; None: the scale is shared
    scale: Tensor
    amax: Tensor


def code_bytes(part: Part, cols: int) -> int:
    """Of a row of W as it travels."""
    if part.columnwise:
        return ceil_div(cols, 2) if code_bits(part.spec) == 4 else cols
    return sizes(part.spec, 1, cols)[0]


def with_witness(x: Tensor, part: Part, rows: Rows, amaxes: Tensor) -> tuple[Tensor, int]:
    """x (rows, K) grown to whole blocks, and how many rows came before. amaxes: of split blocks."""
    block, split = part.block, rows.split_blocks(part.block)
    low = rows.start // block * block
    high = min(ceil_div(rows.end, block) * block, rows.n)
    if len(x) == 0 or (low, high) == (rows.start, rows.end):
        return x, 0
    whole = x.new_zeros(high - low, x.shape[1])
    before = rows.start - low
    whole[before : before + len(x)] = x
    table = amaxes.view(len(split), -1).to(x.dtype)
    if before:
        whole[0, :: part.width] = table[split.index(rows.start // block)]
    if high > rows.end:
        whole[-1, :: part.width] = table[split.index(rows.end // block)]
    return whole, before


def in_row_order(q: Quantized, part: Part, rows: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of `rows` rows of W, by W's rows and blocks of rows."""
    codes, scale = q.codes, raw_scale(q)
    if part.columnwise and rows:
        out = codes.new_empty(rows, code_bytes(part, codes.shape[0]))
        codes = transpose_codes_into(out, part.spec, codes, rows)
    if part.amaxes == "row" and not part.columnwise:
        return codes, torch.stack([scale, q.amax], 1)
    return codes, scale.t() if part.columnwise and scale.dim() == 2 else scale


def quantize_rows(
    x: Tensor, part: Part, rows: Rows, amaxes: Tensor, in_force: Tensor | None
) -> Piece:
    """The piece of a shard x (rows, K). amaxes: what own_amaxes gave, of all ranks together.

    in_force: the amax of a delayed scale.
    """
    cols = x.shape[1]
    whole_amaxes, _ = amax_sizes(part, rows, cols)
    given = in_force if part.is_delayed else None
    if whole_amaxes:
        given = amaxes[:whole_amaxes] if part.amaxes == "row" else amaxes[0]
    values, before = with_witness(x, part, rows, amaxes[whole_amaxes:])
    if part.columnwise:
        out = ops.quantize(values, "", part.spec, amax_col=given)
    else:
        out = ops.quantize(values, part.spec, "", amax_row=given)
    q = read_direction(out, values, part.spec, part.columnwise)

    codes, scales = in_row_order(q, part, grown(part, len(values)))
    kept = grown(part, len(x))
    sent = as_rows(codes, before, kept, (grown(part, rows.chunk), code_bytes(part, cols)))
    if part.is_shared:
        return Piece(sent, None, q.scale, q.amax)
    low = (rows.start - before) // part.block
    begin, end = (ceil_div(i, part.block) - low for i in (rows.start, rows.start + kept))
    count = end - begin if kept else 0
    table = as_rows(scales, begin, count, table_shape(part, rows, cols))
    return Piece(sent, table, q.scale, q.amax)


def as_rows(x: Tensor, begin: int, count: int, shape: tuple[int, int]) -> Tensor:
    """`count` rows of x from `begin` on, then zeros; x itself where that is all of it."""
    if begin == 0 and count == shape[0] and x.shape == shape and x.is_contiguous():
        return x
    grown = x.new_zeros(shape)
    if count:
        grown[:count] = x[begin : begin + count]
    return grown


# ---- the whole from the pieces -------------------------------------------------------------------


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


def whole_table(sent: Tensor, part: Part, rows: Rows, cols: int) -> Tensor:
    """The scales of W by blocks of rows, from those of all ranks: bytes (world, table_bytes)."""
    height, width = table_shape(part, rows, cols)
    table = sent.contiguous().view(table_dtype(part)).view(rows.world * height, width)
    where = places(grown(part, rows.n), rows.world, grown(part, rows.chunk), part.block)
    if where == list(range(len(where))):
        return table[: len(where)]
    return table[torch.tensor(where, device=table.device)]


def empty_direction(part: Part, n: int, cols: int, device: torch.device) -> Quantized:
    """Room for one direction of W (n, cols), as read."""
    shape = (cols, n) if part.columnwise else (n, cols)
    code_cols, _, *blocks = sizes(part.spec, *shape)
    codes = torch.empty(shape[0], code_cols, dtype=torch.uint8, device=device)
    each = {"row": shape[:1], "tensor": (), "": (0,)}[part.amaxes]
    scale_shape = blocks if is_blocked(part.spec) else each
    scale = torch.empty(scale_shape, dtype=scale_dtype(part.spec), device=device)
    amax = torch.empty(each, dtype=torch.float32, device=device)
    return Quantized(codes, scale, amax, part.spec, shape, part.columnwise)


def fill_direction(
    target: Quantized, sent: Part, codes: Tensor, table: Tensor | None, scale: Tensor, amax: Tensor
) -> None:
    """Writes a direction of W from a part that travelled: the same one, or the other of a square.

    codes (rows and more, code bytes): in the rowwise direction they are target's own memory.
    table: scales by blocks of rows; None: `scale` is all ranks'.
    """
    if target.columnwise:
        rows = codes[: grown(sent, target.shape[1])]
        transpose_codes_into(target.codes, target.spec, rows, target.shape[0])
    elif target.codes.data_ptr() != codes.data_ptr():
        target.codes.copy_(codes[: target.shape[0]])
    if table is None:
        raw_scale(target).copy_(scale if scale.dtype == torch.float32 else scale.view(torch.uint8))
        target.amax.copy_(amax)
    elif sent.amaxes == "row":
        target.scale.copy_(table[:, 0])
        target.amax.copy_(table[:, 1])
    else:
        raw_scale(target).copy_(table.t() if target.columnwise else table)
        target.amax.copy_(amax)


def poison(target: Quantized) -> None:
    """A direction that is not there: whatever reads it gets NaN."""
    target.scale.view(-1).view(torch.uint8).fill_(0xFF)  # NaN in float32, E8M0 and E4M3
