"""ExpertGather: how FSDP2 gathers weights of experts (E, N, K) that it cuts along dimension 0.

    before a gather    each rank casts its experts; no scale is shared with another rank's
    the gather         an input for each tensor: the codes, scales or amaxes of a rank's experts
    after it           operands are views of the gathered memory, in the order of experts

The last shards may be short or empty; zeros fill them up to ⌈E / ranks⌉ experts, and lie behind the
last expert of a view. The plan is a linear layer's (plan.py). In mode "one" dgrad's codes are
transposed from fprop's after the gather. In mode "split" the two directions take turns in one
memory, where their sizes are equal. A forward that backward runs again reads both directions:
`operands` then gathers the other one into memory of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._native import ops
from ...nn.grouped_product import GroupedProduct
from ...nn.state.draws import is_in_backward
from ...spec import Spec
from ...tensor.operands import Operand, Operands
from ...tensor.quantized import Quantized, raw_scale
from ...tensor.quantized_tensor import TENSORS
from .batch import BACKWARD, FORWARD
from .fsdp_group import SERVES_BOTH, ModuleGather
from .gathered_weight import GatheredWeight
from .plan import GatherPlan
from .sharded_weight import GatherInputs, Received, WeightWithQuantizedGather

ROW, COL = 0, 1  # directions of W: as fprop reads it, as dgrad reads it
Key = tuple[int, str]  # a direction, and the name of one of its tensors


@dataclass(frozen=True)
class GatherBuffer:
    """An input of the gather: its bytes an expert, and the tensors that take turns in it."""

    size: int
    tensors: tuple[Key, ...]


@dataclass(frozen=True)
class Direction:
    """One direction of an expert's matrix, as read: (rows, cols) in a spec."""

    spec: Spec
    rows: int
    cols: int

    def tail(self, name: str) -> tuple[int, ...]:
        """Returns the shape of one of its tensors, of an expert; (0,) where there is none."""
        if name == "codes":
            return self.rows, self.spec.sizes(self.rows, self.cols).code_cols
        if name == "scale":
            return self.spec.scale_shape(self.rows, self.cols)
        return self.spec.amax_shape(self.rows)

    def dtype(self, name: str) -> torch.dtype:
        if name == "scale":
            return self.spec.scale_dtype
        return torch.uint8 if name == "codes" else torch.float32

    def size(self, name: str) -> int:
        """Returns the bytes of one of its tensors, of an expert."""
        return torch.Size(self.tail(name)).numel() * self.dtype(name).itemsize


@dataclass(frozen=True)
class ExpertPayload:
    """One gather, from FSDP2's hook before it to the hook after it."""

    selection: int
    inputs: tuple[Tensor, ...]


def buffers_of(
    plan: GatherPlan, directions: tuple[Direction, Direction]
) -> tuple[GatherBuffer, ...]:
    """Lists the inputs of a plan's gathers, as many before forward as before backward."""
    buffers = []
    for name in TENSORS:
        sizes = [direction.size(name) for direction in directions]
        if plan.mode == "one":
            buffers.append(GatherBuffer(sizes[ROW], ((ROW, name),)))
        elif plan.mode == "split" and sizes[ROW] == sizes[COL]:
            buffers.append(GatherBuffer(sizes[ROW], ((ROW, name), (COL, name))))
        else:
            buffers += [GatherBuffer(sizes[i], ((i, name),)) for i in (ROW, COL)]
    return tuple(buffer for buffer in buffers if buffer.size > 0)


