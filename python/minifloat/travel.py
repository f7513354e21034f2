"""The journey of one weight: what a rank sends, what it makes of what all ranks sent.

send      shard -> compute dtype -> codes (chunk, bytes), scales          agreed sizes, always
receive   all ranks' -> the directions of a QuantizedTensor              in place from then on

split     backward's gather brings the other direction, in the same bytes. What a gather did not
          bring is NaN until `complete` fetches it: where a checkpointed block reads a weight in
          backward as forward does, or FSDP2 has not resharded it in between.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ._native import ops
from .gather import Part, Plan
from .quantized import Quantized
from .reuse import STEPS
from .shard import (
    Piece,
    Rows,
    amax_sizes,
    ceil_div,
    empty_direction,
    fill_direction,
    own_amaxes,
    poison,
    quantize_rows,
    table_bytes,
    whole_table,
)
from .tensor import NOMINAL_DTYPES, QuantizedTensor

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNKNOWN = -1
HISTORY_ROWS = {False: 1, True: 3}  # of W in an amax history: as fprop and as dgrad reads it
ALIGNMENT = 4  # bytes


def reduce_amaxes(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The largest of all ranks. Bits of magnitudes order like the values, NaN above infinity."""
    bits = own.abs().view(torch.int32)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32)


class GatheredWeight(QuantizedTensor):
    """What a gather brings. Its codes are FSDP2's memory, which a copy would keep from it."""

    owns_codes = False

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> GatheredWeight:
        whole = QuantizedTensor.__tensor_unflatten__(inner, context, outer_size, outer_stride)
        return GatheredWeight(whole.rowwise, whole.columnwise, whole.dtype)


@dataclass(frozen=True)
class Sent:
    """What goes beside a gather: the parts, what all ranks have of them, and this rank's inputs."""

    parts: tuple[Part, ...]
    pieces: list[Piece]
    inputs: tuple[Tensor, ...]


