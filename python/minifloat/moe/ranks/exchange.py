"""Dispatches rows of tokens to the experts of other ranks, and combines the results.

    forward     Dispatch   x        -> ranks of the experts     products of w13 read it
                Combine    results  -> ranks of the tokens
    backward    Combine    g        -> ranks of the experts     dgrad reads it
                Dispatch   gradients of tokens and routing weights  -> ranks of the tokens

Each line is one all-to-all. x and g travel as values or as codes (operand_cast.py). A product that
reads other codes than those that travelled, as wgrad does, casts the bfloat16 values of the codes.
Rows that arrive are sorted by expert and pair id. That is their order in one process with the
tokens of all ranks.

Shape suffixes: M rows that this rank sends, A rows that arrive, T tokens, k slots, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..._native import ops
from ...tensor.quantized import Operand
from ..feed_forward import Products, order_rows
from .dispatch import ExchangePlan, RowLayout
from .operand_cast import OperandCast

# The fields of a row besides values or codes: its routing weight; its pair id among all ranks; and
# its local expert (both as in ExchangePlan).
ROW_METADATA = ((torch.float32, 1), (torch.int32, 1), (torch.int32, 1))


def dispatch_rows(
    plan: ExchangePlan,
    x: Tensor,
    cast: OperandCast | None,
    codes: Operand | None = None,
    weights: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Dispatches the rows of x, as values or as codes, in one message to each rank.

    Args:
        plan: of the exchange.
        x: (T, D), of the tokens.
        cast: of x; None: the rows travel as values.
        codes: as `OperandCast.quantize` takes them.
        weights: (T, k), the routing weights; None: rows travel without the fields of ROW_METADATA.

    Returns:
        Of the rows that arrive: values, or what `OperandCast.operand` returns; and the fields of
        ROW_METADATA, or none.
    """
    tensors, slots, fields = [x], plan.order.slots, [(x.dtype, x.shape[1])]
    factors: list[Tensor] = []
    if cast is not None:
        tensors, factors, slots = cast.quantize(x, plan, codes)
        fields = cast.row_fields(x.shape[1])
    count, slots_of_field = len(fields), [slots] * len(fields)
    if weights is not None:
        tensors += [weights.reshape(-1).float(), plan.pair_ids, plan.local_experts]
        fields += ROW_METADATA
        slots_of_field += [1, 0, 0]
    layout = RowLayout(*fields)
    message = layout.pack(tensors, plan.order.pairs, slots_of_field, plan.rows_from)
    arrived = layout.unpack(plan.dispatch(message))
    rows = arrived[:count] if cast is None else cast.operand(arrived[:count], factors)
    return rows, arrived[count:]


class Dispatch(torch.autograd.Function):
    """Dispatches the rows of tokens and their routing weights.

    Arguments: the plan, the cast of x or None, x, the routing weights, and x as codes or None.

    Returns the rows that arrive, their weights, pair ids and local experts. Where x travels as
    codes, codes, scale and amax follow, and the rows are a tensor of zeros without memory, which
    carries the gradient of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: ExchangePlan,
        cast: OperandCast | None,
        x: Tensor,
        weights: Tensor,
        tokens: Operand | None,
    ) -> tuple[Any, ...]:
        rows, (weights_A, ids, experts) = dispatch_rows(plan, x, cast, tokens, weights)
        values, codes, metadata = rows[0], [], [ids.reshape(-1), experts.reshape(-1)]
        if cast is not None:
            values, codes = x.new_zeros(()).expand(ids.shape[0], x.shape[1]), rows
        ctx.plan, ctx.dtypes = plan, (x.dtype, weights.dtype)
        ctx.mark_non_differentiable(*metadata, *codes)
        ctx.set_materialize_grads(False)
        return values, weights_A, *metadata, *codes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Combines the gradients of rows and weights, and sums the rows of each token."""
        d_rows, d_weights, *_ = grads
        x_dtype, weights_dtype = ctx.dtypes
        layout = RowLayout((d_rows.dtype, d_rows.shape[1]), (torch.float32, 1))
        dx_M, d_weights_M = layout.unpack(ctx.plan.combine(layout.pack([d_rows, d_weights])))
        positions = ctx.plan.slot_positions()
        dx = ops.add_slots(dx_M, positions).to(x_dtype)
        # The position -1, of a row that was not sent, is that of the zero at the end.
        d_weights = F.pad(d_weights_M.reshape(-1), (0, 1)).take(positions.long())
        return None, None, dx, d_weights.to(weights_dtype), None


class Combine(torch.autograd.Function):
    """Combines the experts' results, and sums the rows of each token: (A, D) -> (T, D).

    Arguments: the plan; the cast of the gradient, and the GradientCodes to fill with it, or None
    twice; the results, sorted by expert; pairs and places of that order, among the rows that
    arrived; and the base of the sums or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: ExchangePlan,
        cast: OperandCast | None,
        gradient: torch.ScriptObject | None,
        rows: Tensor,
        pairs: Tensor,
        places: Tensor,
        base: Tensor | None,
    ) -> Tensor:
        ctx.plan, ctx.cast, ctx.gradient, ctx.shape = plan, cast, gradient, rows.shape
        ctx.save_for_backward(pairs)
        layout = RowLayout((rows.dtype, rows.shape[1]))
        returned = plan.combine(layout.pack([rows], places.reshape(-1), [1]))
        return ops.add_slots(layout.unpack(returned)[0], plan.slot_positions(), base)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Dispatches the gradient of each token's sum to the experts that added to it."""
        d_base = grads[0].float() if ctx.needs_input_grad[6] else None
        if not ctx.needs_input_grad[3]:
            return None, None, None, None, None, None, d_base
        g, (pairs,) = grads[0].contiguous(), ctx.saved_tensors
        rows, _ = dispatch_rows(ctx.plan, g, ctx.cast)
        if ctx.cast is None:
            g_A = rows[0].index_select(0, pairs)
        else:
            ctx.gradient.set(rows)
            g_A = g.new_zeros(()).expand(ctx.shape)
        return None, None, None, g_A, None, None, d_base


def run_on_ranks(
    plan: ExchangePlan,
    casts: tuple[OperandCast | None, OperandCast | None],
    products: Products,
    x: Tensor,
    weights_Tk: Tensor,
    tokens: Operand | None,
    base: Callable[[], Tensor | None],
) -> Tensor:
    """Dispatches rows to their experts, computes them there, and combines the results, (T, D).

    Args:
        plan: of the exchange.
        casts: of x and of the gradient; None: that operand travels as values.
        products: of this rank's experts.
        x: (T, D), of the tokens.
        weights_Tk: (T, k), routing weights.
        tokens: x as codes, where x is quantized already.
        base: returns float32 (T, D), to which the results are added, or None: zeros. It is called
            last, when the ranks are known to have the same layer.
    """
    of_x, of_g = casts
    values, weights_A, ids_A, local_A, *codes = Dispatch.apply(plan, of_x, x, weights_Tk, tokens)
    order = order_rows(local_A[:, None] - 1, products.matrices[-1].shape[0], ids_A)
    gradient = None if of_g is None else torch.classes.minifloat.GradientCodes()
    rows = products.run(
        values, weights_A, order, sums=False, x_codes=codes or None, gradient=gradient
    )
    return Combine.apply(plan, of_g, gradient, rows, order.pairs, order.places, base())