class ExpertGather(ModuleGather):
    """The gathers of a 3D parameter whose experts are cut over the ranks of a group.

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
        shape: torch.Size,
        group: dist.ProcessGroup,
        outer_dims: int,
    ) -> None:
        super().__init__(module)
        self.product = weakref.ref(product)
        self.plan = cast(GatherPlan, product.gather_plan)
        self.recipe, self.is_row_major = product.recipe.text, product.is_row_major
        self.group, self.outer_dims = group, outer_dims
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.shape, self.experts = shape, shape[0]
        self.chunk = -(-self.experts // self.world)  # experts of a full shard
        self.title = f"{product.fqn}: {self.recipe}, weight {tuple(shape)}"
        n, k = shape[:0:-1] if self.is_row_major else shape[1:]
        self.directions = (
            Direction(Spec.parse(self.plan.row), n, k),
            Direction(Spec.parse(self.plan.col), k, n),
        )
        self.buffers = buffers_of(self.plan, self.directions)
        self.rounded_to: torch.dtype | None = None  # before the cast
        self.shard: Tensor | None = None  # cast last
        self.parts: list[Quantized] = []  # both directions of the gathered weight
        self.own: list[Tensor] = []  # of one rank: the buffers that FSDP2 does not gather
        self.transposes: Callable[[], None] | None = None
        self.present: set[int] = set()  # the directions in the gathered memory

    def __str__(self) -> str:
        how = (
            f"weight is gathered in {self.dtype}: {self.reason}" if self.reason else str(self.plan)
        )
        return f"{how}, in {self.world} shards"

    # ---- before a gather -------------------------------------------------------------------------

    def send(self, shard: Tensor, dtype: torch.dtype | None) -> GatherInputs:
        """Returns the all-gather inputs of this rank's experts, and the gather for the later hook.

        Args:
            shard: (experts, …), this rank's part of the parameter.
            dtype: FSDP2's compute dtype; None: its hook does not pass it.
        """
        self.require_dtype(shard)
        if self.dtype is None:
            self.agree_and_decide(dtype, shard.device)
        if self.reason:
            return (self.padded(shard),), None
        self.shard = shard
        selection = BACKWARD if is_in_backward() else FORWARD
        inputs = self.cast(shard, self.selected(selection))
        return inputs, ExpertPayload(selection, inputs)

    def agree_and_decide(self, dtype: torch.dtype | None, device: torch.device) -> None:
        """Agrees on the dtype that FSDP2 computes in, and decides whether codes are gathered."""
        self.rounded_to = self.agree_on_dtype(dtype, self.group, device)
        if not self.reason and self.plan.mode == "split" and not self.is_gathered_for_backward():
            self.reason = SERVES_BOTH

    def selected(self, selection: int) -> tuple[int, ...]:
        """Returns the directions that a gather moves."""
        if self.plan.mode == "split":
            return (COL,) if selection == BACKWARD else (ROW,)
        return (ROW,) if self.plan.mode == "one" else (ROW, COL)

    @torch.no_grad()
    def cast(self, shard: Tensor, directions: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Casts this rank's experts, and returns the bytes of each buffer, (chunk * bytes)."""
        count, tensors = len(shard), {}
        if count > 0:
            with torch.autocast(shard.device.type, enabled=False):
                values = shard.to(self.rounded_to)
                operands = ops.layer_operands.default(
                    values.mT if self.is_row_major else values,
                    self.recipe,
                    "w",
                    rowwise=ROW in directions,
                    columnwise=COL in directions,
                    amax_history=self.history(count),
                )
            both = Operands.of(operands)
            tensors = {
                (i, n): getattr(both.direction(i == COL), n) for i in (ROW, COL) for n in TENSORS
            }
        inputs = []
        for buffer in self.buffers:
            payload = [tensors[key] for key in buffer.tensors if key[0] in directions and count > 0]
            if payload and count == self.chunk:
                inputs.append(bytes_of(payload[0]))
                continue
            inputs.append(shard.new_zeros(self.chunk * buffer.size, dtype=torch.uint8))
            if payload:
                inputs[-1][: count * buffer.size] = bytes_of(payload[0])
        return tuple(inputs)

    def history(self, count: int) -> Tensor | None:
        """Returns a copy of the amax history of this rank's experts."""
        product = self.product()
        assert product is not None
        history = product.amax_history
        if history is None:
            return None
        begin = self.rank * self.chunk
        return history[:, begin : begin + count].contiguous()

    # ---- after a gather --------------------------------------------------------------------------

    def receive(
        self, outputs: Sequence[Tensor], payload: ExpertPayload | None, out: object
    ) -> Received:
        """Returns the whole weight and its memory at the first gather; fills them at later ones."""
        if payload is None:
            whole = outputs[0].view(-1, *self.shape[1:])[: self.experts]
            return None if out is not None else (whole, ())
        created = None
        if out is None:
            self.own = [torch.empty_like(t) for t in payload.inputs[len(outputs) :]]
            self.parts = self.views([*outputs, *self.own])
            created = self.new_whole()
        for own, of_rank in zip(self.own, payload.inputs[len(outputs) :]):
            own.data.copy_(of_rank)  # as FSDP2's copies, this counts no write
        self.present = set(self.selected(payload.selection))
        if self.plan.mode == "one":
            self.transpose()
        return created

    def views(self, memory: list[Tensor]) -> list[Quantized]:
        """Returns both directions as views of the memory of buffers."""
        found: dict[Key, Tensor] = {}
        for buffer, gathered in zip(self.buffers, memory):
            for i, name in buffer.tensors:
                direction = self.directions[i]
                t = gathered.view(direction.dtype(name)).view(-1, *direction.tail(name))
                found[i, name] = t[: self.experts]
        if self.plan.mode == "one":
            codes, scale = (self.new_tensor(memory[0], name) for name in ("codes", "scale"))
            has_blocks = self.directions[ROW].spec.has_blocks
            found[COL, "codes"] = codes
            found[COL, "scale"] = scale if has_blocks else found[ROW, "scale"].detach()
            if (ROW, "amax") in found:
                found[COL, "amax"] = found[ROW, "amax"].detach()
        parts = []
        for i, direction in enumerate(self.directions):
            none = memory[0].new_empty(0, dtype=torch.float32)
            codes, scale, amax = (found.get((i, name), none) for name in TENSORS)
            shape = self.experts, direction.rows, direction.cols
            parts.append(Quantized(codes, scale, amax, direction.spec.text, shape, i == COL))
        return parts

    def new_tensor(self, like: Tensor, name: str) -> Tensor:
        """Allocates one of dgrad's tensors."""
        direction = self.directions[COL]
        return like.new_empty(self.experts, *direction.tail(name), dtype=direction.dtype(name))

    def new_whole(self) -> tuple[GatheredWeight, tuple[Tensor, ...]]:
        """Returns a new whole weight, and the tensors that FSDP2 frees and allocates with it."""
        assert self.dtype is not None
        row, col = self.parts
        inner = list(self.own)
        if self.plan.mode == "one":
            inner += [col.codes, col.scale] if self.directions[COL].spec.has_blocks else [col.codes]
        if self.is_row_major:  # of the parameter's transpose
            row, col = replace(col, columnwise=False), replace(row, columnwise=True)
        return GatheredWeight(row, col, self.dtype), tuple(inner)

    def transpose(self) -> None:
        """Fills dgrad's tensors from fprop's; frees their memory where only forward follows."""
        (row, col), spec = self.parts, self.directions[COL].spec
        if self.serves_forward_alone():
            for t in (col.codes, col.scale) if spec.has_blocks else (col.codes,):
                t.untyped_storage().resize_(0)
            return
        self.present.add(COL)
        if self.transposes is None:
            _, rows, cols = row.shape
            jobs = [(row.codes, col.codes, rows, cols, spec.code_bits)]
            if spec.has_blocks:
                bits = 8 * spec.scale_dtype.itemsize
                jobs.append((raw_scale(row), raw_scale(col), *row.scale.shape[1:], bits))
            self.transposes = torch.classes.minifloat.MatrixTransposes(
                [t for job in jobs for t in job[0].unbind()],
                [t for job in jobs for t in job[1].unbind()],
                [n for job in jobs for _ in range(self.experts) for n in job[2:]],
            ).run
        self.transposes()

    # ---- the operands of a product ---------------------------------------------------------------

    def operands(self, columnwise: bool) -> list[Tensor]:
        """Returns the gathered weight as the op layer_operands would; on all ranks.

        Args:
            columnwise: whether backward reads the weight.
        """
        row, col = self.parts
        if self.plan.mode == "split":
            if ROW not in self.present:
                row = self.fetch(ROW)
            if columnwise and COL not in self.present and not self.is_gathered_for_backward():
                col = self.fetch(COL)
        none = Operand.none(row.codes.device)
        read = [
            Operand(part.codes, raw_scale(part), part.amax, none.decoded) if is_read else none
            for part, is_read in ((row, True), (col, columnwise))
        ]
        return Operands(*read).tensors()

    def fetch(self, direction: int) -> Quantized:
        """Gathers one direction apart from FSDP2's gathers."""
        assert self.shard is not None
        memory = []
        for of_rank in self.cast(self.shard, (direction,)):
            memory.append(of_rank.new_empty(self.world * len(of_rank)))
            dist.all_gather_into_tensor(memory[-1], of_rank, group=self.group)
        return self.views(memory)[direction]


