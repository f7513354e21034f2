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

from ..._native import ops
from ...spec import Spec
from ...tensor.quantized import Quantized, raw_scale, read_direction
from ...tensor.slicing import transpose_codes_into
from ..amaxes import magnitude_bits, raise_to_largest
from .plan import Part
from .shard_layout import Layout, Piece, ceil_div


@dataclass(frozen=True, eq=False)
class Job:
    """One part of one weight, and the rows of it that this rank has."""

    shard: Tensor  # (rows, K), float32 or bfloat16
    layout: Layout
    rounded_to: torch.dtype  # before amax and cast: float32 or bfloat16
    in_force: Tensor | None  # the amax of a delayed scale

    @property
    def is_transformed(self) -> bool:
        return self.layout.part.is_transformed


def cast_shards(
    jobs: Sequence[Job], group: dist.ProcessGroup, known: Sequence[Tensor] | None = None
) -> list[Piece]:
    """The pieces of this rank, one a job; all ranks of the group have the same jobs.

    known: what the pieces of an earlier cast exchanged; then no rank is asked again.
    """
    order = sorted(range(len(jobs)), key=lambda i: jobs[i].is_transformed)
    plain = [jobs[i] for i in order if not jobs[i].is_transformed]
    transformed = [jobs[i] for i in order[len(plain) :]]
    entries = entries_of(plain)
    packed = ops.partial_amax(*entries) if plain else None
    cells = shared_cells(tuple(job.layout for job in plain), jobs[0].shard.device)
    values = [job.shard.to(job.rounded_to) for job in transformed]

    amaxes = [own_amax(x, job.layout.part) for x, job in zip(values, transformed)]
    own = amaxes if packed is None else [cells.read(packed), *amaxes]
    every = own[0] if len(own) == 1 else torch.cat(own)
    if known is not None:
        every = torch.cat([known[i] for i in order])
    elif len(every) and dist.get_world_size(group) > 1:
        raise_to_largest(every, group)
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
def shared_cells(layouts: tuple[Layout, ...], device: torch.device) -> SharedCells:
    if not any(Spec.parse(layout.part.spec).has_blocks for layout in layouts):
        return SharedCells(tuple(layout.packed for layout in layouts))
    ranges = [(0, 0, 0)]  # first of the shared, first of the packed, how many
    place = cell = 0
    for layout in layouts:
        count, held = layout.exchanged
        ranges += [(place + i, cell + j, n) for i, j, n in held]
        place, cell = place + count, cell + layout.packed
    places, cells = (
        torch.cat([torch.arange(r[side], r[side] + r[2], device=device) for r in ranges])
        for side in (0, 1)
    )
    return SharedCells(tuple(layout.exchanged[0] for layout in layouts), places, cells)


def own_amax(x: Tensor, part: Part) -> Tensor:
    """Of a shard that is transformed: the maxima that the others must know; bits of float32."""
    is_shared = part.amaxes == "tensor" or (part.amaxes == "row" and part.columnwise)
    if part.is_delayed or not is_shared:
        return x.new_empty(0, dtype=torch.int32)
    return magnitude_bits(ops.amax(x, part.spec, part.columnwise).view(-1))


# ---- without a transform -------------------------------------------------------------------------


Entries = tuple[list[Tensor], list[str], list[int]]


def entries_of(jobs: Sequence[Job]) -> Entries:
    """Masters, specs and geometry, as the partial casts take them; codes go to fragments."""
    geometry: list[int] = []
    for job in jobs:
        rounds = job.rounded_to == torch.bfloat16
        geometry += (*job.layout.geometry, rounds, job.layout.first_element, True)
    return [job.shard for job in jobs], [job.layout.part.spec for job in jobs], geometry


def carve(like: Tensor, dtype: torch.dtype, counts: Sequence[int], unit: int) -> Sequence[Tensor]:
    """Flat tensors of so many elements in one allocation, each from a multiple of `unit` on."""
    padded = [n for count in counts for n in (count, -count % unit)]
    return like.new_empty(sum(padded), dtype=dtype).split(padded)[::2]


