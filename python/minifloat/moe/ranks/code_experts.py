"""Experts of several ranks. x and the gradient of the output, g, travel as codes or as values.

    forward     x       -> ranks of their experts         products read the codes
                results -> ranks of their tokens
    backward    g       -> ranks of their experts         dgrad reads the codes
                gradients of tokens and weights <-        wgrad reads casts of the codes' values

Shape suffixes: M rows that this rank sends, A rows that arrive, D width, I hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...tensor.operands import Operand
from ..functional import Matrices, Plan, gradients_of_inputs, unpack
from ..permute import NO_ORDER, Order
from ..row_operands import group_table, quantized_rows, shared_operands
from .dispatch import HEADER, Route, RowLayout, SentGroups, combine, return_gradients
from .row_codes import CodeSender, RowCodes


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

    Arguments: way, x, weights, one more than the local number of each row's expert, and x as codes
    or None. Returns a tensor of no memory for the gradient of x, the weights, ids and experts that
    arrive, scale and amax of this rank's experts, and the fields of the codes.
    """

    @staticmethod
    def forward(
        ctx: Any, way: Way, x: Tensor, weights: Tensor, kinds: Tensor, tokens: Operand | None
    ) -> tuple[Any, ...]:
        assert way.x is not None
        width, order = x.shape[1], way.sent
        table = group_table(order)
        if tokens is not None and way.x.sends(tokens):
            fields, shared = way.x.copies(tokens, order)
        else:
            sent = way.sent_groups(way.x)
            fields, shared = way.x.quantize(x, table, way.ids, order.tokens, sent)
        layout = RowLayout(*way.x.fields(width), *HEADER)
        weights_M = weights.reshape(-1).index_select(0, order.pairs)
        arrived = way.route.send(layout.pack([*fields, weights_M, way.ids, kinds]))
        *codes, weights_A, ids, experts = layout.unpack(arrived)
        ids, experts = ids.reshape(-1), experts.reshape(-1)
        ctx.way, ctx.dtypes = way, (x.dtype, weights.dtype)
        ctx.mark_non_differentiable(ids, experts, *shared, *codes)
        ctx.set_materialize_grads(False)
        carrier = x.new_zeros(()).expand(arrived.shape[0], width)
        return carrier, weights_A, ids, experts, *shared, *codes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        x_dtype, weights_dtype = ctx.dtypes
        way = ctx.way
        dx, d_weights = return_gradients(way.route, grads[0], grads[1], way.sent, x_dtype)
        return None, dx, d_weights.to(weights_dtype), None, None


