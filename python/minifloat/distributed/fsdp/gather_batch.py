"""Casts and fills the weights that FSDP2 gathers together, by two native calls a gather.

    first weight's pre-gather hook     one native call casts the shards of all weights, and each
                                       other hook is given the inputs that it returns to FSDP2
    last weight's post-gather hook     one native call fills the gathered weights

The native GatherBatch (torch/sharded/gather_batch.h) decides what each mode of a plan sends. Ranks
exchange amaxes (of a tensor, of a column, of a block that two ranks hold part of) in one
all-reduce: of all weights of a model in precompute_scales, else of one batch before its cast.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...nn.state.random_state import is_capturing, is_in_backward
from ...private_torch import WithoutTorchFunction
from ...spec import Spec
from .gather import BACKWARD, FORWARD, Gather, GatherInputs, keep_for_current_stream
from .weight_tensors import BeforeGather, ShardedWeight

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .private_state import FSDPParam

State = tuple[list[Tensor], int]  # tensors, and the number of writes to all of them
ALL_WEIGHTS = -1
WRITTEN = "fully_shard: expected all {} ranks to have written to {} since mf.step, as this rank has"
MODE = "fully_shard: expected all {} ranks to have {} in the mode that this rank has changed to"
writes_of: Callable[[Tensor], int] = attrgetter("_version")


class BatchedGather(Gather):
    """Gathers one weight by a Batch."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.casts: tuple[Any, Any]  # native ShardCasts, rowwise and columnwise, since the first
        self.targets: list[Tensor] = []  # both directions' tensors, since the first gather
        self.gathered = frozenset[int]()  # the gathers whose directions are in memory
        self.has_alias = False  # whether other tensors have the shard's memory
        self.batch: Batch | None = None  # of FSDP2's parameter group; of a tied weight alone

    def send_codes(self, shard: Tensor) -> GatherInputs:
        return self.joined_batch().send(self, shard)

    def forget(self) -> None:
        if self.batch is not None:
            self.batch.forget()

    def note_write(self) -> None:
        if self.batch is not None:
            self.batch.is_touched = True

    def note_alias(self) -> None:
        self.has_alias = True
        self.forget()

    def joined_batch(self) -> Batch:
        """Returns the batch of FSDP2's parameter group, once all its weights have been gathered."""
        if self.batch is not None or not self.targets:
            return self.batch or Batch([self])
        group, is_tied = self.fsdp_group(), False
        members: dict[BatchedGather, weakref.ref[FSDPParam]] = {}
        for parameter in () if group is None else group.fsdp_params:
            local = cast("DTensor", parameter.sharded_param)._local_tensor
            gather = getattr(local, "weight_gather", None)
            if isinstance(gather, BatchedGather) and gather.targets:
                is_tied = is_tied or gather in members
                members[gather] = weakref.ref(parameter)
        is_alone = is_tied or self not in members
        batch = Batch([self]) if is_alone else Batch(list(members), list(members.values()))
        for member in batch.gathers:
            member.batch = batch
        return batch

    def in_memory(self, selection: int, keeps_row: bool) -> frozenset[int]:
        """Returns the gathers whose directions are in memory after one of them."""
        if self.plan.mode == "split":
            return frozenset({selection})
        is_transposed = self.plan.mode == "one" and selection == BACKWARD
        return frozenset({BACKWARD} if is_transposed and not keeps_row else {FORWARD, BACKWARD})


