"""The journey of one weight: what a rank sends, what it makes of what all ranks sent.

send      shard -> compute dtype -> codes (chunk, bytes), scales          agreed sizes, always
receive   all ranks' -> the directions of a QuantizedTensor              in place from then on

A gather that serves forward alone leaves out what only backward reads: its memory stays free until
backward's gather.

split     backward's gather brings the other direction, in the same bytes. What a gather did not
          bring is not there until `complete` fetches it: where a checkpointed block reads a weight
          in backward as forward does, or FSDP2 has not resharded it in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...nn.operand_cache import STEPS
from ...nn.random_state import is_in_backward
from ...recipe import operand_names
from ...tensor.quantized import Quantized
from ...tensor.quantized_tensor import NOMINAL_DTYPES
from .cast import Job, cast_shards
from .gathered_weight import (
    Convoy,
    GatheredWeight,
    empty_direction,
    fill_codes,
    fill_scales,
    hold,
    known_of,
    release,
    whole_table,
)
from .handshake import agree
from .plan import Part, Plan
from .shard_layout import Piece, Rows, layout_of, round_up

ALIGNMENT = 4  # bytes
# By FSDP2's parameter group, or by a weight's travel.
CONVOYS: weakref.WeakKeyDictionary[Any, Convoy] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class Sent:
    """What goes beside a gather: the parts, what all ranks have of them, and this rank's inputs."""

    parts: tuple[Part, ...]
    pieces: Sequence[Piece]
    inputs: tuple[Tensor, ...]


