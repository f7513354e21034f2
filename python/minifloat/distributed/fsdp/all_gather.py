"""WeightGather: how FSDP2 gathers the weight of one layer, from the first gather on.

The first gather decides whether codes are gathered: all ranks agree on the compute dtype, and the
shards must fit the plan. It casts each weight alone. From the second gather on, the weights of one
parameter group of FSDP2 form a Batch (batch.py).

A gather that serves forward alone fills no tensor that only backward reads. The memory of such a
tensor stays free until backward's gather.

In mode "split" each gather moves one direction: forward's the rowwise, backward's the columnwise.
`complete` fetches a direction that no gather has moved. That happens where a checkpointed block
reads the rowwise direction in backward, or where FSDP2 has not resharded the weight after forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...spec import Spec
from .batch import BACKWARD, FORWARD, Batch, BatchPayload
from .fsdp_group import SERVES_BOTH, ModuleGather
from .gathered_weight import GatheredWeight, ShardCast, empty_direction
from .plan import GatherPlan
from .sharded_weight import Received

GatherInputs = tuple[tuple[Tensor, ...], BatchPayload | None]


class WeightGather(ModuleGather):
    """The gathers of one layer's weight (n, cols), whose rows are cut over the ranks of a group."""

    def __init__(
        self, layer: nn.Module, plan: GatherPlan, shape: tuple[int, int], group: dist.ProcessGroup
    ) -> None:
        super().__init__(layer)
        self.plan, self.group = plan, group
        self.n, self.cols = shape
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.chunk = -(-self.n // self.world)  # rows of a full shard
        self.title = f"{layer.fqn}: {layer.recipe}, weight ({self.n}, {self.cols})"
        self.casts: tuple[ShardCast, ShardCast]  # rowwise and columnwise, since the first gather
        self.whole: Any = None  # since the first gather
        self.gathered: set[int] = set()  # in mode split: the selections gathered so far
        self.shard: Tensor | None = None  # cast last
        self.alone: Batch | None = None  # the batch of this weight alone
        self.batch: Batch | None = None  # the batch of FSDP2's parameter group
        # The last two parameters FSDP2 assigned.
        self._assigned: tuple[object, object] = (None, None)

    def has_assigned(self, parameter: object) -> bool:
        """Tells whether FSDP2 has assigned this parameter before, or gathers into it."""
        if parameter is self._assigned[0] or parameter is self._assigned[1]:
            return True
        local = getattr(parameter, "_local_tensor", None)
        is_fsdp_parameter = (
            type(parameter) is GatheredWeight or getattr(local, "weight_gather", None) is self
        )
        if not (is_fsdp_parameter and isinstance(parameter, nn.Parameter)):
            return False
        self._assigned = parameter, self._assigned[0]
        return True

    def __str__(self) -> str:
        how = (
            f"weight is gathered in {self.dtype}: {self.reason}"
            if self.reason
            else self.plan.of_rows()
        )
        return f"{how}, in {self.world} shards"

    # ---- the first gather ------------------------------------------------------------------------

    def agree_and_decide(self, dtype: torch.dtype | None, device: torch.device) -> None:
        """Agrees on the dtype that FSDP2 computes in, and decides whether codes are gathered."""
        rounded_to = self.agree_on_dtype(dtype, self.group, device)
        if self.reason:
            return
        rounds = rounded_to == torch.bfloat16
        row, col = (
            torch.classes.minifloat.ShardCast(spec, columnwise, self.n, self.cols, rounds)
            for spec, columnwise in ((self.plan.row, False), (self.plan.col, True))
        )
        self.casts = row, col
        if not (row.fits(self.world) and (self.plan.mode == "one" or col.fits(self.world))):
            has_transform = any(Spec.parse(s).transform for s in (self.plan.row, self.plan.col))
            reason = "a transform" if has_transform else "a block whose values choose its scale"
            self.reason = f"{reason} reaches over the end of a shard"
        elif self.plan.mode == "split" and not self.is_gathered_for_backward():
            self.reason = SERVES_BOTH

    # ---- before a gather -------------------------------------------------------------------------

    def send(self, shard: Tensor, dtype: torch.dtype | None) -> GatherInputs:
        """Returns the all-gather inputs of this rank's rows, and the gather for the later hook.

        Args:
            shard: (rows, cols), this rank's rows.
            dtype: FSDP2's compute dtype; None: its hook does not pass it.
        """
        self.require_dtype(shard)
        batch = self.batch
        if batch is None:
            if self.dtype is None:
                self.agree_and_decide(dtype, shard.device)
            if self.reason:
                return (self.padded(shard),), None
            batch = self.joined_batch()
        self.shard = shard
        return batch.send(self, shard) or self.send_alone(shard)

    def send_alone(self, shard: Tensor) -> GatherInputs:
        """Casts this weight apart from its batch, in a first gather or from an offloaded shard."""
        found = self.batch_alone().send(self, shard)
        assert found is not None
        return found

    def count_inputs(self) -> int:
        """Returns the number of all-gather inputs: codes, and a table where scales are gathered."""
        row, col = self.casts
        is_both, is_one = self.plan.mode == "both", self.plan.mode == "one"
        has_table = not (row.has_common_scale() and (is_one or col.has_common_scale()))
        return 1 + is_both + has_table

    # ---- batches ---------------------------------------------------------------------------------

    def batch_alone(self) -> Batch:
        """Returns the batch of this weight alone."""
        if self.alone is None:
            self.alone = Batch([self])
        return self.alone

    def joined_batch(self) -> Batch:
        """Forms the batch of FSDP2's parameter group, once all its weights have been gathered."""
        if self.whole is None:
            return self.batch_alone()
        group = self.fsdp_group()
        locals_ = (
            [] if group is None else [p.sharded_param._local_tensor for p in group.fsdp_params]
        )
        gathers = [getattr(local, "weight_gather", None) for local in locals_]
        positions = [i for i, g in enumerate(gathers) if is_of_layer(g) and g.whole is not None]
        members: list[Any] = [gathers[i] for i in positions]
        if group is None or self not in members or len(set(map(id, members))) < len(members):
            self.batch = self.batch_alone()
            return self.batch
        batch = Batch(members, weakref.ref(group), positions)
        for member in members:
            member.batch, member.alone = batch, None
        return batch

    # ---- after a gather --------------------------------------------------------------------------

    def receive(
        self, outputs: Sequence[Tensor], payload: BatchPayload | None, out: object
    ) -> Received:
        """Returns the whole weight and its memory at the first gather; fills them at later ones."""
        if payload is None:
            whole = outputs[0].view(-1, self.cols)[: self.n]
            return None if out is not None else (whole, ())
        created = None
        if out is None:
            created = self.new_whole(outputs[0])
            payload.batch.targets = []
        payload.batch.receive(self, payload, outputs)
        return created

    def new_whole(self, codes: Tensor) -> tuple[GatheredWeight, tuple[Tensor, ...]]:
        """Returns a new whole weight, and the tensors that FSDP2 frees and allocates with it."""
        assert self.dtype is not None
        shape = self.n, self.cols
        row = empty_direction(self.casts[0], self.plan.row, False, shape, codes)
        col = empty_direction(self.casts[1], self.plan.col, True, shape, codes)
        has_row_scale, has_col_scale = (cast.has_common_scale() for cast in self.casts)
        if self.plan.mode == "one" and has_row_scale:
            col = replace(col, scale=row.scale.detach(), amax=row.amax.detach())
        inner = [col.codes]
        inner += [] if has_row_scale else [row.scale]
        inner += [] if has_col_scale else [col.scale]
        self.whole = GatheredWeight(row, col, self.dtype)
        return self.whole, tuple(inner)

    # ---- directions that a split gather did not move ---------------------------------------------

    def complete(self, whole: Tensor, reads_columnwise: bool) -> None:
        """Fetches the directions that a forward reads and no gather has moved; on all ranks."""
        if self.plan.mode != "split" or not isinstance(whole, GatheredWeight):
            return
        if FORWARD not in self.gathered:
            self.fetch(FORWARD)
        is_missing = reads_columnwise and BACKWARD not in self.gathered
        if is_missing and not self.is_gathered_for_backward():
            self.fetch(BACKWARD)

    def fetch(self, selection: int) -> None:
        """Gathers the directions of one selection."""
        assert self.shard is not None
        batch = self.batch or self.batch_alone()
        batch.fetch(self, self.shard, selection)
        self.gathered.add(selection)


def is_of_layer(gather: object) -> TypeGuard[WeightGather]:
    """Tells whether this is the gather of a linear layer's weight."""
    return isinstance(gather, WeightGather)