class Batch:
    """Casts the weights that FSDP2 gathers together, in FSDP2's order, by one native object.

    FSDP2 calls its hooks for each weight, and the host has few microseconds for each. So what holds
    from gather to gather is kept until `forget`, and counts of writes are read only where an op may
    have written.

    Args:
        gathers: of the weights.
        parameters: references to FSDP2's parameters; None: one weight, whose shard its hook passes.
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
        self.splits = [gather for gather in gathers if gather.plan.mode == "split"]
        specs = {spec for gather in gathers for spec in (gather.plan.row, gather.plan.col)}
        self.is_delayed = any([Spec.parse(spec).is_delayed for spec in specs])
        self.title = "; ".join([gather.title for gather in gathers])
        self.found: list[Tensor] = []  # FSDP2's sharded parameters, and their local tensors
        self.held: list[Tensor] = []  # this rank's rows of each weight
        self.counting: list[Tensor] = []  # what counts writes to these
        self.hooks: list[BeforeGather] = []  # their hooks
        self.targets: list[Tensor] = []  # what a gather fills: both directions of each weight
        self.in_memory: dict[tuple[int, bool], list[frozenset[int]]] = {}  # after each gather
        self.measured: State = ([], 0)  # when mf.step exchanged amaxes
        self.is_touched = True  # whether an op may have written to a shard since then
        self.has_alias = False  # whether writes may come that note_write is not told of
        self.is_training = False  # whether all layers are in training
        self.histories = [gather.module().amax_history for gather in gathers]
        self.was_training = True  # at the last gather that read those amaxes, or could not
        self.is_captured = False  # whether a CUDA graph has captured a gather

    # ---- a gather --------------------------------------------------------------------------------

    def send(self, gather: BatchedGather, shard: Tensor) -> GatherInputs:
        """Starts a gather of all weights by their first one; casts any other shard alone.

        FSDP2 offloads that shard, or calls hooks in another order.
        """
        held = self.shards()
        if not self.fsdp_parameters:
            held = [shard]
        if gather is not self.gathers[0] or not held or held[0] is not shard:
            return Batch([gather]).send(gather, shard)
        self.held = held
        for member, of_member in zip(self.gathers, held):
            member.require_dtype(of_member)
        for hook in self.hooks[:1]:
            hook.start = self.start
        return self.start()

    def start(self) -> GatherInputs:
        """Casts the shards of all weights, and gives the hooks but the first what they return.

        Returns:
            The inputs of the first weight, and what is to be called with those of all ranks.
        """
        selection = self.selection = BACKWARD if is_in_backward() else FORWARD
        inputs = self.cast(self.held, selection)
        is_read_again = selection == BACKWARD and self.splits and self.gathers[0].keeps_row
        self.rowwise = self.gather_splits(self.held, FORWARD) if is_read_again else []
        self.taken = inputs if self.world == 1 else []
        self.outputs: list[Tensor] = []  # all ranks' inputs, weight by weight
        collect = self.outputs.extend
        sent: list[GatherInputs] = [(tuple(of_weight), collect) for of_weight in inputs]
        sent[-1] = sent[-1][0], self.receive
        for hook, of_hook in zip(self.hooks[1:], sent[1:]):
            hook.ready = of_hook
        return sent[0]

    def receive(self, outputs: Sequence[Tensor]) -> None:
        """Fills all weights, after the others' outputs were collected and with the last one's."""
        self.outputs += outputs
        if self.taken:  # a world of one: FSDP2 gathers the first input of each weight alone
            rest = [of_weight[1:] for of_weight in self.taken]
            self.outputs = [t for first, ts in zip(self.outputs, rest) for t in (first, *ts)]
        first, selection = self.gathers[0], self.selection
        keeps_row, targets = first.keeps_row, self.all_targets()
        is_forward = selection == FORWARD and first.serves_forward_alone()
        self.fill(self.outputs, targets, selection, ALL_WEIGHTS, is_forward, keeps_row)
        for taken in self.taken:
            keep_for_current_stream(taken)
        rowwise, self.rowwise, self.outputs, self.taken = self.rowwise, [], [], []
        in_memory = self.in_memory.get((selection, keeps_row))
        if in_memory is None:
            in_memory = [gather.in_memory(selection, keeps_row) for gather in self.gathers]
            self.in_memory[selection, keeps_row] = in_memory
        for gather, gathered in zip(self.gathers, in_memory):
            gather.gathered = gathered
        if rowwise:
            self.fill_splits(rowwise, FORWARD)

    # ---- a gather apart from FSDP2's -------------------------------------------------------------

    def fetch(self, selection: int) -> None:
        """Gathers the split weights in one direction; on all ranks."""
        device, held = self.splits[0].targets[0].device, self.shards()
        shards = [gather.held_shard(device) for gather in self.gathers]
        is_held = len(held) == len(shards) and all(map(is_, held, shards))
        self.fill_splits(self.gather_splits(held if is_held else shards, selection), selection)

    def gather_splits(self, shards: list[Tensor], selection: int) -> list[list[Tensor]]:
        """Casts one direction, and returns what all ranks cast of each split weight."""
        cast = zip(self.gathers, self.cast(shards, selection))
        inputs = [of_weight for gather, of_weight in cast if gather.plan.mode == "split"]
        outputs = iter(self.splits[0].gather_apart([t for of_weight in inputs for t in of_weight]))
        return [[next(outputs) for _ in of_weight] for of_weight in inputs]

    def fill_splits(self, outputs: list[list[Tensor]], selection: int) -> None:
        """Fills one direction of the split weights; keeps the other one."""
        for split, of_weight in zip(self.splits, outputs):
            index = self.gathers.index(split)
            self.fill(of_weight, self.all_targets(), selection, index, False, True)
            keep_for_current_stream(of_weight)
            split.gathered |= {selection}

    def all_targets(self) -> list[Tensor]:
        """Lists the tensors that a gather fills: both directions' codes, scale and amax."""
        if not self.targets:
            self.targets = [t for gather in self.gathers for t in gather.targets]
        return self.targets

    def cast(self, shards: list[Tensor], selection: int) -> list[list[Tensor]]:
        """Casts all weights; exchanges amaxes first unless those of mf.step are current.

        Returns:
            The inputs of the all-gather, of each weight.
        """
        if shards[0].is_cuda and not self.is_captured:
            self.is_captured = is_capturing(shards[0].device)
        # Evaluation may replace weights with no write counted.
        is_training = self.is_training
        if is_training != self.was_training and self.measured[0] and self.exchanged[selection]:
            absent = "their layer is in the other mode"
            self.gathers[0].meet("the gather in another mode of", MODE, absent)
            self.was_training = is_training
        is_measured = is_training and self.is_measured(shards)
        if not is_measured and self.exchanged[selection]:
            exchange_amaxes([self], [shards], selection)
            is_measured = True
        histories = shards  # where nothing is delayed: any tensors, which are not read
        if self.is_delayed:
            histories = [s if h is None else h for h, s in zip(self.histories, shards)]
        inputs: list[list[Tensor]]
        inputs = self.native_cast(shards, histories, selection, ALL_WEIGHTS, is_measured)
        return inputs

    # ---- the shards ------------------------------------------------------------------------------

    def shards(self) -> list[Tensor]:
        """Returns this rank's rows of each weight; none where FSDP2 has other tensors."""
        if self.hooks and self.hooks[0].start is not None:
            return self.held
        layers = [gather.module() for gather in self.gathers]
        self.is_training = all([layer.training for layer in layers])
        self.histories = [layer.amax_history for layer in layers]
        self.has_alias = any([gather.has_alias for gather in self.gathers])
        self.is_touched = True
        kept = [p for reference in self.fsdp_parameters if (p := reference()) is not None]
        parameters: list[Any] = [p.sharded_param for p in kept]
        local = [p._local_tensor for p in parameters]
        found = parameters + local
        if len(found) == len(self.found) and all(map(is_, found, self.found)):
            return self.held
        self.found, self.counting = found, []
        is_sharded = all([isinstance(t, ShardedWeight) for t in local])
        self.held = [t.shard for t in local] if is_sharded else []
        self.hooks = [t.fsdp_pre_all_gather for t in local] if is_sharded else []
        # Eager writes count on the shard: those to the parameter, to its local tensor, to a state
        # dict's view of it. Those of compiled code count on its input, the parameter or its local
        # tensor. None are counted where a rank has no rows of a weight, or a tensor has no count.
        has_rows = all([g.shape[0] > (g.world - 1) * g.chunk for g in self.gathers])
        tensors = found + self.held
        if is_sharded and has_rows and not any([t.is_inference() for t in tensors]):
            self.counting = tensors
        return self.held

    def forget(self) -> None:
        """Looks at FSDP2's parameters, the gathered tensors and the layers again."""
        self.targets = []
        for hook in self.hooks[:1]:
            hook.start = None

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
        tensors, writes = self.measured
        if self.is_captured or not tensors:
            return False
        if tensors is self.counting and shards is self.held:
            is_noted = not (self.is_touched or ShardedWeight.is_traced)
            if is_noted or writes == self.count_writes():
                return True
        if any(self.exchanged) and self.world > 1:
            absent = "their layer is not written to"
            self.gathers[0].meet("the gather after a write to", WRITTEN, absent)
        self.measured = [], 0
        return False

    def note_measured(self) -> None:
        """Notes the writes before amaxes that mf.step has exchanged."""
        self.measured = self.counting, self.count_writes()

    def count_writes(self) -> int:
        """Returns the number of writes to all shards."""
        self.is_touched = self.has_alias
        with WithoutTorchFunction():
            return sum(map(writes_of, self.counting))


def exchange_amaxes(
    batches: Sequence[Batch], shards: Sequence[list[Tensor]], selection: int
) -> None:
    """Measures the amaxes of batches of the same ranks, in one all-reduce."""
    exchange = torch.classes.minifloat.AmaxExchange([batch.native for batch in batches])
    amaxes = exchange.measure([shard for of_batch in shards for shard in of_batch], selection)
    if amaxes.numel() > 0 and batches[0].world > 1:
        dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=batches[0].ranks)
    exchange.accept(amaxes)  # bits of magnitudes order like the values, NaN above infinity
