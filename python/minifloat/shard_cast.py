"""The cast of shards: pieces that are, byte for byte, what the whole weights have there.

    shards --partial_amax--> amaxes of the cells of their windows
           | what ranks hold in common, in one MAX over the ranks
           --partial_cast--> codes, scales                            any number of weights at once

Transforms alone are cast one by one: a shard of whole transforms and blocks is a weight of its own,
but for the amax that it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from ._native import ops
from .gather import Part
from .parts import is_blocked, sizes, transpose_codes_into
from .quantized import Quantized, raw_scale, read_direction, scale_dtype
from .shard import (
    Rows,
    ceil_div,
    cell_grid,
    code_bytes,
    exchanged_cells,
    grown,
    has_outer_amax,
    round_up,
    table_shape,
    window_of,
)

Key = tuple[Part, Rows, int]  # what geometry is a function of; the last is K
CELL_ALIGNMENT = 4  # of the amaxes that partial_amax gives for each part


@dataclass(frozen=True, eq=False)
class Job:
    """One part of one weight, and the rows of it that this rank has."""

    shard: Tensor  # (rows, K), float32 or bfloat16
    part: Part
    rows: Rows
    rounded_to: torch.dtype  # before amax and cast: float32 or bfloat16
    in_force: Tensor | None  # the amax of a delayed scale

    @property
    def key(self) -> Key:
        return self.part, self.rows, self.shard.shape[1]


@dataclass(frozen=True, eq=False)
class Piece:
    """What a rank sends of one part, and what all ranks have without sending."""

    codes: Tensor  # uint8, flat: (chunk, grown, code bytes)
    table: Tensor | None  # (blocks that may begin in a chunk, …) scales; None: `scale` is of all
    scale: Tensor  # as read
    amax: Tensor
    exchanged: Tensor  # int32: what the ranks told each other, for other values of the same amaxes


def reduce_amaxes(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest of all ranks. Bits of magnitudes order like the values, NaN above infinity."""
    bits = own.abs().view(torch.int32)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32)


def cast_shards(
    jobs: Sequence[Job], group: dist.ProcessGroup, known: Sequence[Tensor] | None = None
) -> list[Piece]:
    """The pieces of this rank, one a job; all ranks of the group have the same jobs.

    known: what the pieces of an earlier cast exchanged; then no rank is asked again.
    """
    order = sorted(range(len(jobs)), key=lambda i: jobs[i].part.is_transformed)
    plain = [jobs[i] for i in order if not jobs[i].part.is_transformed]
    transformed = [jobs[i] for i in order[len(plain) :]]
    entries = entries_of(plain)
    packed = ops.partial_amax(*entries) if plain else None
    cells = shared_cells(tuple(job.key for job in plain), jobs[0].shard.device)
    values = [job.shard.to(job.rounded_to) for job in transformed]

    amaxes = [own_amax(x, job.part) for x, job in zip(values, transformed)]
    own = amaxes if packed is None else [cells.read(packed), *amaxes]
    every = own[0] if len(own) == 1 else torch.cat(own)
    if known is not None:
        every = torch.cat([known[i] for i in order])
    elif len(every) and dist.get_world_size(group) > 1:
        dist.all_reduce(every, op=dist.ReduceOp.MAX, group=group)
    exchanged = every.split([*cells.lengths, *map(len, amaxes)])

    pieces = []
    if packed is not None:
        packed = cells.write(packed, every[: sum(cells.lengths)])
        pieces = cast_plain(plain, packed, entries, exchanged)
    pieces += [
        cast_transformed(x, job, amax)
        for x, job, amax in zip(values, transformed, exchanged[len(plain) :])
    ]
    return [piece for _, piece in sorted(zip(order, pieces), key=lambda pair: pair[0])]


