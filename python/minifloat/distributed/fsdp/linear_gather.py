"""Gathers the weights of linear layers as codes, where FSDP2 shards them.

A LinearGather belongs to one weight. In the first gather it casts its shard alone. From the second
gather on, the weights of one parameter group of FSDP2 form a Batch (gather_batch.py).

A gather before forward leaves tensors that only backward reads without memory. In mode "split" it
moves the rowwise codes, and the gather before backward moves the columnwise ones. In mode "one" the
columnwise codes are transposed from the rowwise ones, which the gather before backward then
frees. Where a forward needs codes that are not in memory, `LinearGather.bring` gets them: in mode
"split" by an all-gather for all weights of the batch, in mode "one" by transposes of them:

    rowwise codes, in backward     where a forward runs again: when that forward first reads them,
                                   and from then on in each pre-gather hook of backward
    either codes, in forward       where FSDP2 has not resharded the weights before
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...nn.linear import Linear
from ...nn.state.random_state import is_in_backward
from ...spec import Spec
from ...tensor.memory import has_memory
from ...tensor.quantized import Quantized
from .gather import (
    BACKWARD,
    FORWARD,
    GatherPlan,
    Received,
    storages,
)
from .gather_batch import BatchedGather
from .recomputed import GATHERS, note_reading
from .weight_tensors import GatheredWeight


class LinearGather(BatchedGather):
    """Gathers one layer's weight (n, cols), whose rows FSDP2 shards over the ranks of a group."""

    def __init__(
        self, layer: Linear, plan: GatherPlan, shape: torch.Size, group: dist.ProcessGroup
    ) -> None:
        super().__init__(layer, plan, f"{layer.fqn}: {layer.recipe}", shape, group)
        # The last two parameters that FSDP2 assigned: it assigns both at each gather.
        self._assigned: tuple[object, object] = (None, None)

    def has_assigned(self, parameter: object) -> bool:
        """Tells whether FSDP2 has assigned this parameter before, or gathers into it."""
        first, second = self._assigned
        if parameter is first or parameter is second:
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

    def receive_codes(
        self, outputs: Sequence[Tensor], sent: Callable[[Sequence[Tensor]], object], is_first: bool
    ) -> Received:
        created = self.new_gathered_weight(outputs[0]) if is_first else None
        GATHERS.add(self)
        sent(outputs)
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
        if self.plan.mode == "one" or row.amax.numel() == col.amax.numel() == 0:
            col = replace(col, amax=row.amax)
        if self.plan.mode == "one" and has_row_scale:
            col = replace(col, scale=row.scale)
        inner = [col.codes]
        inner += [] if has_row_scale else [row.scale]
        inner += [] if has_col_scale else [col.scale]
        self.targets = [t for part in (row, col) for t in (part.codes, part.scale, part.amax)]
        self.forget()
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
        gathered = self.gathered_together[self.plan.mode]  # without a call: for each weight
        if FORWARD not in gathered:
            if is_in_backward():
                self.note_reading(FORWARD)
            self.bring(FORWARD)
        is_missing = reads_columnwise and BACKWARD not in gathered
        if is_missing and not self.is_gathered_for_backward():
            self.bring(BACKWARD)

    def note_reading(self, selection: int) -> None:
        note_reading(selection, self, self.joined_batch().gathers)

    def lacking(self, storage: int) -> int | None:
        row, col = self.targets[:3], self.targets[3:]
        if FORWARD not in self.gathered() and storage in storages(row):
            return FORWARD if has_memory(col[0]) else None
        is_read_now = BACKWARD not in self.gathered() and not self.is_gathered_for_backward()
        is_col = is_read_now and storage in storages(col)
        return BACKWARD if is_col and has_memory(row[0]) else None

    def bring(self, selection: int) -> None:
        if self.plan.mode == "split":
            self.joined_batch().fetch(selection)
        else:
            self.joined_batch().transpose_back()
