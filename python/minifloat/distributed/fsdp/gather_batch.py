"""Casts and fills the weights that FSDP2 gathers together, by two native calls a gather.

    first weight's pre-gather hook     one native call casts the shards of all weights; the other
                                       hooks return their inputs to FSDP2 in turn
    last weight's post-gather hook     one native call fills the gathered weights

The native GatherBatch (torch/sharded/gather_batch.h) decides what each mode of a plan sends. Ranks
exchange amaxes (of a tensor, of a column, of a block that two ranks hold part of) in one
all-reduce: of all weights of a model in precompute_scales, else of one batch before its cast.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...nn.state.random_state import is_capturing, is_in_backward
from ...spec import Spec
from .gather import BACKWARD, FORWARD, Gather, GatherInputs, keep_for_current_stream
from .private_state import outputs_of
from .weight_tensors import BeforeGather, ShardedWeight

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .private_state import FSDPParam

ALL_WEIGHTS = -1
WRITTEN = "fully_shard: expected all {} ranks to have written to {} since mf.step, as this rank has"
MODE = "fully_shard: expected all {} ranks to have {} in the mode that this rank has changed to"


class BatchedGather(Gather):
    """Gathers one weight by a Batch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.casts: tuple[Any, Any]  # native ShardCasts, rowwise and columnwise, since the first
        self.targets: list[Tensor] = []  # both directions' tensors, since the first gather
        # The gathers whose directions are in memory, by mode, of those gathered together.
        self.gathered_together: dict[str, frozenset[int]] = {}
        self.has_alias = False  # whether other tensors have the shard's memory
        self.batch: Batch | None = None  # of FSDP2's parameter group; of a tied weight alone

    def send_codes(self, shard: Tensor) -> GatherInputs:
        return self.joined_batch().send(self, shard)

    def forget(self) -> None:
        if self.batch is not None:
            self.batch.forget()

    def note_write(self) -> None:
        if self.batch is not None:
            self.batch.has_current_amaxes = False

    def note_alias(self) -> None:
        self.has_alias = True
        self.forget()

    def gathered(self) -> frozenset[int]:
        """Returns the gathers whose directions are in memory."""
        return self.gathered_together.get(self.plan.mode, frozenset())

    def note_gathered(self, selection: int) -> None:
        """Notes that one more direction of this mode's weights is in memory."""
        self.gathered_together[self.plan.mode] = self.gathered() | {selection}

    def joined_batch(self) -> Batch:
        """Returns the batch of FSDP2's parameter group, once all its weights have been gathered."""
        if self.batch is not None or not self.targets:
            return self.batch or Batch([self])
        group, is_tied = self.fsdp_group(), False
        members: dict[BatchedGather, weakref.ref[FSDPParam]] = {}
        for parameter in () if group is None else group.fsdp_params:
            local = cast("DTensor", parameter.sharded_param)._local_tensor
            gather = getattr(local, "weight_gather", None)
            if isinstance(gather, BatchedGather) and gather.targets and outputs_of(parameter):
                is_tied = is_tied or gather in members
                members[gather] = weakref.ref(parameter)
        is_alone = is_tied or self not in members
        batch = Batch([self]) if is_alone else Batch(list(members), list(members.values()))
        for member in batch.gathers:
            member.batch = batch
        return batch