class Travel:
    """How one layer's weight (n, cols) gets from its shards to every rank."""

    def __init__(
        self, layer: nn.Module, plan: Plan, rows: Rows, cols: int, group: dist.ProcessGroup
    ) -> None:
        self.layer = weakref.ref(layer)
        self.layouts = {p: layout_of(p, rows, cols) for p in (plan.row, plan.col)}
        self.title = f"{layer.fqn}: {layer.recipe}, weight ({rows.n}, {cols})"
        self.plan, self.rows, self.cols, self.group = plan, rows, cols, group
        self.dtype: torch.dtype | None = None  # of the whole weight; None: not agreed yet
        self.rounded_to = torch.float32  # before it is quantized: autocast's dtype, else that
        self.reason = ""  # why it travels in that dtype instead of codes
        self.kept: dict[Part, Piece] = {}  # that precompute_scales made
        self.kept_at: int | None = None  # after so many optimizer steps; amaxes hold until the next
        self.kept_of: Any = None  # the values that they are of
        self.sendings: dict[tuple[Part, ...], Sent] = {}  # of them
        self.writes = 0  # to the shard, as far as torch tells its wrapper
        self.shard: Tensor | None = None  # that was sent last, if more of it may be asked for
        self.held: tuple[Part, ...] = ()  # what the last gather brought
        self.directions: tuple[Quantized, Quantized] | None = None  # of the whole, since the first
        self.known: dict[bool, Tensor] = {}  # the scale of the piece that a direction has from all
        self.fsdp_group: Any = lambda: None  # reference to FSDP2's

    def knows(self, parameter: Any) -> bool:
        """Has FSDP2 handed this parameter to the layer before, or what it gathers?"""
        local = getattr(parameter, "_local_tensor", None)
        is_known = type(parameter) is GatheredWeight or getattr(local, "travel", None) is self
        return is_known and isinstance(parameter, nn.Parameter)

    @property
    def is_quantized(self) -> bool:
        return self.dtype is not None and not self.reason

    def __str__(self) -> str:
        how = f"weight travels in {self.dtype}: {self.reason}" if self.reason else str(self.plan)
        return f"{how}, in {self.rows.world} shards"

    @cached_property
    def all_parts(self) -> tuple[Part, ...]:
        return tuple(dict.fromkeys((*self.plan.parts(False), *self.plan.parts(True))))

    def forget(self) -> None:
        """The weight may have changed."""
        self.kept_at, self.kept, self.sendings = None, {}, {}

    # ---- the first gather ------------------------------------------------------------------------

    def settle(self, dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
        """The dtype that FSDP2 computes in. The first gather decides whether codes can travel."""
        if self.dtype is None:
            self.dtype = self.rounded_to = agree(self.title, dtype, self.group, device)
            if torch.is_autocast_enabled(device.type):
                self.rounded_to = torch.get_autocast_dtype(device.type)
            if self.rounded_to not in NOMINAL_DTYPES or self.dtype not in NOMINAL_DTYPES:
                self.reason = "codes are made of float32 or bfloat16"
            elif not all(self.rows.fits(part) for part in self.all_parts):
                self.reason = "a transform reaches over the end of a shard"
            elif self.plan.mode == "split" and not self.is_gathered_for_backward():
                self.reason = "one gather is to serve forward and backward"
        return self.dtype

    def is_gathered_for_backward(self) -> bool:
        """Does FSDP2 reshard the weight after forward? It has no public word for it: where its
        private one has changed, the answer is no, and what travels is more, and still right."""
        return bool(getattr(self.find_group(), "_reshard_after_forward", False))

    # ---- what is sent ----------------------------------------------------------------------------

    def send(self, shard: Tensor, dtype: torch.dtype | None) -> tuple[tuple[Tensor, ...], Any]:
        """All-gather inputs of this rank's rows, and what goes beside them."""
        if self.dtype is None or self.reason:
            compute_dtype = self.settle(dtype, shard.device)
            if self.reason:
                return (self.padded(shard, compute_dtype),), None
        self.shard = shard if self.plan.mode == "split" else None
        sent = self.sending(shard, self.plan.parts(is_in_backward()))
        return sent.inputs, sent

    def padded(self, shard: Tensor, dtype: torch.dtype) -> Tensor:
        """A whole chunk of plain values."""
        if len(shard) == self.rows.chunk:
            return shard.to(dtype)
        chunk = shard.new_zeros(self.rows.chunk, *shard.shape[1:], dtype=dtype)
        chunk[: len(shard)] = shard
        return chunk

    def sending(self, shard: Tensor, parts: tuple[Part, ...]) -> Sent:
        layer: Any = self.layer()
        # In evaluation weights may be others, exchanged uncounted, such as averages.
        if self.kept_at != STEPS.taken or not layer.training:
            return self.packed(parts, cast_shards(self.jobs(shard, parts), self.group))
        # No rank has to hear of it: each may decide alone whether its codes are still good.
        values = self.values_of(shard)
        if values != self.kept_of:
            known = [self.kept[part].exchanged for part in self.all_parts]
            jobs = self.jobs(shard, self.all_parts)
            self.keep(cast_shards(jobs, self.group, known), values)
        if parts not in self.sendings:
            self.sendings[parts] = self.packed(parts, [self.kept[part] for part in parts])
        return self.sendings[parts]

    def jobs(self, shard: Tensor, parts: Sequence[Part]) -> list[Job]:
        values = shard if shard.dtype in NOMINAL_DTYPES else shard.to(self.rounded_to)
        return [
            Job(values, self.layouts[part], self.rounded_to, self.in_force(part)) for part in parts
        ]

    def values_of(self, shard: Tensor) -> Any:
        return self.writes, shard._version, shard.data_ptr(), shard.device

    def keep(self, pieces: Sequence[Piece], values: Any) -> None:
        """All parts of a shard of such values, for the gathers until the next optimizer step."""
        self.kept_at, self.kept_of = STEPS.taken, values
        self.kept, self.sendings = dict(zip(self.all_parts, pieces)), {}

    def packed(self, parts: tuple[Part, ...], pieces: Sequence[Piece]) -> Sent:
        """Codes of each part, and the scales that travel, of all parts in one tensor."""
        inputs = [piece.codes for piece in pieces]
        if self.table_bytes:
            tables = [
                None if piece.table is None else piece.table.reshape(-1).view(torch.uint8)
                for piece in pieces
            ]
            flat = tables[0]
            if len(tables) > 1 or flat is None or len(flat) != self.table_bytes:
                flat = inputs[0].new_zeros(self.table_bytes)
                for table, start in zip(tables, self.table_starts(parts)):
                    if table is not None:
                        flat[start : start + len(table)] = table
            inputs.append(flat)
        return Sent(parts, pieces, tuple(inputs))

    def table_starts(self, parts: Sequence[Part]) -> list[int]:
        """Where each part's scales begin among a rank's, and where the last end."""
        starts = [0]
        for part in parts:
            starts.append(starts[-1] + round_up(self.layouts[part].table_bytes, ALIGNMENT))
        return starts

    @cached_property
    def table_bytes(self) -> int:
        """That a rank sends: FSDP2 wants the same size before forward and before backward."""
        return max(self.table_starts(self.plan.parts(backward))[-1] for backward in (False, True))

    def in_force(self, part: Part) -> Tensor | None:
        if not part.is_delayed:
            return None
        layer: Any = self.layer()
        row = operand_names().index("w/dgrad" if part.columnwise else "w/fprop")
        return layer.amax_history[row, 0]

    # ---- what is received ------------------------------------------------------------------------

    def receive(self, outputs: Sequence[Tensor], sent: Sent | None, out: Any) -> Any:
        """The whole weight, and tensors beside FSDP2's own; the same ones from the second on."""
        if sent is None:
            whole = outputs[0].view(-1, self.cols)[: self.rows.n]
            return None if out is not None else (whole, ())
        outputs = [*outputs, *sent.inputs[len(outputs) :]]  # a world of one gathers the first alone
        if out is not None:
            self.fill(outputs, sent)
            return None
        row, col = self.directions = self.empty_directions(outputs)
        self.known = {}
        self.fill(outputs, sent)
        assert self.dtype is not None  # agreed before anything is sent
        inner = [col.codes]  # what a scale for all takes is little, and stays
        inner += [] if self.plan.row.is_shared else [row.scale]
        inner += [] if self.plan.col.is_shared else [col.scale]
        return GatheredWeight(row, col, self.dtype), tuple(inner)

    def empty_directions(self, outputs: Sequence[Tensor]) -> tuple[Quantized, Quantized]:
        """Rowwise codes are FSDP2's memory; a square's directions share what scale they share."""
        n, device = self.rows.n, outputs[0].device
        row, col = (
            empty_direction(part, n, self.cols, device) for part in (self.plan.row, self.plan.col)
        )
        width = self.layouts[self.plan.row].code_bytes
        row = replace(row, codes=outputs[0][: n * width].view(n, width))
        if self.plan.mode == "one" and self.plan.row.is_shared:
            col = replace(col, scale=row.scale.detach(), amax=row.amax.detach())
        return row, col

    def fill(self, outputs: Sequence[Tensor], sent: Sent) -> None:
        """Both directions, or the one that the gather brings or its readers ask for."""
        assert self.directions is not None
        row, col = self.directions
        if self.plan.mode == "split":
            brings_columnwise = sent.parts[0].columnwise
            brings_rowwise = not brings_columnwise
        else:
            brings_rowwise = True
            brings_columnwise = self.plan.row.is_transformed or not self.serves_forward_alone()
        for target, is_brought in ((row, brings_rowwise), (col, brings_columnwise)):
            if is_brought:
                self.fill_direction(target, outputs, sent)
            else:
                release(target)
                if not target.columnwise:
                    self.known.pop(False, None)  # its scale is what was freed
        self.held = sent.parts
        if self.convoy.last() is self:
            self.convoy.arrive()

    def fill_direction(self, target: Quantized, outputs: Sequence[Tensor], sent: Sent) -> None:
        i = next((i for i, p in enumerate(sent.parts) if p.columnwise == target.columnwise), 0)
        layout, piece = self.layouts[sent.parts[i]], sent.pieces[i]
        hold(target.scale)
        fill_codes(target, layout, outputs[i], self.convoy)
        if piece.table is not None:
            start = self.table_starts(sent.parts)[i]
            flat = outputs[-1].view(self.rows.world, -1)
            table = whole_table(flat[:, start : start + layout.table_bytes], layout)
            fill_scales(target, layout, table)
        if self.takes(target, piece):
            self.convoy.copy(*known_of(target, piece))

    def takes(self, target: Quantized, piece: Piece) -> bool:
        """Is what ranks know of a piece still to be copied? From now on it is there."""
        is_shared = target.columnwise and self.plan.mode == "one" and self.plan.row.is_shared
        if is_shared or self.known.get(target.columnwise) is piece.scale:
            return False
        self.known[target.columnwise] = piece.scale
        return True

    def take_kept(self) -> tuple[list[Tensor], list[Tensor]]:
        """(to, from) of what the next gathers of the kept pieces would copy; nothing while the last
        one's codes are there, which their scales belong to."""
        to: list[Tensor] = []
        given: list[Tensor] = []
        directions = self.directions or ()
        if any(target.codes.untyped_storage().size() > 0 for target in directions):
            return to, given
        for target in directions:
            piece = self.kept.get(Part(target.spec, target.columnwise))
            if piece is None and self.plan.mode == "one":
                piece = self.kept[self.plan.row]
            if piece is not None and self.takes(target, piece):
                hold(target.scale)
                more_to, more = known_of(target, piece)
                to, given = to + more_to, given + more
        return to, given

    def serves_forward_alone(self) -> bool:
        """Will FSDP2 gather again before backward? Where it tells nothing, the answer is no."""
        group = self.find_group()
        state = getattr(getattr(group, "_training_state", None), "name", "")
        return state == "FORWARD" and group._reshard_after_forward and not is_in_backward()

    def find_group(self) -> Any:
        """FSDP2's parameter group; None where it is not to be found."""
        group = self.fsdp_group()
        if group is None:
            try:
                group = find_fsdp_group(self.layer())
                self.fsdp_group = weakref.ref(group)
            except (ImportError, AttributeError, LookupError, TypeError):
                return None
        return group

    @property
    def convoy(self) -> Convoy:
        """Of FSDP2's parameter group; of this weight alone where there is no knowing."""
        group = self.find_group()
        if group is None:
            return CONVOYS.setdefault(self, Convoy(weakref.ref(self)))
        if group not in CONVOYS:
            locals_ = [getattr(p.sharded_param, "_local_tensor", None) for p in group.fsdp_params]
            mates = [getattr(local, "travel", None) for local in locals_]
            last = [mate for mate in mates if mate is not None and mate.is_quantized][-1]
            CONVOYS[group] = Convoy(weakref.ref(last))
        return CONVOYS[group]

    # ---- what a split gather did not bring -------------------------------------------------------

    def complete(self, whole: Tensor, reads_columnwise: bool) -> None:
        """Before a forward: fetches what it reads and no gather brings, on all ranks alike."""
        if self.plan.mode != "split" or not isinstance(whole, GatheredWeight):
            return
        row, col = self.plan.row, self.plan.col
        if row not in self.held:
            self.fetch(row)
        if reads_columnwise and col not in self.held and not self.is_gathered_for_backward():
            self.fetch(col)

    def fetch(self, part: Part) -> None:
        assert self.shard is not None
        assert self.directions is not None
        sent = self.sending(self.shard, (part,))
        outputs = [t.new_empty(self.rows.world * len(t)) for t in sent.inputs]
        for output, given in zip(outputs, sent.inputs):
            dist.all_gather_into_tensor(output, given, group=self.group)
        target = self.directions[part.columnwise]
        hold(target.codes)
        self.fill_direction(target, outputs, sent)
        self.convoy.arrive()
        self.held = (*self.held, part)


def find_fsdp_group(layer: Any) -> Any:
    """FSDP2's parameter group that has this layer's weight; LookupError where there is none."""
    from torch.distributed._composable_state import _module_state_mapping

    for reference in list(_module_state_mapping.values()):
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in groups or [getattr(state, "_fsdp_param_group", None)]:
            for parameter in group.fsdp_params if group is not None else ():
                info = parameter._module_info
                if info.module is layer or layer in info.shared_modules:
                    return group
    raise LookupError("no parameter group of FSDP2 has the layer")