class Travel:
    """How one layer's weight (n, cols) gets from its shards to every rank."""

    def __init__(
        self, layer: nn.Module, plan: Plan, rows: Rows, cols: int, group: dist.ProcessGroup
    ) -> None:
        self.layer = weakref.ref(layer)
        self.title = f"{layer.fqn}: {layer.recipe}, weight ({rows.n}, {cols})"
        self.plan, self.rows, self.cols, self.group = plan, rows, cols, group
        self.dtype: torch.dtype | None = None  # of the whole weight; None: not agreed yet
        self.rounded_to = torch.float32  # before it is quantized: autocast's dtype, else that
        self.reason = ""  # why it travels in that dtype instead of codes
        self.amaxes: dict[Part, Tensor] = {}  # of all ranks, from precompute_scales
        self.amaxes_at = UNKNOWN  # after so many optimizer steps
        self.writes = 0  # to the shard, as far as torch tells its wrapper
        self.kept: dict[Any, Any] = {}  # what was sent of these values, while amaxes are known
        self.shard: Tensor | None = None  # that was sent last, if more of it may be asked for
        self.held: tuple[Part, ...] = ()  # what the last gather brought
        self.fsdp_group: Any = None

    @property
    def is_quantized(self) -> bool:
        return self.dtype is not None and not self.reason

    def __str__(self) -> str:
        how = f"weight travels in {self.dtype}: {self.reason}" if self.reason else str(self.plan)
        return f"{how}, in {self.rows.world} shards"

    @property
    def all_parts(self) -> tuple[Part, ...]:
        return tuple(dict.fromkeys((*self.plan.parts(False), *self.plan.parts(True))))

    def forget(self) -> None:
        """The weight may have changed."""
        self.amaxes_at, self.kept = UNKNOWN, {}

    def keep_amaxes(self, amaxes: Tensor) -> None:
        """Of all parts, until the weight changes."""
        self.amaxes = dict(zip(self.all_parts, self.split_amaxes(amaxes, self.all_parts)))
        self.amaxes_at, self.kept = STEPS.taken, {}

    # ---- the first gather ------------------------------------------------------------------------

    def agree(self, dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
        """FSDP2's compute dtype, which full shards know; ValueError where weights differ."""
        known = UNKNOWN if dtype is None else COMPUTE_DTYPES.index(dtype)
        if self.rows.world == 1:
            return COMPUTE_DTYPES[known]
        self.meet(device)
        own = torch.tensor([ops.stream(self.title), known], device=device)
        every = own.new_empty(self.rows.world * 2)
        dist.all_gather_into_tensor(every, own, group=self.group)
        titles, dtypes = every.view(-1, 2).t().tolist()
        if len(set(titles)) > 1:
            texts: list[Any] = [None] * self.rows.world
            dist.all_gather_object(texts, self.title, group=self.group)
            listed = "; ".join(f"rank {i} has {text}" for i, text in enumerate(texts))
            raise ValueError(
                f"fully_shard: expected all ranks to have the same weight, but {listed}"
            )
        return COMPUTE_DTYPES[dtypes[0]]

    def meet(self, device: torch.device) -> None:
        """Waits for all ranks to come to a first gather; ValueError, which names those that do not.

        By the group's store: a rank whose layer is not converted never comes to a collective of
        ours, and would be waited for without a word. Half of the group's timeout, so that this
        speaks before its collectives do.
        """
        group, world = self.group, self.rows.world
        try:
            store = dist.distributed_c10d._get_process_group_store(group)
            seconds = group._get_backend(device).options._timeout / 2
        except (AttributeError, RuntimeError):  # torch has no public word for either
            return
        came = store.add("minifloat/came", 1)
        turn = f"minifloat/came/{(came - 1) // world}"
        store.set(f"{turn}/{dist.get_rank(group)}", "")
        if came % world == 0:
            store.set(turn, "")
        try:
            store.wait([turn], seconds)
        except RuntimeError as error:
            store.add("minifloat/came", -1)
            missing = [rank for rank in range(world) if not store.check([f"{turn}/{rank}"])]
            raise ValueError(
                f"fully_shard: expected all {world} ranks to gather {self.title} as codes, but "
                f"ranks {missing} have not come in {seconds}: their layer is not converted, or "
                "they have ended or hang"
            ) from error

    def settle(self, dtype: torch.dtype | None, device: torch.device) -> torch.dtype:
        """The dtype that FSDP2 computes in. The first gather decides whether codes can travel."""
        if self.dtype is None:
            self.dtype = self.rounded_to = self.agree(dtype, device)
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
        try:
            if self.fsdp_group is None:
                self.fsdp_group = weakref.ref(find_fsdp_group(self.layer()))
            return bool(self.fsdp_group()._reshard_after_forward)
        except (ImportError, AttributeError, LookupError, TypeError):
            return False

    # ---- what is sent ----------------------------------------------------------------------------

    def send(self, shard: Tensor, dtype: torch.dtype | None) -> tuple[tuple[Tensor, ...], Any]:
        """All-gather inputs of this rank's rows, and what goes beside them."""
        compute_dtype = self.settle(dtype, shard.device)
        if self.reason:
            padded = shard.to(compute_dtype)
            if len(shard) < self.rows.chunk:
                padded = shard.new_zeros(self.rows.chunk, *shard.shape[1:], dtype=compute_dtype)
                padded[: len(shard)] = shard
            return (padded,), None
        self.shard = shard if self.plan.mode == "split" else None
        parts = self.plan.parts(is_backward())
        if self.amaxes_at != STEPS.taken:
            return self.send_parts(shard.to(self.rounded_to), parts)
        # No rank has to hear of it: each may decide alone whether its codes are still good.
        key = (parts, self.writes, shard._version, shard.data_ptr(), shard.device)
        if key not in self.kept:
            self.kept = {k: sent for k, sent in self.kept.items() if k[1:] == key[1:]}
            self.kept[key] = self.send_parts(shard.to(self.rounded_to), parts)
        return self.kept[key]

    def send_parts(self, x: Tensor, parts: tuple[Part, ...]) -> tuple[tuple[Tensor, ...], Sent]:
        pieces = [
            quantize_rows(x, part, self.rows, amaxes, self.in_force(part))
            for part, amaxes in zip(parts, self.amaxes_of(x, parts))
        ]
        inputs = [piece.codes for piece in pieces]
        if self.table_bytes():
            flat = x.new_zeros(self.table_bytes(), dtype=torch.uint8)
            for piece, start in zip(pieces, self.table_starts(parts)):
                if piece.table is not None:
                    scales = piece.table.reshape(-1).view(torch.uint8)
                    flat[start : start + len(scales)] = scales
            inputs.append(flat)
        return tuple(inputs), Sent(parts, pieces, tuple(inputs))

    def table_starts(self, parts: Sequence[Part]) -> list[int]:
        """Where each part's scales begin among a rank's, and where the last end."""
        starts = [0]
        for part in parts:
            length = table_bytes(part, self.rows, self.cols)
            starts.append(starts[-1] + ceil_div(length, ALIGNMENT) * ALIGNMENT)
        return starts

    def table_bytes(self) -> int:
        """That a rank sends: FSDP2 wants the same size before forward and before backward."""
        return max(self.table_starts(self.plan.parts(backward))[-1] for backward in (False, True))

    def in_force(self, part: Part) -> Tensor | None:
        if not part.is_delayed:
            return None
        layer: Any = self.layer()
        return layer.amax_history[HISTORY_ROWS[part.columnwise], 0]

    def own_amaxes(self, x: Tensor, parts: Sequence[Part]) -> Tensor:
        return torch.cat([own_amaxes(x, part, self.rows) for part in parts])

    def split_amaxes(self, amaxes: Tensor, parts: Sequence[Part]) -> Sequence[Tensor]:
        return amaxes.split([sum(amax_sizes(part, self.rows, self.cols)) for part in parts])

    def amaxes_of(self, x: Tensor, parts: Sequence[Part]) -> Sequence[Tensor]:
        """Of all ranks: those that precompute_scales reduced, else reduced now."""
        if self.amaxes_at == STEPS.taken:
            return [self.amaxes[part] for part in parts]
        own = self.own_amaxes(x, parts)
        if len(own) and self.rows.world > 1:
            own = reduce_amaxes(own, self.group)
        return self.split_amaxes(own, parts)

    # ---- what is received ------------------------------------------------------------------------

    def receive(self, outputs: Sequence[Tensor], sent: Sent | None, out: Any) -> Any:
        """The whole weight, and its tensors beside FSDP2's own; into `out` from the second on."""
        if sent is None:
            whole = outputs[0].view(-1, self.cols)[: self.rows.n]
            return None if out is not None else (whole, ())
        outputs = [*outputs, *sent.inputs[len(outputs) :]]  # a world of one gathers the first alone
        if out is not None:
            self.fill(out, outputs, sent)
            return None
        whole = self.empty_whole(outputs, sent)
        self.fill(whole, outputs, sent)
        return whole, self.inner_tensors(whole)

    def empty_whole(self, outputs: Sequence[Tensor], sent: Sent) -> GatheredWeight:
        """Its rowwise codes are FSDP2's memory: where those of all ranks follow each other."""
        n, device = self.rows.n, outputs[0].device
        row, col = (
            empty_direction(part, n, self.cols, device) for part in (self.plan.row, self.plan.col)
        )
        row = Quantized(outputs[0][:n], row.scale, row.amax, row.spec, row.shape)
        assert self.dtype is not None  # agreed before anything is sent
        return GatheredWeight(row, col, self.dtype)

    @staticmethod
    def directions(whole: QuantizedTensor) -> tuple[Quantized, Quantized]:
        assert whole.rowwise is not None
        assert whole.columnwise is not None
        return whole.rowwise, whole.columnwise

    def inner_tensors(self, whole: QuantizedTensor) -> tuple[Tensor, ...]:
        """What FSDP2 frees and allocates beside its own; the bytes of float8 scales."""
        row, col = self.directions(whole)
        return row.scale, row.amax, col.codes, col.scale, col.amax

    def fill(self, whole: QuantizedTensor, outputs: Sequence[Tensor], sent: Sent) -> None:
        with unversioned(self.directions(whole)[0].codes, *self.inner_tensors(whole)):
            for target in self.directions(whole):
                self.fill_target(target, outputs, sent)
        self.held = sent.parts

    def fill_target(self, target: Quantized, outputs: Sequence[Tensor], sent: Sent) -> None:
        """One direction from the part that brings it; nothing that reads it goes unnoticed if none
        does."""
        same = [i for i, part in enumerate(sent.parts) if part.columnwise == target.columnwise]
        if not same and self.plan.mode == "split":
            poison(target)
            if target.columnwise:
                target.codes.untyped_storage().resize_(0)  # until backward's gather
            return
        if not same and not is_backward() and self.is_gathered_for_backward():
            poison(target)  # backward alone reads it, and its gather comes first
            return
        i = same[0] if same else 0
        part, piece = sent.parts[i], sent.pieces[i]
        table = None
        if piece.table is not None:
            start = self.table_starts(sent.parts)[i]
            flat = outputs[-1].view(self.rows.world, -1)
            length = table_bytes(part, self.rows, self.cols)
            table = whole_table(flat[:, start : start + length], part, self.rows, self.cols)
        codes = outputs[i].view(-1, piece.codes.shape[1])
        fill_direction(target, part, codes, table, piece.scale, piece.amax)

    # ---- what a split gather did not bring -------------------------------------------------------

    def complete(self, whole: Tensor, reads_columnwise: bool) -> None:
        """Before a forward: fetches what it reads and no gather brings, on all ranks alike."""
        if self.plan.mode != "split" or not isinstance(whole, GatheredWeight):
            return
        row, col = self.plan.row, self.plan.col
        if row not in self.held:
            self.fetch(whole, row)
        if reads_columnwise and col not in self.held and not self.is_gathered_for_backward():
            self.fetch(whole, col)

    def fetch(self, whole: QuantizedTensor, part: Part) -> None:
        assert self.shard is not None
        inputs, sent = self.send_parts(self.shard.to(self.rounded_to), (part,))
        outputs = [t.new_empty(self.rows.world * len(t), *t.shape[1:]) for t in inputs]
        for output, given in zip(outputs, inputs):
            dist.all_gather_into_tensor(output, given, group=self.group)
        target = self.directions(whole)[part.columnwise]
        if part.columnwise:
            target.codes.untyped_storage().resize_(target.codes.nbytes)
        with unversioned(target.codes, target.scale, target.amax):
            self.fill_target(target, outputs, sent)
        self.held = (*self.held, part)


def is_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@contextmanager
def unversioned(*tensors: Tensor) -> Iterator[None]:
    """Writes to what FSDP2 has gathered again: the same values, for those who saved them."""
    versioned = tuple(t for t in tensors if not t.is_inference())
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(versioned):
        yield


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
