"""Batch: the weights of one all-gather of FSDP2, cast before it and filled after it.

    first weight's pre-gather hook     one native call casts the shards of all weights
    each weight's pre-gather hook      takes its codes
    last weight's post-gather hook     one native call fills all whole weights

Ranks exchange amaxes (of a tensor, of a column, of a block that two ranks hold part of) in one
all-reduce: of all weights of a model in mf.precompute_scales, else of one batch before its cast.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...nn.state.draws import is_in_backward
from ...nn.state.recipe_state import RecipeState
from ..amaxes import raise_to_largest
from ..handshake import wait_for_all
from .fsdp_group import FsdpGroup, recomputes_compiled
from .gathered_weight import GatheredWeight, ShardCast, targets_of
from .plan import GatherPlan
from .sharded_weight import writes_to

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

State = list[tuple[Tensor, tuple[int, int, int]]]  # shards, and counts of writes to them
FORWARD, BACKWARD, BOTH_GATHERS = 0, 1, 2  # the directions that a cast selects
ALL_WEIGHTS = -1
WRITTEN = "fully_shard: expected all {} ranks to have written to {} since mf.step, as this rank has"


class BatchedGather(Protocol):
    """The part of all_gather.WeightGather that a batch reads."""

    plan: GatherPlan
    title: str
    group: dist.ProcessGroup
    n: int
    chunk: int
    world: int
    rank: int
    casts: tuple[ShardCast, ShardCast]
    whole: GatheredWeight
    gathered: set[int]

    def fetch(self, selection: int) -> None:
        """Gathers the directions of one selection, apart from FSDP2's gathers."""

    def module(self) -> RecipeState:
        """Returns the layer."""

    def serves_forward_alone(self) -> bool:
        """Tells whether FSDP2 will gather again before backward."""

    def count_inputs(self) -> int:
        """Returns the number of all-gather inputs."""


class BatchPayload:
    """One gather of a batch, from the pre-gather hooks to the post-gather hooks."""

    __slots__ = ("batch", "codes", "inputs", "outputs", "selection", "shards")

    def __init__(
        self,
        batch: Batch,
        selection: int,
        shards: list[Tensor],
        inputs: list[tuple[Tensor, ...] | None],
    ) -> None:
        self.batch, self.selection, self.shards = batch, selection, shards
        self.inputs = inputs  # of each weight, until its pre-gather hook takes them
        self.codes: list[tuple[Tensor, ...]] = []  # taken inputs; of a world of one
        self.outputs: list[Tensor] = []  # all ranks' inputs, weight by weight