def bytes_of(t: Tensor) -> Tensor:
    """Returns the bytes of a tensor in one dimension."""
    return t.contiguous().view(-1).view(torch.uint8)


def wrap_sharded_experts(
    module: nn.Module, product: GroupedProduct, before: Any, parameter: Tensor
) -> None:
    """Wraps the local tensor of a 3D parameter that FSDP2 has cut along dimension 0.

    Args:
        module: it has the parameter.
        product: of the parameter.
        before: the parameter until now. Where it is a DTensor, its mesh is expert parallelism's.
        parameter: the new one. Any other than FSDP2's is left as it is.
    """
    if product.gather_plan is None or not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return
    local, mesh = parameter._local_tensor, parameter.device_mesh
    if isinstance(local, WeightWithQuantizedGather):
        product.weight_gather = cast(ExpertGather, local.weight_gather)
    if type(local) is not Tensor:
        return
    known = cast("ExpertGather | None", product.weight_gather)
    if known is not None:
        outer_dims, shape = known.outer_dims, known.shape
    else:
        outer_dims = before.device_mesh.ndim if isinstance(before, DTensor) else 0
        shape = getattr(before, "_local_tensor", before).shape
    inner = list(enumerate(parameter.placements))[: mesh.ndim - outer_dims]
    cuts = [(dim, placement) for dim, placement in inner if not placement.is_replicate()]
    outer = parameter.placements[mesh.ndim - outer_dims :]
    if any(getattr(placement, "dim", 0) != 0 for placement in outer):
        return  # ranks cut the experts' matrices, so no rank can cast one alone
    if len(cuts) != 1 or getattr(cuts[0][1], "dim", None) != 0:
        return
    gather = known or ExpertGather(module, product, shape, mesh.get_group(cuts[0][0]), outer_dims)
    parameter._local_tensor = WeightWithQuantizedGather(local, gather)
    product.weight_gather = gather
