"""Experts of several ranks where x, the gradient of the output, or both travel as codes.

    forward     x as codes -> ranks of their experts      products read the codes
                results    -> ranks of their tokens
    backward    g as codes -> ranks of their experts      dgrad reads the codes
                gradients of tokens and weights <-        wgrad reads casts of the codes' values

Shape suffixes: M rows that this rank sends, A rows that arrive, D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..._native import ops
from ...tensor.operands import Operand
from ..permute import Order
from .dispatch import ROW_METADATA, Route, RowLayout, SentGroups, combine, return_gradients
from .row_codes import CodeSender


@dataclass(frozen=True)
class Way:
    """How one forward's operands travel.

    Args:
        route: of the rows.
        x: the cast of x; None: x travels as values.
        g: the cast of the gradient; None: it travels as values.
        sent: the order of the rows that this rank sends.
        ids: int32 (M), the numbers of their pairs among all ranks.
    """

    route: Route
    x: CodeSender | None
    g: CodeSender | None
    sent: Order
    ids: Tensor

    def sent_groups(self, sender: CodeSender) -> SentGroups | None:
        """Returns the rows that count for amaxes of experts; None: all do, or there are none."""
        has_amaxes = sender.spec.amax_of == "tensor"
        return self.route.sent_groups(self.sent.offs) if has_amaxes else None


class DispatchCodes(torch.autograd.Function):
    """Sends tokens' rows as codes, and weights, to the experts' ranks.

    Arguments: way, x, weights, the local experts of rows as in ROW_METADATA, and x as codes or
    None. Returns a tensor of no memory for the gradient of x, the weights, ids and experts that
    arrive, and codes, scale and amax of the rows.
    """

    @staticmethod
    def forward(
        ctx: Any, way: Way, x: Tensor, weights: Tensor, local_M: Tensor, tokens: Operand | None
    ) -> tuple[Any, ...]:
        assert way.x is not None
        width, order = x.shape[1], way.sent
        table = group_table(order)
        if tokens is not None and way.x.can_reuse(tokens):
            fields, shared = way.x.gather_codes(tokens, order)
        else:
            sent = way.sent_groups(way.x)
            fields, shared = way.x.quantize(x, table, way.ids, order.tokens, sent)
        layout = RowLayout(*way.x.fields(width), *ROW_METADATA)
        weights_M = weights.reshape(-1).index_select(0, order.pairs)
        arrived = way.route.send(layout.pack([*fields, weights_M, way.ids, local_M]))
        *codes, weights_A, ids, experts = layout.unpack(arrived)
        ids, experts = ids.reshape(-1), experts.reshape(-1)
        ctx.way, ctx.dtypes = way, (x.dtype, weights.dtype)
        found = way.x.received(codes, shared)
        ctx.mark_non_differentiable(ids, experts, *found)
        ctx.set_materialize_grads(False)
        carrier = x.new_zeros(()).expand(arrived.shape[0], width)
        return carrier, weights_A, ids, experts, *found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x_dtype, weights_dtype = ctx.dtypes
        way = ctx.way
        dx, d_weights = return_gradients(way.route, grads[0], grads[1], way.sent, x_dtype)
        return None, dx, d_weights.to(weights_dtype), None, None


class CombineCodes(torch.autograd.Function):
    """Sends the experts' rows back, sorted (A, D) -> (M, D); their gradient comes as codes.

    Arguments: way, what takes the gradient's codes, rows, the places of arrivals.
    """

    @staticmethod
    def forward(
        ctx: Any, way: Way, gradient: torch.ScriptObject, rows: Tensor, places: Tensor
    ) -> Tensor:
        ctx.way, ctx.gradient, ctx.shape = way, gradient, rows.shape
        return combine(way.route, rows.index_select(0, places[:, 0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g_M,), way = grads, ctx.way
        layout = RowLayout(*way.g.fields(g_M.shape[1]))
        table, sent = group_table(way.sent), way.sent_groups(way.g)
        fields, shared = way.g.quantize(g_M, table, way.ids, sent=sent)
        arrived = layout.unpack(way.route.send(layout.pack(fields)))
        ctx.gradient.set(way.g.received(arrived, shared))
        return None, None, g_M.new_zeros(()).expand(ctx.shape), None


def group_table(order: Order) -> Tensor:
    """Returns the table of the experts' groups."""
    return ops.group_table(order.offs, order.pairs.shape[0])