class Batch:
    """The weights that FSDP2 gathers at once, in its order, and their native casts.

    Args:
        gathers: of the weights.
        group: a reference to FSDP2's parameter group. None: a batch of one weight, whose shard its
            hook passes.
        positions: the weights' indices among the group's parameters.
    """

    def __init__(
        self,
        gathers: Sequence[BatchedGather],
        group: weakref.ref[FsdpGroup] | None = None,
        positions: Sequence[int] = (),
    ) -> None:
        classes = torch.classes.minifloat
        first = gathers[0]
        self.gathers, self.group, self.positions = tuple(gathers), group, tuple(positions)
        self.ranks, self.world = first.group, first.world
        casts = [gather.casts for gather in gathers]
        self.modes = [gather.plan.mode for gather in gathers]
        native = classes.GatherBatch(
            [row for row, _ in casts],
            [col for _, col in casts],
            self.modes,
            first.world,
            first.rank,
        )
        self.native, self.cast, self.fill = native, native.cast, native.fill
        self.exchanged = [native.exchanged(selection) for selection in (FORWARD, BACKWARD)]
        self.is_delayed = any(gather.plan.is_delayed for gather in gathers)
        self.splits = [gather for gather in gathers if gather.plan.mode == "split"]
        self.counts = [gather.count_inputs() for gather in gathers]  # of each weight
        self.indices = {gather: index for index, gather in enumerate(gathers)}
        # Ranks without rows of a weight cannot count the writes to it.
        self.has_rows = all([g.n > (g.world - 1) * g.chunk for g in gathers])
        self.measured: State | None = None  # when mf.step exchanged amaxes
        # Batches of which this is the first, and the native exchange of their amaxes.
        self.exchange: tuple[tuple[Batch, ...], Any] | None = None
        self.payload: BatchPayload | None = None  # the gather in flight
        self.targets: list[Tensor] = []

    # ---- before the gather -----------------------------------------------------------------------

    def send(
        self, gather: BatchedGather, shard: Tensor
    ) -> tuple[tuple[Tensor, ...], BatchPayload] | None:
        """Returns the all-gather inputs of one weight; casts all weights for the first one.

        Returns:
            The inputs, and the gather. None where the shard is not the one that the batch has cast:
            FSDP2 offloads it, or calls hooks in another order.
        """
        index = self.indices[gather]
        if index == 0:
            self.payload = self.cast_all(shard)
        payload = self.payload
        if payload is None or payload.shards[index] is not shard:
            return None
        inputs = payload.inputs[index]
        if inputs is None:
            return None
        payload.inputs[index] = None
        if self.world == 1:
            payload.codes.append(inputs)
        return inputs, payload

    def cast_all(self, shard: Tensor) -> BatchPayload | None:
        """Casts the shards of all weights for one gather."""
        shards = self.shards()
        if shards is None:
            shards = [shard]
        if shards[0] is not shard or any([s is None for s in shards]):
            return None
        selection = BACKWARD if is_in_backward() else FORWARD
        inputs = self.inputs(shards, selection, ALL_WEIGHTS)
        return BatchPayload(self, selection, shards, self.split_inputs(inputs))

    def inputs(self, shards: list[Tensor], selection: int, weight: int) -> list[Tensor]:
        """Casts one weight, or all; exchanges amaxes first unless those of mf.step are current."""
        is_measured = self.is_training() and self.is_measured(shards)
        if not is_measured and self.exchanged[selection]:
            exchange_amaxes([self], [shards], selection)
            is_measured = True
        histories = self.histories(shards) if self.is_delayed else []
        return self.cast(shards, histories, selection, weight, is_measured)

    def is_measured(self, shards: list[Tensor]) -> bool:
        """Tells whether the amaxes that mf.step exchanged are those of the shards' values.

        All ranks must answer the same, because they exchange amaxes where the answer is no. So a
        rank that has counted a write waits for the others to say that they have, too.

        Raises:
            ValueError: other ranks have not written to their shards.
        """
        if self.measured is None:
            return False
        if are_same(self.measured, self.state_of(shards)):
            return True
        if any(self.exchanged) and self.world > 1:
            title, device = self.gathers[0].title, shards[0].device
            wait_for_all(title, self.ranks, device, WRITTEN, "written to", f"written/{title}")
        self.measured = None
        return False

    def mark_measured(self, shards: list[Tensor]) -> None:
        """Records that ranks have exchanged the amaxes of these shards, for the next gathers."""
        self.measured = self.state_of(shards)

    def state_of(self, shards: list[Tensor]) -> State | None:
        """Returns the shards and the counts of writes to them; None where a rank cannot count."""
        parameters = self.parameters()
        if parameters is None or not self.has_rows:
            return None
        if any([t.is_inference() for t in (*parameters, *shards)]):
            return None
        return [(shard, writes_to(p)) for shard, p in zip(shards, parameters)]

    def split_inputs(self, inputs: list[Tensor]) -> list[tuple[Tensor, ...] | None]:
        """Splits the inputs of a batch into those of each weight."""
        found: list[tuple[Tensor, ...] | None] = []
        start = 0
        for count in self.counts:
            found.append(tuple(inputs[start : start + count]))
            start += count
        return found

    def shards(self) -> list[Any] | None:
        """Returns this rank's rows of every weight; None where FSDP2's group is not found."""
        parameters = self.parameters()
        if parameters is None:
            return None
        return [getattr(p._local_tensor, "shard", None) for p in parameters]

    def parameters(self) -> list[DTensor] | None:
        """Returns the sharded parameters; None where FSDP2's group is not found."""
        group = None if self.group is None else self.group()
        if group is None:
            return None
        return [group.fsdp_params[position].sharded_param for position in self.positions]

    def modules(self) -> Sequence[nn.Module]:
        """Returns the modules whose parameters FSDP2 gathers together; none without its group."""
        group = None if self.group is None else self.group()
        return () if group is None else group.modules

    def histories(self, shards: list[Tensor]) -> list[Tensor]:
        """Returns the amax histories of the layers; a shard where a layer has no history."""
        found = []
        for gather, shard in zip(self.gathers, shards):
            history = gather.module()._buffers["amax_history"]
            found.append(shard if history is None else history)
        return found

    def is_training(self) -> bool:
        """Tells whether all layers train. Evaluation may replace weights with no write counted."""
        return all([gather.module().training for gather in self.gathers])

    # ---- after the gather ------------------------------------------------------------------------

    def receive(
        self, gather: BatchedGather, payload: BatchPayload, outputs: Sequence[Tensor]
    ) -> None:
        """Collects all ranks' codes of one weight; fills all weights after the last one."""
        index = self.indices[gather]
        payload.outputs += outputs
        if self.world == 1:  # FSDP2 gathers the first input alone
            payload.outputs += payload.codes[index][len(outputs) :]
        if index == len(self.gathers) - 1:
            if not self.targets:
                self.targets = [t for g in self.gathers for t in targets_of(g.whole)]
            forward_alone = self.gathers[0].serves_forward_alone()
            self.fill(payload.outputs, self.targets, payload.selection, ALL_WEIGHTS, forward_alone)
            for split in self.splits:
                split.gathered = {payload.selection}
            self.payload = None
            if (
                payload.selection == BACKWARD
                and self.splits
                and recomputes_compiled(self.modules())
            ):
                for split in self.splits:
                    split.fetch(FORWARD)

    def fetch(self, gather: BatchedGather, shard: Tensor, selection: int) -> None:
        """Gathers one weight in the directions of a selection, apart from FSDP2's gathers."""
        shards = self.shards()
        if shards is None:
            shards = [shard]
        index = self.indices[gather]
        inputs = self.inputs(shards, selection, index)
        outputs = [t.new_empty(self.world * len(t)) for t in inputs]
        for output, of_rank in zip(outputs, inputs):
            dist.all_gather_into_tensor(output, of_rank, group=self.ranks)
        self.fill(outputs, self.targets, selection, index, False)


# ---- amaxes --------------------------------------------------------------------------------------


def are_same(before: State, now: State | None) -> bool:
    """Tells whether two states of a batch have the same shards and counts of writes."""
    if now is None:
        return False
    return all([a is b and c == d for (a, c), (b, d) in zip(before, now, strict=True)])


def exchange_amaxes(
    batches: Sequence[Batch], shards: Sequence[list[Tensor]], selection: int
) -> None:
    """Measures the amaxes of batches of the same ranks, in one all-reduce."""
    first, key = batches[0], tuple(batches)
    if first.exchange is None or first.exchange[0] != key:
        native = torch.classes.minifloat.AmaxExchange([batch.native for batch in batches])
        first.exchange = key, native
    exchange = first.exchange[1]
    flat = [shard for of_batch in shards for shard in of_batch]
    amaxes = exchange.measure(flat, selection)
    if amaxes.numel() > 0 and first.world > 1:
        raise_to_largest(amaxes, first.ranks)
    exchange.accept(amaxes)