class Batch:
    """Casts the weights that FSDP2 gathers together, in FSDP2's order, by one native object.

    FSDP2 calls its hooks for each weight, and the host has few microseconds for each. So what holds
    from gather to gather is kept until `forget`, the native object holds the tensors, and counts of
    writes are read only where an op may have written.

    Args:
        gathers: of the weights.
        parameters: references to FSDP2's parameters; empty: one weight, whose shard its hook has.
    """

    def __init__(
        self, gathers: Sequence[BatchedGather], parameters: Sequence[weakref.ref[FSDPParam]] = ()
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
        self.native_cast, self.fill = self.native.cast, self.native.fill
        self.exchanged = [self.native.exchanged(selection) for selection in (FORWARD, BACKWARD)]
        # The last two exchanges of amaxes, each with its batches, of which this one is the first.
        self.exchanges: list[tuple[tuple[Batch, ...], Any]] = []
        self.splits = [gather for gather in gathers if gather.plan.mode == "split"]
        self.fills_both = len(self.splits) < len(gathers)  # directions of a weight, after a gather
        specs = {spec for gather in gathers for spec in (gather.plan.row, gather.plan.col)}
        self.is_delayed = any([Spec.parse(spec).is_delayed for spec in specs])
        self.title = "; ".join([gather.title for gather in gathers])
        self.found: list[Tensor] = []  # FSDP2's sharded parameters, and their local tensors
        self.held: list[Tensor] = []  # this rank's rows of each weight
        self.counts_writes = False  # whether torch counts the writes to all of them
        self.hooks: list[BeforeGather] = []  # their hooks
        self.turn = -1  # of the hook that is to be called next
        self.inputs: list[list[Tensor]] = []  # of that hook and those after it, last first
        self.rowwise: Sequence[list[Tensor]] = ()  # fprop's, gathered apart before backward
        self.taken: Sequence[list[Tensor]] = ()  # the inputs in a world of one
        # The gathers whose directions are in memory, by mode: now, and after each gather. Weights
        # refer to the former, and not to this batch.
        modes = {gather.plan.mode for gather in gathers}
        self.gathered: dict[str, frozenset[int]] = {}
        self.gathered_after = [
            [{mode: in_memory(mode, selection, keeps) for mode in modes} for keeps in (False, True)]
            for selection in (FORWARD, BACKWARD)
        ]
        self.is_current = False  # whether what `shards` found still holds
        self.has_targets = False  # whether `native` holds what a gather fills
        self.has_amaxes = False  # whether mf.step has exchanged amaxes
        self.are_replaced = False  # whether a gather in evaluation has replaced those
        # Whether it has, the layers are in training, and no op can have written to a shard since.
        self.has_current_amaxes = False
        self.has_alias = False  # whether writes may come that note_write is not told of
        self.is_training = False  # whether all layers are in training
        self.was_training = True  # at the last gather that read those amaxes, or could not
        self.is_captured = False  # whether a CUDA graph has captured a gather

    # ---- a gather --------------------------------------------------------------------------------

    def send(self, gather: BatchedGather, shard: Tensor) -> GatherInputs:
        """Starts a gather of all weights by their first one; casts any other shard alone.

        FSDP2 offloads that shard, or calls hooks in another order.
        """
        held = self.shards()
        if not self.fsdp_parameters:
            held = self.hold([shard])
        if gather is not self.gathers[0] or not held or held[0] is not shard:
            self.forget()
            self.turn, self.inputs = -1, []  # of a gather that an exception ended
            return Batch([gather]).send(gather, shard)
        for member, of_member in zip(self.gathers, held):
            member.require_dtype(of_member)
        self.is_current = bool(self.hooks)
        return self.start(), self.receiver(0)

    def receiver(self, place: int) -> Callable[[Sequence[Tensor]], object]:
        """Returns what is called with the outputs of the weight at a place.

        The last one's receives those of all weights.
        """
        return self.receive if place == len(self.gathers) - 1 else id  # does nothing

    def start(self) -> list[Tensor]:
        """Casts the shards of all weights, and keeps what the hooks but the first return.

        Returns:
            The inputs of the first weight.
        """
        selection = self.selection = BACKWARD if is_in_backward() else FORWARD
        inputs = self.inputs = self.cast(selection)
        is_read_again = selection == BACKWARD and self.splits and self.gathers[0].keeps_row
        self.rowwise = self.gather_splits(FORWARD) if is_read_again else ()
        self.taken = list(inputs) if self.world == 1 else ()
        inputs.reverse()
        self.turn = 1
        return inputs.pop()

    def receive(self, outputs: Sequence[Tensor]) -> None:
        """Fills all weights, when FSDP2 has their outputs. outputs: the last one's."""
        received, selection, first = outputs, self.selection, self.gathers[0]
        if self.taken:  # a world of one: FSDP2 gathers the first input of each weight alone
            firsts = [outputs_of(parameter)[0] for parameter in self.kept_parameters()] or outputs
            received = [t for one, ts in zip(firsts, self.taken) for t in (one, *ts[1:])]
        if not self.has_targets:
            self.hold_targets()
            held = [outputs_of(parameter) for parameter in self.kept_parameters()]
            self.native.hold_outputs([t for of_weight in held for t in of_weight])
            for gather in self.gathers:
                gather.gathered_together = self.gathered
            self.has_targets = True
        is_forward = keeps_row = False  # each is read in one of the gathers
        if selection == BACKWARD:
            keeps_row = first.keeps_row
        elif self.fills_both:
            is_forward = first.serves_forward_alone()
        self.fill(received, selection, ALL_WEIGHTS, is_forward, keeps_row)
        self.gathered.update(self.gathered_after[selection][keeps_row])
        if self.taken:
            for taken in self.taken:
                keep_for_current_stream(taken)
            self.taken = ()
        if self.rowwise:
            self.fill_splits(self.rowwise, FORWARD)
            self.rowwise = ()

    # ---- a gather apart from FSDP2's -------------------------------------------------------------

    def fetch(self, selection: int) -> None:
        """Gathers the split weights in one direction; on all ranks."""
        device, held = self.splits[0].targets[0].device, self.shards()
        shards = [gather.held_shard(device) for gather in self.gathers]
        is_held = len(held) == len(shards) and all(map(is_, held, shards))
        batch = self if is_held else Batch(self.gathers)
        if not is_held:
            batch.hold(shards)
        batch.fill_splits(batch.gather_splits(selection), selection)

    def gather_splits(self, selection: int) -> list[list[Tensor]]:
        """Casts one direction, and returns what all ranks cast of each split weight."""
        cast = zip(self.gathers, self.cast(selection))
        inputs = [of_weight for gather, of_weight in cast if gather.plan.mode == "split"]
        outputs = iter(self.splits[0].gather_apart([t for of_weight in inputs for t in of_weight]))
        return [[next(outputs) for _ in of_weight] for of_weight in inputs]

    def fill_splits(self, outputs: Sequence[list[Tensor]], selection: int) -> None:
        """Fills one direction of the split weights; keeps the other one."""
        self.hold_targets()
        for split, of_weight in zip(self.splits, outputs):
            self.fill(of_weight, selection, self.gathers.index(split), False, True)
            keep_for_current_stream(of_weight)
            split.note_gathered(selection)

    def transpose_back(self) -> None:
        """Makes the rowwise codes that the weights of mode "one" lack from the columnwise ones."""
        found = [g for g in self.gathers if g.plan.mode == "one" and FORWARD not in g.gathered()]
        rows, cols = [g.targets[0] for g in found], [g.targets[3] for g in found]
        sizes = [(*g.shape[::-1], Spec.parse(g.plan.row).code_bits) for g in found]
        for gather, row in zip(found, rows):
            row.untyped_storage().resize_(gather.world * gather.casts[0].chunk_bytes(gather.world))
        numbers = [number for of_weight in sizes for number in of_weight]
        torch.classes.minifloat.MatrixTransposes(cols, rows, numbers).run()
        for gather in found:
            gather.note_gathered(FORWARD)

    def hold_targets(self) -> None:
        """Lets `native` hold what a gather fills: both directions' codes, scale and amax."""
        self.native.hold_targets([t for gather in self.gathers for t in gather.targets])

    def cast(self, selection: int) -> list[list[Tensor]]:
        """Casts all weights; exchanges amaxes first unless those of mf.step are current.

        Returns:
            The inputs of the all-gather, of each weight.
        """
        if self.is_cuda and not self.is_captured and is_capturing(self.held[0].device):
            self.is_captured, self.has_current_amaxes = True, False
        is_measured = self.has_current_amaxes and not ShardedWeight.is_traced
        if not is_measured:
            is_measured = self.is_measured(selection)
        if not is_measured and self.exchanged[selection]:
            exchange_amaxes((self,), selection)
            is_measured = True
        inputs: list[list[Tensor]] = self.native_cast(selection, is_measured)
        return inputs

    # ---- the shards ------------------------------------------------------------------------------

    def shards(self) -> list[Tensor]:
        """Returns this rank's rows of each weight; none where FSDP2 has other tensors."""
        if self.is_current:
            return self.held
        self.is_training = all([gather.module().training for gather in self.gathers])
        self.has_alias = any([gather.has_alias for gather in self.gathers])
        self.has_current_amaxes = False
        parameters: list[Any] = [p.sharded_param for p in self.kept_parameters()]
        local = [p._local_tensor for p in parameters]
        found = parameters + local
        if len(found) == len(self.found) and all(map(is_, found, self.found)):
            return self.hold(self.held)
        self.found = found
        for hook in self.hooks:
            hook.batch = None
        is_sharded = all([isinstance(t, ShardedWeight) for t in local])
        self.hold([t.shard for t in local] if is_sharded else [])
        self.hooks = [t.fsdp_pre_all_gather for t in local] if is_sharded else []
        for place, hook in enumerate(self.hooks):
            hook.batch, hook.place, hook.receiver = self, place, self.receiver(place)
        # Eager writes count on the shard: those to the parameter, to its local tensor, to a state
        # dict's view of it. Those of compiled code count on its input, the parameter or its local
        # tensor. None are counted where a rank has no rows of a weight, or a tensor has no count.
        has_rows = all([g.shape[0] > (g.world - 1) * g.chunk for g in self.gathers])
        tensors = found + self.held
        is_inference = any([t.is_inference() for t in tensors])
        self.counts_writes = is_sharded and has_rows and not is_inference
        self.native.count_writes(tensors if self.counts_writes else [])
        return self.held

    def kept_parameters(self) -> list[FSDPParam]:
        """Returns FSDP2's parameters that are still in use."""
        return [p for reference in self.fsdp_parameters if (p := reference()) is not None]

    def hold(self, shards: list[Tensor]) -> list[Tensor]:
        """Lets `native` hold these shards, and the amax histories of their layers."""
        histories = [gather.module().amax_history for gather in self.gathers if self.is_delayed]
        of_shards = [s if h is None else h for h, s in zip(histories, shards)]
        self.native.hold_shards(shards, of_shards)
        self.held, self.is_cuda = shards, any([t.is_cuda for t in shards])
        return shards

    def forget(self) -> None:
        """Looks at FSDP2's parameters, the gathered tensors and the layers again."""
        self.has_targets = self.is_current = False

    # ---- amaxes that mf.step exchanged -----------------------------------------------------------

    def is_measured(self, selection: int) -> bool:
        """Tells whether the amaxes that mf.step exchanged still hold: no shard was written since.

        All ranks must return the same, because False makes all of them exchange amaxes. So a rank
        whose shard was written waits in a handshake until every rank reports a write. torch counts
        no write where a CUDA graph is replayed. So a gather that a graph has captured returns
        False, and so do all gathers of this batch after it.

        Raises:
            ValueError: other ranks have not written to their shards, or their layers are in the
                other mode: evaluation may replace weights with no write counted.
        """
        is_training = self.is_training
        if is_training != self.was_training and self.has_amaxes and self.exchanged[selection]:
            absent = "their layer is in the other mode"
            self.gathers[0].meet("the gather in another mode of", MODE, absent)
            self.was_training = is_training
        if not is_training and self.exchanged[selection]:
            self.are_replaced = True  # by the exchange that follows
        if not is_training or self.is_captured or self.are_replaced or not self.has_amaxes:
            return False
        if not self.native.is_written():
            self.has_current_amaxes = not self.has_alias
            return True
        if any(self.exchanged) and self.world > 1:
            absent = "their layer is not written to"
            self.gathers[0].meet("the gather after a write to", WRITTEN, absent)
        self.has_amaxes = False
        return False

    def note_measured(self) -> None:
        """Notes that mf.step has exchanged amaxes."""
        self.has_amaxes, self.are_replaced = self.counts_writes, False
        self.has_current_amaxes = self.has_amaxes and self.is_training and not self.has_alias


def in_memory(mode: str, selection: int, keeps_row: bool) -> frozenset[int]:
    """Returns the gathers whose directions are in memory after one of them."""
    if mode == "split":
        return frozenset({selection})
    is_freed = mode == "one" and selection == BACKWARD and not keeps_row
    return frozenset({BACKWARD} if is_freed else {FORWARD, BACKWARD})


def exchange_amaxes(batches: tuple[Batch, ...], selection: int) -> None:
    """Measures the amaxes of batches of the same ranks, in one all-reduce."""
    first = batches[0]
    exchange = next((known for of, known in first.exchanges if of == batches), None)
    if exchange is None:
        exchange = torch.classes.minifloat.AmaxExchange([batch.native for batch in batches])
        if first.fsdp_parameters:  # else it casts one shard, and is dropped
            first.exchanges = [*first.exchanges[-1:], (batches, exchange)]
    amaxes = exchange.measure(selection)
    if amaxes.numel() > 0 and first.world > 1:
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=first.ranks)
    exchange.accept(amaxes)  # bits of magnitudes order like the values, NaN above infinity