def cast_plain(
    jobs: Sequence[Job], packed: Tensor, entries: Entries, exchanged: Sequence[Tensor]
) -> list[Piece]:
    """From amaxes that are those of the whole weights."""
    layouts = [job.layout for job in jobs]
    sent = carve(packed, torch.uint8, [layout.sent_bytes for layout in layouts], 256)
    codes = []
    for memory, layout in zip(sent, layouts):
        held = layout.held_bytes
        codes.append(memory if held == layout.sent_bytes else memory[:held])
        if held < layout.sent_bytes:
            memory[held:].zero_()
    bytes_of = [prod(layout.scale_shape) * layout.scale_dtype.itemsize for layout in layouts]
    memories = carve(packed, torch.uint8, bytes_of, 16)
    scales = [m.view(la.scale_dtype).view(la.scale_shape) for m, la in zip(memories, layouts)]
    floats = carve(packed, torch.float32, [prod(layout.amax_shape) for layout in layouts], 4)
    amaxes = [m.view(layout.amax_shape) for m, layout in zip(floats, layouts)]
    delayed = [(amax, j.in_force) for amax, j in zip(amaxes, jobs) if j.in_force is not None]
    if delayed:
        torch._foreach_copy_([amax for amax, _ in delayed], [given for _, given in delayed])
    ops.partial_cast(packed, *entries, codes, scales, amaxes)
    return [
        Piece(code, table_of(layout, scale), scale, amax, known)
        for layout, code, scale, amax, known in zip(layouts, sent, scales, amaxes, exchanged)
    ]


def table_of(layout: Layout, scale: Tensor) -> Tensor | None:
    """The scales of the blocks that begin in the shard, by W's rows."""
    if layout.part.is_shared:
        return None
    raw = scale if layout.table_dtype == torch.float32 else scale.view(torch.uint8)
    by_row = raw.t() if layout.part.columnwise else raw
    return as_rows(by_row, *layout.table_rows, layout.table_shape)


def as_rows(x: Tensor, begin: int, count: int, shape: tuple[int, int]) -> Tensor:
    """`count` rows of x from `begin` on, then zeros; x itself where that is all of it."""
    if begin == 0 and count == shape[0] and x.shape == shape:
        return x
    padded = x.new_zeros(shape)
    if count:
        padded[:count] = x[begin : begin + count]
    return padded


# ---- with one ------------------------------------------------------------------------------------


def in_row_order(q: Quantized, layout: Layout, rows: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of `rows` rows of W, by W's rows and blocks of rows."""
    codes, scale, columnwise = q.codes, raw_scale(q), layout.part.columnwise
    if columnwise and rows:
        out = codes.new_empty(rows, layout.code_bytes)
        codes = transpose_codes_into(out, layout.part.spec, codes, rows)
    if layout.part.amaxes == "row" and not columnwise:
        return codes, torch.stack([scale, q.amax], 1)
    return codes, scale.t() if columnwise and scale.dim() == 2 else scale


def cast_transformed(x: Tensor, job: Job, exchanged: Tensor) -> Piece:
    """x: the shard, rounded; exchanged: its own_amax, of all ranks."""
    layout, part = job.layout, job.layout.part
    amax = job.in_force
    if len(exchanged):
        amax = exchanged.view(torch.float32)
        amax = amax.view(()) if part.amaxes == "tensor" else amax
    side = "col" if part.columnwise else "row"
    out = ops.quantize(x, **{"row": "", "col": "", side: part.spec, f"amax_{side}": amax})
    q = read_direction(out, x, part.spec, part.columnwise)
    kept = layout.grown(len(x))
    codes, scales = in_row_order(q, layout, kept)
    sent = as_rows(codes, 0, kept, (layout.grown(layout.rows.chunk), layout.code_bytes)).view(-1)
    if part.is_shared:
        return Piece(sent, None, q.scale, q.amax, exchanged)
    table = as_rows(scales, 0, ceil_div(kept, part.block), layout.table_shape)
    return Piece(sent, table, q.scale, q.amax, exchanged)
