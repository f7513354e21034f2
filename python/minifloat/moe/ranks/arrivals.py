"""Rows of values on their way to experts of other ranks, and back, differentiably.

    DispatchRows    rows of tokens, weights, ids    -> the ranks of their experts
                    gradients of both               <- one collective
    CombineRows     results of the experts          -> the ranks of their tokens
                    gradient of the results         <- one collective

Rows that arrive are sorted by expert and id, so that a group has the order that it has in one
process with all ranks' tokens.

Shape suffixes: M rows that this rank sends, A rows that arrive, T tokens, k slots, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..permute import NO_ORDER, Order, add_slots, take_rows
from .routes import Route, RowLayout

ID_BITS = 32
# The fields of a row besides values or codes: its routing weight; the number of its pair among all
# ranks; and one more than the number of its expert among those of its rank, 0 where no expert
# computes the row.
HEADER = ((torch.float32, 1), (torch.int32, 1), (torch.int32, 1))


def sort_arrivals(ids_A: Tensor, experts_A: Tensor, experts: int) -> Order:
    """Sorts the rows that arrived by expert and id.

    Args:
        ids_A: int32 (A), the numbers of their pairs.
        experts_A: int32 (A), as HEADER's last field.
        experts: how many this rank has.

    Returns:
        The order, as of tokens with one slot each.
    """
    # Rows of no expert come last.
    expert = torch.where(experts_A > 0, experts_A - 1, experts).long()
    keys, order = ((expert << ID_BITS) + ids_A).sort()
    numbers = torch.arange(experts, device=keys.device)
    offs = torch.searchsorted(keys >> ID_BITS, numbers, right=True, out_int32=True)
    rows = torch.arange(order.shape[0], dtype=torch.int32, device=keys.device)
    places = torch.empty_like(rows).scatter_(0, order, rows)
    return Order(order.int(), places[:, None], offs, ids_A.index_select(0, order))


def return_gradients(
    route: Route, d_rows: Tensor, d_weights: Tensor, order: Order, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Sends gradients of arrived rows and weights back, and sums the rows of each token.

    Args:
        d_rows: (A, D), in the order of arrival.
        d_weights: float32 (A, 1).
        order: of the rows that were sent.
        dtype: of the tokens' gradient.

    Returns:
        (T, D) and float32 (T, k).
    """
    layout = RowLayout((d_rows.dtype, d_rows.shape[1]), (torch.float32, 1))
    found, d_weights_M = layout.unpack(route.back(layout.pack([d_rows, d_weights])))
    dx = add_slots(found, order).to(dtype)
    return dx, d_weights_M.reshape(-1).take(order.places.long())


class DispatchRows(torch.autograd.Function):
    """Sends tokens' rows and weights to the experts' ranks, as values.

    Arguments: route, x, weights, ids, experts (both as in HEADER), the order. Returns the values,
    weights, ids and experts that arrive.
    """

    @staticmethod
    def forward(
        ctx: Any,
        route: Route,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        experts: Tensor,
        *order: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        sent = Order(*order)
        layout = RowLayout((x.dtype, x.shape[1]), *HEADER)
        weights_M = weights.reshape(-1).index_select(0, sent.pairs)
        arrived = route.send(layout.pack([take_rows(x, sent), weights_M, ids, experts]))
        values, weights_A, ids_A, experts_A = layout.unpack(arrived)
        ids_A, experts_A = ids_A.reshape(-1), experts_A.reshape(-1)
        ctx.route, ctx.dtypes = route, (x.dtype, weights.dtype)
        ctx.save_for_backward(*order)
        ctx.mark_non_differentiable(ids_A, experts_A)
        return values, weights_A, ids_A, experts_A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_dtype, weights_dtype = ctx.dtypes
        order = Order(*ctx.saved_tensors)
        dx, d_weights = return_gradients(ctx.route, grads[0], grads[1], order, x_dtype)
        return None, dx, d_weights.to(weights_dtype), None, None, *NO_ORDER


class CombineRows(torch.autograd.Function):
    """Sends the experts' rows back: (A, D), sorted, -> (M, D). Arguments: route, rows, arrivals."""

    @staticmethod
    def forward(ctx: Any, route: Route, rows: Tensor, pairs: Tensor, places: Tensor) -> Tensor:
        ctx.route = route
        ctx.save_for_backward(pairs)
        return combine(route, rows.index_select(0, places[:, 0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (pairs,) = ctx.saved_tensors
        layout = RowLayout((grads[0].dtype, grads[0].shape[1]))
        (arrived,) = layout.unpack(ctx.route.send(layout.pack(grads)))
        return None, arrived.index_select(0, pairs), None, None


def combine(route: Route, rows: Tensor) -> Tensor:
    """Sends values in the order of arrival back to where they came from: (A, D) -> (M, D)."""
    layout = RowLayout((rows.dtype, rows.shape[1]))
    return layout.unpack(route.back(layout.pack([rows])))[0]
