"""Gathers the weights of linear layers as codes, where FSDP2 shards them.

A LinearGather belongs to one weight. In the first gather it casts its shard alone. From the second
gather on, the weights of one parameter group of FSDP2 form a Batch:

    first weight's pre-gather hook     one native call casts the shards of all weights
    each weight's pre-gather hook      returns the weight's codes to FSDP2
    last weight's post-gather hook     one native call fills the gathered weights

The native GatherBatch (torch/sharded/gather_batch.h) decides what each mode of a plan sends. Ranks
exchange amaxes (of a tensor, of a column, of a block that two ranks hold part of) in one
all-reduce: of all weights of a model in precompute_scales, else of one batch before its cast.

A gather before forward leaves tensors that only backward reads without memory. In mode "split" it
moves the rowwise codes, and the gather before backward moves the columnwise ones. In mode "one" the
columnwise codes are transposed from the rowwise ones, which the gather before backward then
frees. Where a forward needs codes that are not in memory, `LinearGather.bring` gets them: in mode
"split" by an all-gather for all weights of the batch, in mode "one" by a transpose:

    rowwise codes, in backward     where a forward runs again: when that forward first reads them,
                                   and from then on in each pre-gather hook of backward
    either codes, in forward       where FSDP2 has not resharded the weights before
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...nn.linear import Linear
from ...nn.state.random_state import is_capturing, is_in_backward
from ...spec import Spec
from ...tensor.quantized import Quantized
from .gather import (
    BACKWARD,
    FORWARD,
    Gather,
    GatherInputs,
    GatherPlan,
    Received,
    has_memory,
    keep_for_current_stream,
    storages,
)
from .recomputed import GATHERS, note_reading
from .weight_tensors import GatheredWeight, ShardedWeight

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .private_state import FSDPParam

State = list[tuple[Tensor, tuple[int, int, int]]]  # shards, and counts of writes to them
ALL_WEIGHTS = -1
WRITTEN = "fully_shard: expected all {} ranks to have written to {} since mf.step, as this rank has"
MODE = "fully_shard: expected all {} ranks to have {} in the mode that this rank has changed to"


# ---- one weight ----------------------------------------------------------------------------------


class LinearGather(Gather):
    """Gathers one layer's weight (n, cols), whose rows FSDP2 shards over the ranks of a group."""

    def __init__(
        self, layer: Linear, plan: GatherPlan, shape: torch.Size, group: dist.ProcessGroup
    ) -> None:
        super().__init__(layer, plan, f"{layer.fqn}: {layer.recipe}", shape, group)
        self.casts: tuple[Any, Any]  # native ShardCasts, rowwise and columnwise, since the first
        self.targets: list[Tensor] = []  # both directions' tensors, since the first gather
        self.gathered: set[int] = set()  # the gathers whose directions are in memory
        self.batch: Batch | None = None  # of FSDP2's parameter group; of a tied weight alone
        # The last two parameters that FSDP2 assigned: it assigns both at each gather.
        self._assigned: tuple[object, object] = (None, None)

    def has_assigned(self, parameter: object) -> bool:
        """Tells whether FSDP2 has assigned this parameter before, or gathers into it."""
        if parameter is self._assigned[0] or parameter is self._assigned[1]:
            return True
        local = getattr(parameter, "_local_tensor", None)
        is_shard = getattr(local, "weight_gather", None) is self
        is_of_fsdp = is_shard or type(parameter) is GatheredWeight
        if not (is_of_fsdp and isinstance(parameter, nn.Parameter)):
            return False
        self._assigned = parameter, self._assigned[0]
        return True

    def reason_against_codes(self) -> str:
        rounds, specs = self.rounded_to == torch.bfloat16, (self.plan.row, self.plan.col)
        row, col = (
            torch.classes.minifloat.ShardCast(spec, columnwise, *self.shape, rounds)
            for spec, columnwise in zip(specs, (False, True))
        )
        self.casts = row, col
        if row.fits(self.world) and (self.plan.mode == "one" or col.fits(self.world)):
            return ""
        has_transform = any(Spec.parse(spec).transform for spec in specs)
        what = "a transform" if has_transform else "a block whose values choose its scale"
        return f"{what} reaches over the end of a shard"

    def sends_alike(self) -> bool:
        row, col = (native.chunk_bytes(self.world) for native in self.casts)
        return bool(row == col)

    def send_codes(self, shard: Tensor) -> GatherInputs:
        return self.joined_batch().send(self, shard)

    def joined_batch(self) -> Batch:
        """Returns the batch of FSDP2's parameter group, once all its weights have been gathered."""
        if self.batch is not None or not self.targets:
            return self.batch or Batch([self])
        group, is_tied = self.fsdp_group(), False
        members: dict[LinearGather, weakref.ref[FSDPParam]] = {}
        for parameter in () if group is None else group.fsdp_params:
            local = cast("DTensor", parameter.sharded_param)._local_tensor
            gather = getattr(local, "weight_gather", None)
            if isinstance(gather, LinearGather) and gather.targets:
                is_tied = is_tied or gather in members
                members[gather] = weakref.ref(parameter)
        is_alone = is_tied or self not in members
        batch = Batch([self]) if is_alone else Batch(list(members), list(members.values()))
        for member in batch.gathers:
            member.batch = batch
        return batch

    def receive_codes(self, outputs: Sequence[Tensor], sent: Batch, is_first: bool) -> Received:
        created = self.new_gathered_weight(outputs[0]) if is_first else None
        GATHERS.add(self)
        sent.receive(self, outputs)
        return created

    def new_gathered_weight(self, codes: Tensor) -> tuple[GatheredWeight, tuple[Tensor, ...]]:
        """Makes the gathered weight, and lists the tensors that FSDP2 frees and allocates with it.

        Args:
            codes: uint8, the gathered bytes of all ranks, of which rowwise codes are a view.
        """
        assert self.dtype is not None
        row, col = (self.new_direction(columnwise, codes) for columnwise in (False, True))
        row = replace(row, codes=codes[: row.codes.numel()].view(row.codes.shape))
        has_row_scale, has_col_scale = (native.has_common_scale() for native in self.casts)
        if self.plan.mode == "one" and has_row_scale:
            col = replace(col, scale=row.scale.detach(), amax=row.amax.detach())
        inner = [col.codes]
        inner += [] if has_row_scale else [row.scale]
        inner += [] if has_col_scale else [col.scale]
        self.targets = [t for part in (row, col) for t in (part.codes, part.scale, part.amax)]
        return GatheredWeight(row, col, self.dtype), tuple(inner)

    def new_direction(self, columnwise: bool, like: Tensor) -> Quantized:
        spec = self.plan.col if columnwise else self.plan.row
        codes, scale, amax = self.casts[columnwise].new_operand(like)
        scale = scale.view(Spec.parse(spec).scale_dtype)
        shape = self.shape[::-1] if columnwise else self.shape
        return Quantized(codes, scale, amax, spec, shape, columnwise)

    def complete(self, whole: Tensor, reads_columnwise: bool) -> None:
        """Brings the directions that a forward reads and no gather has moved; on all ranks."""
        if not isinstance(whole, GatheredWeight):
            return
        if FORWARD not in self.gathered:
            if is_in_backward():
                self.note_reading(FORWARD)
            self.bring(FORWARD)
        is_missing = reads_columnwise and BACKWARD not in self.gathered
        if is_missing and not self.is_gathered_for_backward():
            self.bring(BACKWARD)

    def note_reading(self, selection: int) -> None:
        note_reading(selection, self, self.joined_batch().gathers)

    def lacking(self, storage: int) -> int | None:
        row, col = self.targets[:3], self.targets[3:]
        if FORWARD not in self.gathered and storage in storages(row):
            return FORWARD if has_memory(col[0]) else None
        is_read_now = BACKWARD not in self.gathered and not self.is_gathered_for_backward()
        is_col = is_read_now and storage in storages(col)
        return BACKWARD if is_col and has_memory(row[0]) else None

    def bring(self, selection: int) -> None:
        if self.plan.mode == "split":
            self.joined_batch().fetch(selection)
            return
        row, col, bits = self.targets[0], self.targets[3], Spec.parse(self.plan.row).code_bits
        row.untyped_storage().resize_(self.world * self.casts[0].chunk_bytes(self.world))
        sizes = [*self.shape[::-1], bits]
        torch.classes.minifloat.MatrixTransposes([col], [row], sizes).run()
        self.gathered.add(FORWARD)

    def in_memory(self, selection: int) -> set[int]:
        """Returns the gathers whose directions are in memory after one of them."""
        if self.plan.mode == "split":
            return {selection}
        is_transposed = self.plan.mode == "one" and selection == BACKWARD
        return {BACKWARD} if is_transposed and not self.keeps_row else {FORWARD, BACKWARD}


