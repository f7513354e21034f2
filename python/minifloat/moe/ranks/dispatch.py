"""Plans the exchange of one forward's rows between ranks, and sends rows by the plan.

    rows, sorted by expert   [to rank 0: r0 r1 …][to rank 1: …]…[to no rank]           M rows
    dispatch                 one all_to_all_single; rows arrive in the order of their ranks
    combine                  the same in the other direction: as many rows return, of any width

Forward dispatches tokens and combines results. Backward uses the same plan: it dispatches the
gradients of results, and combines the gradients of tokens.

Shape suffixes: T tokens, k slots, M rows that this rank sends, R ranks, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..._native import ops
from ..feed_forward import Order


class RowLayout:
    """The layout of a row as bytes.

    Args:
        fields: (dtype, columns) of each field, in order. The op row_layout places them.
    """

    def __init__(self, *fields: tuple[torch.dtype, int]) -> None:
        sizes = [dtype.itemsize * columns for dtype, columns in fields]
        *begins, self.row_bytes = ops.row_layout(sizes)
        self.fields = [
            (dtype, begin, begin + size) for (dtype, _), begin, size in zip(fields, begins, sizes)
        ]

    def pack(
        self,
        tensors: Sequence[Tensor],
        index: Tensor | None = None,
        slots: Sequence[int] = (),
        rows_from: Tensor | None = None,
    ) -> Tensor:
        """Puts one tensor a field, (rows, columns) or (rows) each, side by side.

        Args:
            tensors: of the dtypes of the fields.
            index: int32 (M), for fields with slots.
            slots: one number a field. Row n of a field is row index[n] / slots of its tensor; where
                the number is 0, it is row n.
            rows_from: int32, the row n that each row of the message has, -1: a row of zeros;
                None: all rows in order.

        Returns:
            uint8 (rows of the message, B).
        """
        rows = ops.pack_rows(tensors, index, slots=slots, rows_from=rows_from)
        assert rows.shape[1] == self.row_bytes
        return rows

    def unpack(self, rows: Tensor) -> list[Tensor]:
        """Returns a view of each field, (M, columns)."""
        return [rows[:, begin:end].view(dtype) for dtype, begin, end in self.fields]


class Dispatcher(Protocol):
    """The two functions by which a caller sends rows itself. All ranks of the group call each.

    A row is bytes: values or codes, scales, ids and routing weights. The layer reads them from each
    row, so rows may arrive in any order.
    """

    def dispatch(self, rows: Tensor, experts: Tensor, handle: Any) -> tuple[Tensor, Any]:
        """Sends each row to the rank that has its expert.

        Args:
            rows: uint8 (M, B), contiguous, in the order of their experts. B is a multiple of 16,
                equal on all ranks.
            experts: int32 (M), the experts' numbers among all ranks, ascending. Expert e is on rank
                e // (experts / ranks). A number equal to the count of experts means no expert: the
                row is not sent.
            handle: None in forward. In backward, what the forward's call returned: rows must then
                arrive in the order in which they arrived in forward.

        Returns:
            The rows that arrive, uint8 (any number, B), and a handle. Rows of zeros are ignored.
        """
        ...

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Sends rows back, in forward the experts' results, in backward the gradients.

        Args:
            rows: uint8 (as many as arrived, B), in the order of arrival. B may differ from that of
                `dispatch`.
            handle: what the forward's `dispatch` returned.

        Returns:
            uint8 (M, B), in the order of the rows that were sent; zeros for rows that were not.
        """
        ...


@dataclass(eq=False, kw_only=True)
class ExchangePlan:
    """Where each row of one forward goes. A subclass sends rows in one of three ways.

    Args:
        order: of the rows that this rank sends, sorted by their experts among all ranks.
        pair_ids: int32 (M), the number among all ranks of each row's pair of token and slot.
        local_experts: int32 (M), one more than the number of each row's expert among those of its
            rank; 0 where no expert computes the row.

    Attributes:
        rows_from: int32, the row that each row of a message has, -1: a row of zeros; None: a
            message has all rows in order.
    """

    order: Order
    pair_ids: Tensor
    local_experts: Tensor
    rows_from: Tensor | None = field(default=None, init=False)

    def wait(self) -> None:
        """Returns once the ranks are known to have the same layer, or raises ValueError."""

    def dispatch(self, rows: Tensor) -> Tensor:
        """Sends the rows of a message, uint8, to their experts; returns those that arrive."""
        raise NotImplementedError

    def combine(self, rows: Tensor) -> Tensor:
        """Sends as many rows as arrived back; returns as many as the message had."""
        raise NotImplementedError

    def slot_positions(self) -> Tensor:
        """Returns the position in a message of each slot's row, int32 (T, k); -1: not sent."""
        return self.order.places

    def kept_rows(self) -> tuple[Tensor, Tensor] | None:
        """Returns the rows that a capacity does not drop; None: it drops none.

        Returns:
            int32 (M), the numbers of the kept rows, then those of the dropped ones; and the table
            of groups of the kept rows, one group an expert.
        """
        return None


