"""Gathers the weights of experts (E, N, K) as codes, where FSDP2 shards them along dimension 0.

    before a gather    each rank casts its experts; no scale depends on another rank's experts
    the gather         one all-gather input for each tensor: codes, scales or amaxes
    after it           the product's operands are views of the gathered memory, expert by expert

The last ranks may have fewer experts, or none. Zeros fill their inputs up to ⌈E / ranks⌉ experts;
views end before these zeros. The modes of a plan are those of gather.py:

    one      gathers fprop's codes and transposes dgrad's from them. Fprop's are freed before
             backward
    split    gathers fprop's tensors before forward and dgrad's before backward. Tensors of equal
             sizes use one buffer of the gather: fprop's are views of it; dgrad's are copied out of
             it, and it is freed

`operands` fetches what a gather has not brought: fprop's codes where backward runs a forward again
(recomputed.py), and dgrad's where FSDP2 has not resharded the weight before a forward.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._native import ops
from ...nn.grouped_product import GroupedProduct
from ...nn.state.random_state import is_in_backward
from ...spec import Spec
from ...tensor.directions import TENSORS, tensors_of
from ...tensor.memory import has_memory
from ...tensor.quantized import Operand, Operands, Quantized, raw_scale
from .gather import (
    BACKWARD,
    FORWARD,
    Gather,
    GatherInputs,
    GatherPlan,
    Received,
    keep_for_current_stream,
    storages,
)
from .recomputed import GATHERS, note_reading
from .weight_tensors import GatheredWeight

ROW, COL = FORWARD, BACKWARD  # directions of W: as fprop reads it, as dgrad reads it
Key = tuple[int, str]  # a direction, and the name of one of its tensors
# What `send` keeps for `receive`: the directions that the gather moves, its inputs, and fprop's
# tensors of all ranks where they were fetched by an all-gather of their own.
Sent = tuple[tuple[int, ...], tuple[Tensor, ...], dict[int, Tensor]]


class Buffer(NamedTuple):
    """One input of the gather: bytes an expert, and the tensors that use it, one in each gather."""

    size: int
    tensors: tuple[Key, ...]


class ExpertGather(Gather):
    """Gathers a 3D parameter whose experts FSDP2 shards over the ranks of a group.

    Args:
        module: it has the parameter.
        product: of the parameter.
        shape: of the parameter on all ranks of the group together: (E, N, K), or (E, K, N) where
            the product reads it row-major.
        group: the ranks.
        outer_dims: dimensions of the parameter's mesh before FSDP2 cut it: expert parallelism.
    """

    def __init__(
        self,
        module: nn.Module,
        product: GroupedProduct,
        shape: tuple[int, ...],
        group: dist.ProcessGroup,
        outer_dims: int,
    ) -> None:
        plan, recipe = cast(GatherPlan, product.gather_plan), product.recipe.text
        super().__init__(module, plan, f"{product.fqn}: {recipe}", shape, group)
        self.product = weakref.ref(product)
        self.recipe, self.is_row_major, self.outer_dims = recipe, product.is_row_major, outer_dims
        n, k = shape[:0:-1] if self.is_row_major else shape[1:]
        self.specs = Spec.parse(plan.row), Spec.parse(plan.col)
        self.sizes = (n, k), (k, n)  # of a matrix as fprop reads it, and as dgrad does
        # The dtype and the shape of each tensor of a matrix.
        self.layouts = [tensors_of(spec, *size) for spec, size in zip(self.specs, self.sizes)]
        # The tensors that dgrad reads transposed, in mode "one".
        self.transposed = ("codes", "scale") if self.specs[COL].has_blocks else ("codes",)
        self.parts: list[Quantized] = []  # both directions of the gathered weight
        self.own: list[Tensor] = []  # of one rank: the buffers that FSDP2 does not gather
        self.memory: list[Tensor] = []  # of all buffers
        self.copied: dict[int, Tensor] = {}  # dgrad's tensors that are copies, by buffer: bytes
        self.transposes: Callable[[], None] | None = None
        self.present: set[int] = set()  # the directions in the gathered memory

    @cached_property
    def buffers(self) -> list[Buffer]:
        """The inputs of each gather; the first gather decides on the plan before."""
        return [buffer for name in TENSORS for buffer in self.buffers_of(name)]

    def buffers_of(self, name: str) -> list[Buffer]:
        """Lists the inputs of one tensor, as many before forward as before backward."""
        layouts = [of_direction[name] for of_direction in self.layouts]
        row_size, col_size = (math.prod(shape) * dtype.itemsize for dtype, shape in layouts)
        buffers = [Buffer(row_size, ((ROW, name),)), Buffer(col_size, ((COL, name),))]
        if self.plan.mode == "one":
            buffers = buffers[:1]
        elif self.plan.mode == "split" and row_size == col_size:
            buffers = [Buffer(row_size, ((ROW, name), (COL, name)))]
        return [buffer for buffer in buffers if buffer.size > 0]

    # ---- before a gather -------------------------------------------------------------------------

    def sends_alike(self) -> bool:
        row, col = (math.prod(of_direction["codes"][1]) for of_direction in self.layouts)
        return row == col

    def send_codes(self, shard: Tensor) -> GatherInputs:
        is_backward = is_in_backward()
        split = (COL,) if is_backward else (ROW,)
        moved = {"one": (ROW,), "both": (ROW, COL), "split": split}[self.plan.mode]
        inputs = self.cast(shard, moved)
        is_read_again = is_backward and self.plan.mode == "split" and self.keeps_row
        rowwise = self.gather_direction(shard, ROW) if is_read_again else {}
        return inputs, (moved, inputs, rowwise)

    @torch.no_grad()
    def cast(self, shard: Tensor, directions: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Casts this rank's experts, and returns the bytes of each buffer, (chunk * bytes)."""
        count, tensors, product = len(shard), {}, self.product()
        assert product is not None
        history, begin = product.amax_history, self.rank * self.chunk
        if history is not None:
            history = history[:, begin : begin + count].contiguous()
        if count > 0:
            with torch.autocast(shard.device.type, enabled=False):
                values = shard.to(self.rounded_to)
                operands = ops.layer_operands.default(
                    values.mT if self.is_row_major else values,
                    self.recipe,
                    "w",
                    rowwise=ROW in directions,
                    columnwise=COL in directions,
                    amax_history=history,
                )
            both = Operands.of(operands)
            tensors = {(i, n): getattr(both[i], n) for i in directions for n in TENSORS}
        inputs = []
        for size, keys in self.buffers:
            found = [tensors[key] for key in keys if key in tensors]
            payload = [t.contiguous().view(-1).view(torch.uint8) for t in found]
            if payload and count == self.chunk:
                inputs += payload
                continue
            inputs.append(shard.new_zeros(self.chunk * size, dtype=torch.uint8))
            if payload:
                inputs[-1][: count * size] = payload[0]
        return tuple(inputs)

    # ---- after a gather --------------------------------------------------------------------------

    def receive_codes(self, outputs: Sequence[Tensor], sent: Sent, is_first: bool) -> Received:
        moved, inputs, rowwise = sent
        created = None
        if is_first:
            self.own = [torch.empty_like(t) for t in inputs[len(outputs) :]]
            self.memory = [*outputs, *self.own]
            self.parts = self.views(self.memory)
            created = self.new_gathered_weight()
        sent_here = inputs[len(outputs) :]
        for own, of_rank in zip(self.own, sent_here):
            own.data.copy_(of_rank)  # as FSDP2's copies, this counts no write
        keep_for_current_stream(sent_here)
        self.present = set(moved)
        GATHERS.add(self)
        if self.plan.mode == "one":
            self.transpose()
            if is_in_backward() and not self.keeps_row:
                self.memory[0].untyped_storage().resize_(0)
                self.present = {COL}
        elif self.plan.mode == "split":
            self.part_directions()
            if rowwise:
                self.fill(ROW, rowwise)
        return created

    def part_directions(self) -> None:
        """Copies dgrad's tensors from the gathered memory, and frees the direction not gathered."""
        if COL in self.present:
            self.fill(COL, dict(enumerate(self.memory)))
            freed = [self.memory[i] for i in self.buffers_with(ROW)]
        else:
            freed = list(self.copied.values())
        for t in freed:
            t.untyped_storage().resize_(0)

    def fill(self, direction: int, gathered: dict[int, Tensor]) -> None:
        """Fills the tensors of one direction from what all ranks sent, by buffer."""
        for i in self.buffers_with(direction):
            target = self.copied.get(i, self.memory[i]) if direction == COL else self.memory[i]
            if target is gathered[i]:
                continue
            if (storage := target.untyped_storage()).nbytes() == 0:
                storage.resize_(target.nbytes)
            target.data.copy_(gathered[i][: len(target)])
        keep_for_current_stream(list(gathered.values()))
        self.present.add(direction)

    def buffers_with(self, direction: int) -> list[int]:
        """Lists the buffers that the tensors of one direction are in."""
        tensors = [[of for of, _ in buffer.tensors] for buffer in self.buffers]
        return [i for i, directions in enumerate(tensors) if direction in directions]

    def views(self, memory: list[Tensor]) -> list[Quantized]:
        """Returns both directions as views of the memory of buffers."""
        experts, found = self.shape[0], dict[Key, Tensor]()
        for place, (buffer, gathered) in enumerate(zip(self.buffers, memory)):
            for i, name in buffer.tensors:
                dtype, shape = self.layouts[i][name]
                if i == COL and len(buffer.tensors) > 1:
                    gathered = gathered.new_empty(experts * buffer.size)
                    self.copied[place] = gathered
                found[i, name] = gathered.view(dtype).view(-1, *shape)[:experts]
        if self.plan.mode == "one":
            for name in TENSORS:
                dtype, shape = self.layouts[COL][name]
                if name in self.transposed:
                    found[COL, name] = memory[0].new_empty(experts, *shape, dtype=dtype)
                elif (ROW, name) in found:
                    found[COL, name] = found[ROW, name]
        none = memory[0].new_empty(0, dtype=torch.float32)
        parts = []
        for i, spec in enumerate(self.specs):
            codes, scale, amax = (found.get((i, name), none) for name in TENSORS)
            shape = experts, *self.sizes[i]
            parts.append(Quantized(codes, scale, amax, spec.text, shape, i == COL))
        return parts

    def new_gathered_weight(self) -> tuple[GatheredWeight, tuple[Tensor, ...]]:
        """Makes the gathered weight, and lists the tensors that FSDP2 frees with it."""
        assert self.dtype is not None
        row, col = self.parts
        inner = [*self.own, *self.copied.values()]
        if self.plan.mode == "one":
            inner += [getattr(col, name) for name in self.transposed]
        if self.is_row_major:  # of the parameter's transpose
            row, col = replace(col, columnwise=False), replace(row, columnwise=True)
        return GatheredWeight(row, col, self.dtype), tuple(inner)

    def transpose(self) -> None:
        """Fills dgrad's tensors from fprop's; frees their memory where only forward follows."""
        row, col = self.parts
        if self.serves_forward_alone():
            for name in self.transposed:
                getattr(col, name).untyped_storage().resize_(0)
            return
        self.present.add(COL)
        if self.transposes is None:
            count = len(self.transposed)
            sizes = [*row.shape[1:], self.specs[ROW].code_bits]
            sizes += [*row.scale.shape[1:], 8 * row.scale.itemsize]
            self.transposes = torch.classes.minifloat.MatrixTransposes(
                [row.codes, raw_scale(row)][:count],
                [col.codes, raw_scale(col)][:count],
                sizes[: 3 * count],
            ).run
        self.transposes()

    # ---- the operands of a product ---------------------------------------------------------------

    def operands(self, columnwise: bool) -> list[Tensor]:
        """Returns the gathered weight as the op layer_operands would; on all ranks.

        Args:
            columnwise: whether backward reads the weight.
        """
        row, col = self.parts
        if ROW not in self.present:
            if is_in_backward():
                self.note_reading(ROW)
            self.bring(ROW)
        is_missing = columnwise and COL not in self.present and self.plan.mode == "split"
        if is_missing and not self.is_gathered_for_backward():
            self.bring(COL)
        read = Operand.of(col) if columnwise else Operand.none(row.codes.device)
        return Operands(Operand.of(row), read).tensors()

    def note_reading(self, selection: int) -> None:
        note_reading(selection, self, [self])

    def lacking(self, storage: int) -> int | None:
        row, col = (part.codes for part in self.parts)
        memory = [self.memory[i] for i in self.buffers_with(ROW)]
        if ROW not in self.present and storage in storages(memory):
            return ROW if has_memory(col) else None
        is_read_now = COL not in self.present and not self.is_gathered_for_backward()
        is_col = is_read_now and storage in storages(self.copied.values())
        return COL if is_col and has_memory(row) else None

    def bring(self, selection: int) -> None:
        if self.plan.mode == "split":
            shard = self.held_shard(self.memory[0].device)
            self.fill(selection, self.gather_direction(shard, selection))
            return
        row, col = (part.codes for part in self.parts)
        self.memory[0].untyped_storage().resize_(self.memory[0].nbytes)
        sizes = [*self.sizes[COL], self.specs[ROW].code_bits]
        torch.classes.minifloat.MatrixTransposes([col], [row], sizes).run()
        self.present.add(ROW)

    def gather_direction(self, shard: Tensor, direction: int) -> dict[int, Tensor]:
        """Casts one direction, and returns what all ranks cast, by buffer."""
        inputs, places = self.cast(shard, (direction,)), self.buffers_with(direction)
        return dict(zip(places, self.gather_apart([inputs[i] for i in places])))