# ---- what ranks tell each other ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SharedCells:
    """The packed amaxes that several ranks hold.

    lengths: how many of each part. places, cells: of those that this rank holds, among the shared
    and among the packed; None: all packed ones are shared, as they lie.
    """

    lengths: tuple[int, ...]
    places: Tensor | None = None
    cells: Tensor | None = None

    def read(self, packed: Tensor) -> Tensor:
        """int32 (sum of lengths), zero where other ranks alone hold them."""
        if self.places is None:
            return packed
        shared = packed.new_zeros(sum(self.lengths))
        shared[self.places] = packed[self.cells]
        return shared

    def write(self, packed: Tensor, shared: Tensor) -> Tensor:
        """The packed amaxes with the shared ones."""
        if self.places is None:
            return shared
        packed[self.cells] = shared[self.places]
        return packed


@lru_cache(maxsize=256)
def shared_cells(keys: tuple[Key, ...], device: torch.device) -> SharedCells:
    sizes = [prod(cell_grid(*key)) + has_outer_amax(key[0]) for key in keys]
    sizes = [round_up(size, CELL_ALIGNMENT) for size in sizes]
    if not any(is_blocked(part.spec) for part, _, _ in keys):
        return SharedCells(tuple(sizes))
    ranges = [(0, 0, 0)]  # first of the shared, first of the packed, how many
    place = cell = 0
    lengths = []
    for key, size in zip(keys, sizes):
        count, held = exchanged_cells(*key)
        ranges += [(place + i, cell + j, n) for i, j, n in held]
        lengths.append(count)
        place, cell = place + count, cell + size
    places, cells = (
        torch.cat([torch.arange(r[side], r[side] + r[2], device=device) for r in ranges])
        for side in (0, 1)
    )
    return SharedCells(tuple(lengths), places, cells)


def own_amax(x: Tensor, part: Part) -> Tensor:
    """Of a shard that is transformed: the maxima that the others must know; bits of float32."""
    is_shared = part.amaxes == "tensor" or (part.amaxes == "row" and part.columnwise)
    if part.is_delayed or not is_shared:
        return x.new_empty(0, dtype=torch.int32)
    return ops.amax(x, part.spec, part.columnwise).abs().view(-1).view(torch.int32)


# ---- without a transform -------------------------------------------------------------------------


Entries = tuple[list[Tensor], list[str], list[int]]


def entries_of(jobs: Sequence[Job]) -> Entries:
    """Masters, specs and geometry, as the partial casts take them; codes go to fragments."""
    geometry: list[int] = []
    for job in jobs:
        window, cols = window_of(job.part, job.rows), job.shard.shape[1]
        start = (job.rows.start - window.low) * cols if len(job.shard) else 0
        rounds = job.rounded_to == torch.bfloat16
        geometry += (job.part.columnwise, window.height, cols, rounds, start, True)
    return [job.shard for job in jobs], [job.part.spec for job in jobs], geometry


@lru_cache(maxsize=4096)
def scale_shape(part: Part, rows: Rows, cols: int) -> tuple[int, ...]:
    """Of the window's scales, as read."""
    height, width = cell_grid(part, rows, cols)
    if is_blocked(part.spec):
        return (width, height) if part.columnwise else (height, width)
    return () if part.amaxes == "tensor" else (height * width,)


@lru_cache(maxsize=4096)
def amax_shape(part: Part, rows: Rows, cols: int) -> tuple[int, ...]:
    return scale_shape(part, rows, cols) if part.amaxes == "row" else {"tensor": (), "": (0,)}[part.amaxes]


def carve(like: Tensor, dtype: torch.dtype, counts: Sequence[int], unit: int) -> Sequence[Tensor]:
    """Flat tensors of so many elements in one allocation, each beginning at a multiple of `unit`."""
    padded = [n for count in counts for n in (count, -count % unit)]
    return like.new_empty(sum(padded), dtype=dtype).split(padded)[::2]