@dataclass(eq=False, kw_only=True)
class ExactPlan(ExchangePlan):
    """Sends all rows, in messages of exact sizes.

    The host waits for the counts of rows, at the latest in the first `dispatch`.

    Args:
        group: the ranks.
        read_counts: waits for the device, compares the ranks' layers, and returns how many rows go
            to each rank and how many come from each.
    """

    group: dist.ProcessGroup
    read_counts: Callable[[], tuple[list[int], list[int]]] | None
    send_counts: list[int] = field(default_factory=list, init=False)
    receive_counts: list[int] = field(default_factory=list, init=False)

    def wait(self) -> None:
        if self.read_counts is not None:
            self.send_counts, self.receive_counts = self.read_counts()
            self.read_counts = None

    def dispatch(self, rows: Tensor) -> Tensor:
        self.wait()
        splits = self.receive_counts, self.send_counts
        received = rows.new_empty(sum(self.receive_counts), rows.shape[1])
        dist.all_to_all_single(received, rows[: sum(self.send_counts)], *splits, group=self.group)
        return received

    def combine(self, rows: Tensor) -> Tensor:
        splits, count = (self.send_counts, self.receive_counts), sum(self.send_counts)
        returned = rows.new_empty(self.order.pairs.shape[0], rows.shape[1])
        returned[count:].zero_()  # rows for no expert, which are at the end
        dist.all_to_all_single(returned[:count], rows, *splits, group=self.group)
        return returned


@dataclass(eq=False, kw_only=True)
class CapacityPlan(ExchangePlan):
    """Sends at most `capacity` rows to each rank, in messages of one size. Nothing waits.

    Args:
        group: the ranks.
        send_counts: int64 (R), rows for each rank, on the device.
        capacity: rows.
        may_drop: whether more rows than the capacity can go to one rank.

    Attributes:
        dropped: int64 (), how many rows are past the capacity.
    """

    group: dist.ProcessGroup
    send_counts: Tensor
    capacity: int
    may_drop: bool
    dropped: Tensor = field(init=False)

    def __post_init__(self) -> None:
        counts, device = self.send_counts, self.send_counts.device
        ends = counts.cumsum(0)
        # One more entry than ranks: the last is that of rows for no expert, which are not sent.
        starts, kept = F.pad(ends, (1, 0)), F.pad(counts.clamp(max=self.capacity), (0, 1))
        self.dropped = counts.sum() - kept.sum()
        place = torch.arange(self.capacity, device=device)
        rows_from = (starts[:-1, None] + place).masked_fill(place >= kept[:-1, None], -1)
        self.rows_from = rows_from.reshape(-1).int()
        row = torch.arange(self.order.pairs.shape[0], device=device)
        rank = torch.searchsorted(ends, row, right=True)
        number = row - starts[rank]  # among the rows for the same rank
        position = rank * self.capacity + number
        self._positions = position.masked_fill(number >= kept[rank], -1).int()

    def dispatch(self, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self.group)
        return received

    combine = dispatch

    def slot_positions(self) -> Tensor:
        return self._positions.take(self.order.places.long())

    def kept_rows(self) -> tuple[Tensor, Tensor] | None:
        if not self.may_drop:
            return None
        is_dropped = self._positions < 0
        count = (~is_dropped).cumsum(0)
        ends = torch.cat([count.new_zeros(1), count]).index_select(0, self.order.offs)
        numbers = is_dropped.byte().argsort(stable=True).int()
        return numbers, ops.group_table(ends.int(), numbers.shape[0])


@dataclass(eq=False, kw_only=True)
class DispatcherPlan(ExchangePlan):
    """Sends rows by a caller's dispatcher.

    Args:
        dispatcher: the caller's.
        experts: int32 (M), as Dispatcher.dispatch takes them.
    """

    dispatcher: Dispatcher
    experts: Tensor
    handle: Any = field(default=None, init=False)

    def dispatch(self, rows: Tensor) -> Tensor:
        received, handle = self.dispatcher.dispatch(rows, self.experts, self.handle)
        if self.handle is None:
            self.handle = handle
        return require_rows("dispatch", received, None, rows.shape[1])

    def combine(self, rows: Tensor) -> Tensor:
        returned = self.dispatcher.combine(rows, self.handle)
        return require_rows("combine", returned, self.experts.shape[0], rows.shape[1])


def require_rows(function: str, rows: object, count: int | None, row_bytes: int) -> Tensor:
    """Checks the rows that a caller's dispatcher returned."""
    shape = f"({'rows' if count is None else count}, {row_bytes})"
    if not isinstance(rows, Tensor):
        raise TypeError(f"expert_parallel: {function}: expected uint8 {shape}, got {rows!r}")
    is_right = rows.dim() == 2 and rows.shape[1] == row_bytes and rows.dtype == torch.uint8
    if not is_right or (count is not None and rows.shape[0] != count):
        raise ValueError(
            f"expert_parallel: {function}: expected uint8 {shape}, got {rows.dtype} "
            f"{tuple(rows.shape)}"
        )
    return rows.contiguous()