# ---- the weights of one all-gather ---------------------------------------------------------------


class Batch:
    """Casts the weights that FSDP2 gathers together, in FSDP2's order, by one native object.

    Args:
        gathers: of the weights.
        parameters: references to FSDP2's parameters; None: one weight, whose shard its hook passes.
    """

    def __init__(
        self, gathers: Sequence[LinearGather], parameters: Sequence[weakref.ref[FSDPParam]] = ()
    ) -> None:
        first = gathers[0]
        self.gathers, self.fsdp_parameters = list(gathers), parameters
        self.ranks, self.world = first.group, first.world
        self.native = torch.classes.minifloat.GatherBatch(
            [gather.casts[0] for gather in gathers],
            [gather.casts[1] for gather in gathers],
            [gather.plan.mode for gather in gathers],
            first.world,
            first.rank,
        )
        self.fill = self.native.fill
        self.exchanged = [self.native.exchanged(selection) for selection in (FORWARD, BACKWARD)]
        self.splits = [gather for gather in gathers if gather.plan.mode == "split"]
        self.measured: State = []  # when mf.step exchanged amaxes
        self.was_training = True  # at the last gather that read those amaxes, or could not
        self.is_captured = False  # whether a CUDA graph has captured a gather
        self.start(FORWARD, [], [])

    # ---- a gather --------------------------------------------------------------------------------

    def start(self, selection: int, shards: list[Tensor], inputs: list[list[Tensor]]) -> None:
        """Starts a gather of these shards, which were cast to the inputs of each."""
        self.selection, self.cast_shards, self.inputs = selection, shards, inputs
        self.outputs: list[Tensor] = []  # all ranks' inputs, weight by weight
        self.rowwise: list[list[Tensor]] = []  # those of split weights, of a fetch
        self.taken: list[list[Tensor]] = []  # inputs of a world of one

    def send(self, gather: LinearGather, shard: Tensor) -> GatherInputs:
        """Returns the inputs of one weight, and their batch; casts all weights for the first one.

        A shard that this batch has not cast is cast alone: FSDP2 offloads it, or calls hooks in
        another order.
        """
        index = self.gathers.index(gather)
        if index == 0:
            self.cast_all(shard)
        if not self.inputs or not self.inputs[index] or self.cast_shards[index] is not shard:
            return Batch([gather]).send(gather, shard)
        inputs, self.inputs[index] = self.inputs[index], []
        if self.world == 1:
            self.taken.append(inputs)
        return tuple(inputs), self

    def cast_all(self, shard: Tensor) -> None:
        """Casts the shards of all weights for one gather."""
        shards = self.shards() or [shard]
        selection = BACKWARD if is_in_backward() else FORWARD
        is_whole = shards[0] is shard and all([s is not None for s in shards])
        inputs = self.cast(shards, selection, ALL_WEIGHTS) if is_whole else []
        self.start(selection, shards if is_whole else [], inputs)
        if is_whole and self.splits and selection == BACKWARD and self.gathers[0].keeps_row:
            self.rowwise = self.gather_splits(shards, FORWARD)

    def receive(self, gather: LinearGather, outputs: Sequence[Tensor]) -> None:
        """Collects all ranks' codes of one weight; fills all weights after the last one."""
        index = self.gathers.index(gather)
        self.outputs += outputs
        if self.world == 1:  # FSDP2 gathers the first input alone
            self.outputs += self.taken[index][len(outputs) :]
        if index < len(self.gathers) - 1:
            return
        selection, forward_alone = self.selection, self.gathers[0].serves_forward_alone()
        targets, keeps_row = self.targets(), self.gathers[0].keeps_row
        self.fill(self.outputs, targets, selection, ALL_WEIGHTS, forward_alone, keeps_row)
        for taken in self.taken:
            keep_for_current_stream(taken)
        rowwise = self.rowwise
        self.start(selection, [], [])
        for member in self.gathers:
            member.gathered = member.in_memory(selection)
        if rowwise:
            self.fill_splits(rowwise, FORWARD)

    # ---- a gather apart from FSDP2's -------------------------------------------------------------

    def fetch(self, selection: int) -> None:
        """Gathers the split weights in one direction; on all ranks."""
        device = self.splits[0].targets[0].device
        shards = [gather.held_shard(device) for gather in self.gathers]
        self.fill_splits(self.gather_splits(shards, selection), selection)

    def gather_splits(self, shards: list[Tensor], selection: int) -> list[list[Tensor]]:
        """Casts one direction, and returns what all ranks cast of each split weight."""
        cast = zip(self.gathers, self.cast(shards, selection, ALL_WEIGHTS))
        inputs = [of_weight for gather, of_weight in cast if gather.plan.mode == "split"]
        outputs = iter(self.splits[0].gather_apart([t for of_weight in inputs for t in of_weight]))
        return [[next(outputs) for _ in of_weight] for of_weight in inputs]

    def fill_splits(self, outputs: list[list[Tensor]], selection: int) -> None:
        """Fills one direction of the split weights; keeps the other one."""
        for split, of_weight in zip(self.splits, outputs):
            index = self.gathers.index(split)
            self.fill(of_weight, self.targets(), selection, index, False, True)
            keep_for_current_stream(of_weight)
            split.gathered.add(selection)

    def targets(self) -> list[Tensor]:
        """Lists the tensors that a gather fills: both directions' codes, scale and amax."""
        return [t for gather in self.gathers for t in gather.targets]

    def cast(self, shards: list[Tensor], selection: int, weight: int) -> list[list[Tensor]]:
        """Casts one weight, or all; exchanges amaxes first unless those of mf.step are current.

        Returns:
            The inputs of the all-gather, of each weight.
        """
        self.is_captured = self.is_captured or is_capturing(shards[0].device)
        # Evaluation may replace weights with no write counted.
        is_training = all([gather.module().training for gather in self.gathers])
        if self.measured and self.exchanged[selection] and is_training != self.was_training:
            absent = "their layer is in the other mode"
            self.gathers[0].meet("the gather in another mode of", MODE, absent)
            self.was_training = is_training
        is_measured = is_training and self.is_measured(shards)
        if not is_measured and self.exchanged[selection]:
            exchange_amaxes([self], [shards], selection)
            is_measured = True
        kept = [gather.module().amax_history for gather in self.gathers]
        histories = [s if h is None else h for h, s in zip(kept, shards)]  # not read: any tensor
        found = self.native.cast(shards, histories, selection, weight, is_measured)
        return cast(list[list[Tensor]], found)

    # ---- the shards ------------------------------------------------------------------------------

    def parameters(self) -> list[DTensor]:
        """Returns the sharded parameters that FSDP2 still has, in its order."""
        found = [reference() for reference in self.fsdp_parameters]
        return [cast("DTensor", p.sharded_param) for p in found if p is not None]

    def shards(self) -> list[Any]:
        """Returns this rank's rows of each of `parameters`."""
        return [getattr(p._local_tensor, "shard", None) for p in self.parameters()]

    # ---- amaxes that mf.step exchanged -----------------------------------------------------------

    def is_measured(self, shards: list[Tensor]) -> bool:
        """Tells whether the amaxes that mf.step exchanged still hold: no shard was written since.

        All ranks must return the same, because False makes all of them exchange amaxes. So a rank
        whose shard was written waits in a handshake until every rank reports a write. torch counts
        no write where a CUDA graph is replayed. So a gather that a graph has captured returns
        False, and so do all gathers of this batch after it.

        Raises:
            ValueError: other ranks have not written to their shards.
        """
        if self.is_captured or not self.measured:
            return False
        now = self.state_of(shards)
        if all([a is b and c == d for (a, c), (b, d) in zip(self.measured, now)]) and now:
            return True
        if any(self.exchanged) and self.world > 1:
            absent = "their layer is not written to"
            self.gathers[0].meet("the gather after a write to", WRITTEN, absent)
        self.measured = []
        return False

    def state_of(self, shards: list[Tensor]) -> State:
        """Returns the shards and the counts of writes to them; none where a rank cannot count.

        Eager writes count on the shard: those to the parameter, to its local tensor, to a state
        dict's view of it. Those of compiled code count on its input, the parameter or its local
        tensor.
        """
        parameters = self.parameters()
        has_rows = all([g.shape[0] > (g.world - 1) * g.chunk for g in self.gathers])
        if not has_rows or any([t.is_inference() for t in (*parameters, *shards)]):
            return []  # a rank without rows of a weight, or tensors without counts
        local = [cast(ShardedWeight, p._local_tensor) for p in parameters]
        counts = [(p._version, t._version, t.shard._version) for p, t in zip(parameters, local)]
        return list(zip(shards, counts))


def exchange_amaxes(
    batches: Sequence[Batch], shards: Sequence[list[Tensor]], selection: int
) -> None:
    """Measures the amaxes of batches of the same ranks, in one all-reduce."""
    exchange = torch.classes.minifloat.AmaxExchange([batch.native for batch in batches])
    amaxes = exchange.measure([shard for of_batch in shards for shard in of_batch], selection)
    if amaxes.numel() > 0 and batches[0].world > 1:
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=batches[0].ranks)
    exchange.accept(amaxes)  # bits of magnitudes order like the values, NaN above infinity