class CodeExperts(torch.autograd.Function):
    """The rows (M, D) of all experts, sent back, whose gradient comes as codes or as values.

    Arguments: plan, way, how many tensors x has, x (A, D) or its carrier, weights, scale, amax and
    fields of x's codes, the order of the rows that arrive, the matrices.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        way: Way,
        count: int,
        x: Tensor,
        weights: Tensor,
        *tensors: Tensor | None,
    ) -> Tensor:
        codes, rest = tensors[:count], tensors[count:]
        order, matrices = unpack(plan, rest)
        weights_A = weights.reshape(-1).index_select(0, order.pairs)
        table = group_table(order)
        operands: list[Tensor] | None
        if way.x is not None:
            rows = sorted_codes(way.x, codes, order, x.shape[1])
            saved = [rows.scale, rows.amax, rows.codes]
            values, operands = x, rows.operands()
        else:
            saved = [x]
            values, operands = quantized_rows(recipes_of(plan), x, order, table, rowwise=True)
        products = [
            call.multiply(values, b, order.offs, order.row_ids, bias, operands)
            for call, b, bias in zip(plan.inputs, matrices.inputs, matrices.biases)
        ]
        cast = plan.output.cast_options(order.row_ids)
        h, operands = plan.gate.quantize(products, weights_A, None, table, cast, rowwise=True)
        y = plan.output.multiply(h, matrices.output, order.offs, order.row_ids, a_operands=operands)
        ctx.plan, ctx.way, ctx.dtype = plan, way, x.dtype
        ctx.counts = count, len(saved), len(rest)
        ctx.save_for_backward(*saved, *rest, weights_A, *products)
        return combine(way.route, y.index_select(0, order.places[:, 0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        plan, way, (count, begin, length) = ctx.plan, ctx.way, ctx.counts
        tensors = ctx.saved_tensors
        saved, rest = tensors[:begin], tensors[begin : begin + length]
        weights_A, *products = tensors[begin + length :]
        del tensors
        order, matrices = unpack(plan, rest)
        needs = ctx.needs_input_grad[5 + count + len(order) :]
        dh, d_output = through_output(ctx, grads[0], order, matrices, weights_A, products, needs)
        d_products, d_weights = plan.gate.backward(dh, products, weights_A)
        del dh

        width = grads[0].shape[1]
        table = group_table(order)
        recipes = recipes_of(plan)
        if way.x is None:
            rows, operands = quantized_rows(recipes, saved[0], order, table, rowwise=False)
        else:
            scale, amax, codes = saved
            rows = RowCodes(way.x.spec, width, codes, scale, amax).values(table, ctx.dtype)
            numbers = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
            sorted_rows = order._replace(pairs=numbers)
            operands = shared_operands(recipes, rows, sorted_rows, table, rowwise=False)
        d_rows, d_matrices = gradients_of_inputs(
            plan, d_products, rows, operands, order, matrices, (ctx.needs_input_grad[3], *needs)
        )
        places = order.places[:, 0]
        dx = None if d_rows is None else d_rows.index_select(0, places)
        none = [None] * count
        d_weights_A = d_weights.index_select(0, places)[:, None]
        return None, None, None, dx, d_weights_A, *none, *NO_ORDER, *d_matrices, d_output


def recipes_of(plan: Plan) -> list[str]:
    """Returns the recipes of the products that read x."""
    return [call.recipe for call in plan.inputs]


def sorted_codes(sender: CodeSender, tensors: Sequence[Any], order: Order, width: int) -> RowCodes:
    """Returns rows that arrived, of (scale, amax, fields), sorted."""
    shared, fields = tensors[:2], tensors[2:]
    return sender.receive([f.index_select(0, order.pairs) for f in fields], shared, width)


def through_output(
    ctx: Any,
    g_M: Tensor,
    order: Order,
    matrices: Matrices,
    weights_A: Tensor,
    products: list[Tensor],
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor | None]:
    """Sends the gradient of the results to the experts' ranks, and multiplies there.

    Returns:
        The gradient of h, and that of w2's matrix where it is needed.
    """
    plan, way, width = ctx.plan, ctx.way, g_M.shape[1]
    table, cast = group_table(order), plan.output.cast_options(order.row_ids)
    h, operands = plan.gate.quantize(products, weights_A, None, table, cast, columnwise=needs[-1])
    if way.g is None:
        layout, g_operands = RowLayout((g_M.dtype, width)), None
        (arrived,) = layout.unpack(way.route.send(layout.pack([g_M])))
        g = arrived.index_select(0, order.pairs)
    else:
        layout = RowLayout(*way.g.fields(width))
        of_sent = group_table(way.sent)
        fields, shared = way.g.quantize(g_M, of_sent, way.ids, sent=way.sent_groups(way.g))
        codes = layout.unpack(way.route.send(layout.pack(fields)))
        rows = sorted_codes(way.g, [*shared, *codes], order, width)
        g, g_operands = rows.values(table, g_M.dtype), rows.operands()
    dh, d_output, _ = plan.output.gradients(
        g,
        h,
        matrices.output,
        *order[2:],
        None,
        (True, needs[-1], False),
        operands,
        g_operands=g_operands,
    )
    return dh, d_output