def cast_plain(
    jobs: Sequence[Job], packed: Tensor, entries: Entries, exchanged: Sequence[Tensor]
) -> list[Piece]:
    """From amaxes that are those of the whole weights."""
    keys = [job.key for job in jobs]
    sent = carve(packed, torch.uint8, [rows.chunk * code_bytes(p, k) for p, rows, k in keys], 256)
    codes = []
    for memory, job in zip(sent, jobs):
        held = len(job.shard) * code_bytes(job.part, job.shard.shape[1])
        codes.append(memory if held == len(memory) else memory[:held])
        if held < len(memory):
            memory[held:].zero_()
    shapes = [(scale_shape(*key), scale_dtype(key[0].spec)) for key in keys]
    memory = carve(packed, torch.uint8, [prod(s) * dtype.itemsize for s, dtype in shapes], 16)
    scales = [m.view(dtype).view(shape) for m, (shape, dtype) in zip(memory, shapes)]
    amax_shapes = [amax_shape(*key) for key in keys]
    floats = carve(packed, torch.float32, [prod(shape) for shape in amax_shapes], 4)
    amaxes = [m.view(shape) for m, shape in zip(floats, amax_shapes)]
    delayed = [i for i, job in enumerate(jobs) if job.in_force is not None]
    if delayed:
        torch._foreach_copy_([amaxes[i] for i in delayed], [jobs[i].in_force for i in delayed])
    ops.partial_cast(packed, *entries, codes, scales, amaxes)
    return [
        Piece(code, table_of(job, scale), scale, amax, known)
        for job, code, scale, amax, known in zip(jobs, sent, scales, amaxes, exchanged)
    ]


def table_of(job: Job, scale: Tensor) -> Tensor | None:
    """The scales of the blocks that begin in the shard, by W's rows."""
    part, rows = job.part, job.rows
    if part.is_shared:
        return None
    begin, end = (ceil_div(i, part.block) for i in (rows.start, rows.end))
    raw = scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    by_row = raw.t() if part.columnwise else raw
    first = window_of(part, rows).low // part.block
    return as_rows(by_row, begin - first, end - begin, table_shape(*job.key))


def as_rows(x: Tensor, begin: int, count: int, shape: tuple[int, int]) -> Tensor:
    """`count` rows of x from `begin` on, then zeros; x itself where that is all of it."""
    if begin == 0 and count == shape[0] and x.shape == shape:
        return x
    padded = x.new_zeros(shape)
    if count > 0:
        padded[:count] = x[begin : begin + count]
    return padded


# ---- with one ------------------------------------------------------------------------------------


def in_row_order(q: Quantized, part: Part, rows: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of `rows` rows of W, by W's rows and blocks of rows."""
    codes, scale = q.codes, raw_scale(q)
    if part.columnwise and rows:
        out = codes.new_empty(rows, code_bytes(part, codes.shape[0]))
        codes = transpose_codes_into(out, part.spec, codes, rows)
    if part.amaxes == "row" and not part.columnwise:
        return codes, torch.stack([scale, q.amax], 1)
    return codes, scale.t() if part.columnwise and scale.dim() == 2 else scale


def cast_transformed(x: Tensor, job: Job, exchanged: Tensor) -> Piece:
    """x: the shard, rounded; exchanged: its own_amax, of all ranks."""
    part, rows, cols = job.key
    amax = job.in_force
    if len(exchanged):
        amax = exchanged.view(torch.float32)
        amax = amax.view(()) if part.amaxes == "tensor" else amax
    side = "col" if part.columnwise else "row"
    out = ops.quantize(x, **{"row": "", "col": "", side: part.spec, f"amax_{side}": amax})
    q = read_direction(out, x, part.spec, part.columnwise)
    kept = grown(part, len(x))
    codes, scales = in_row_order(q, part, kept)
    sent = as_rows(codes, 0, kept, (grown(part, rows.chunk), code_bytes(part, cols))).view(-1)
    if part.is_shared:
        return Piece(sent, None, q.scale, q.amax, exchanged)
    table = as_rows(scales, 0, ceil_div(kept, part.block), table_shape(*job.key))
    return Piece(sent, table, q.scale, q.amax, exchanged)
