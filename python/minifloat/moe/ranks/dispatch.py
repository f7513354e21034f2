"""Rows on their way to experts of other ranks, and back.

    rows, by expert      [to rank 0: r0 r1 …][to rank 1: …]…[to no rank]        M rows
    send                 one all_to_all_single; rows that arrive lie in the order of their ranks
    back                 the way back of as many rows, of any width

A row is bytes: fields of several dtypes, side by side where the op row_layout says.

Shape suffixes: M rows that this rank sends, R ranks, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..._native import ops


class RowLayout:
    """The fields of a row: (dtype, columns) each."""

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
            slots: of each field, whose row n is the tensor's row index[n] / slots; 0: its row n.
            rows_from: int32, n of each row of the message, -1 of a row of zeros; None: all in
                order.

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
    """A caller's own way of rows. Each call is made on all ranks of the group.

    Rows are bytes: values or codes, scales, ids and routing weights. The layer reads what it needs
    from the rows that arrive, so they may arrive in any order.
    """

    def dispatch(self, rows: Tensor, experts: Tensor, handle: Any) -> tuple[Tensor, Any]:
        """Sends each row to the rank that has its expert.

        Args:
            rows: uint8 (M, B), contiguous, in the order of their experts. B is a multiple of 16,
                equal on all ranks.
            experts: int32 (M), the experts' numbers among all ranks, ascending. The number of
                experts, after the last one, stands for none: such rows are not sent. Expert e is
                on rank e // (experts / ranks).
            handle: None in forward. In backward what this forward's call returned: the rows of the
                second call must arrive in the order of the first.

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


class SentGroups(NamedTuple):
    """The rows that are sent, without those that are dropped, in the groups of their experts.

    Args:
        rows: int32 (M), their numbers, then those of the others.
        table: of their groups.
    """

    rows: Tensor
    table: Tensor


class Route:
    """The way of one forward's messages to the experts' ranks, and of others back.

    Attributes:
        rows_from: int32, which of the rows a message has, -1 for a row of zeros; None: all.
    """

    rows_from: Tensor | None = None

    def wait(self) -> None:
        """Returns once the ranks are known to have the same layer, or raises ValueError."""

    def send(self, rows: Tensor) -> Tensor:
        """Sends the rows of a message, uint8, and returns those that arrive."""
        raise NotImplementedError

    def back(self, rows: Tensor) -> Tensor:
        """Sends rows back, and returns as many as the message had."""
        raise NotImplementedError

    def places(self, places: Tensor) -> Tensor:
        """Returns where in a message the rows of these numbers are, int32, -1 of one not sent."""
        return places

    def sent_groups(self, offs: Tensor) -> SentGroups | None:
        """Returns the rows that are sent, of groups that end at `offs`; None: all are."""
        return None


class ExactRoute(Route):
    """Sends all rows. The host waits for their numbers, at the latest where rows are first sent.

    Args:
        group: the ranks.
        read: waits for the device, compares the ranks' layers, and returns how many rows go to
            each rank and how many come from each.
        rows: M, with rows for no expert at the end.
    """

    def __init__(
        self, group: dist.ProcessGroup, read: Callable[[], tuple[list[int], list[int]]], rows: int
    ) -> None:
        self.group, self.rows = group, rows
        self.read: Callable[[], tuple[list[int], list[int]]] | None = read
        self.sent: list[int] = []
        self.received: list[int] = []

    def wait(self) -> None:
        if self.read is not None:
            (self.sent, self.received), self.read = self.read(), None

    def send(self, rows: Tensor) -> Tensor:
        self.wait()
        received = rows.new_empty(sum(self.received), rows.shape[1])
        own = rows[: sum(self.sent)]
        dist.all_to_all_single(received, own, self.received, self.sent, group=self.group)
        return received

    def back(self, rows: Tensor) -> Tensor:
        returned, count = rows.new_empty(self.rows, rows.shape[1]), sum(self.sent)
        returned[count:].zero_()
        dist.all_to_all_single(returned[:count], rows, self.sent, self.received, group=self.group)
        return returned


class CapacityRoute(Route):
    """Sends at most `capacity` rows to each rank, in buffers of one size. Nothing waits.

    Args:
        group: the ranks.
        counts: int64 (R), rows to each rank, on the device.
        capacity: rows.
        rows: M, with rows for no expert at the end.
        may_drop: whether more rows than the capacity can go to one rank.
    """

    def __init__(
        self, group: dist.ProcessGroup, counts: Tensor, capacity: int, rows: int, may_drop: bool
    ) -> None:
        self.group, self.may_drop = group, may_drop
        device = counts.device
        ends = counts.cumsum(0)
        # Of each rank, and of the rows for no expert, which none receives.
        starts, kept = F.pad(ends, (1, 0)), F.pad(counts.clamp(max=capacity), (0, 1))
        self.dropped = counts.sum() - kept.sum()
        place = torch.arange(capacity, device=device)
        rows_from = (starts[:-1, None] + place).masked_fill(place >= kept[:-1, None], -1)
        self.rows_from = rows_from.reshape(-1).int()
        row = torch.arange(rows, device=device)
        rank = torch.searchsorted(ends, row, right=True)
        number = row - starts[rank]
        self.is_sent = number < kept[rank]
        self.place_of_row = (rank * capacity + number).masked_fill(~self.is_sent, -1).int()

    def send(self, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows)
        dist.all_to_all_single(received, rows, group=self.group)
        return received

    def back(self, rows: Tensor) -> Tensor:
        return self.send(rows)

    def places(self, places: Tensor) -> Tensor:
        return self.place_of_row.take(places.long())

    def sent_groups(self, offs: Tensor) -> SentGroups | None:
        if not self.may_drop:
            return None
        count = self.is_sent.cumsum(0)
        ends = torch.cat([count.new_zeros(1), count]).index_select(0, offs)
        numbers = (~self.is_sent).byte().argsort(stable=True).int()
        return SentGroups(numbers, ops.group_table(ends.int(), numbers.shape[0]))


class DispatcherRoute(Route):
    """The way of a caller's dispatcher.

    Args:
        dispatcher: the caller's.
        experts: int32 (M), as Dispatcher.dispatch takes them.
    """

    def __init__(self, dispatcher: Dispatcher, experts: Tensor) -> None:
        self.dispatcher, self.experts = dispatcher, experts
        self.handle: Any = None

    def send(self, rows: Tensor) -> Tensor:
        received, handle = self.dispatcher.dispatch(rows, self.experts, self.handle)
        if self.handle is None:
            self.handle = handle
        return require_rows("dispatch", received, None, rows.shape[1])

    def back(self, rows: Tensor) -> Tensor:
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
