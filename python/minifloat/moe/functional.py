"""The products of a mixture's experts, from tokens to tokens.

    rows = x[token of each row]                       row_ids decide the random bits
    gate, up = rows · w1ᵀ, rows · w3ᵀ                 one product where w13 is fused
    h = SwiGLU(gate, up) · routing weight
    y[token] = Σ over slots of h · w2ᵀ                in fp32, in the slots' order

Saved for backward: x, once for all slots, gate and up, the weights and the order. Backward reads
the rows of x again, computes h again, and quantizes both columnwise.

Shape suffixes: T tokens, k slots, M = T * k rows, E experts, D model width, I hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..nn.grouped_product import ProductCall
from ..recipe import Recipe
from ..spec import Spec
from ..tensor.operands import Operand
from .permute import (
    NO_ORDER,
    Order,
    add_slots,
    as_expert,
    rows_of_tokens,
    sum_of_slots,
    take_rows,
)
from .row_operands import group_table, quantized_rows
from .swiglu import Gate, swiglu


@dataclass(frozen=True)
class Plan:
    """How the products of experts are computed: everything besides tensors of values.

    Args:
        gate: the form of SwiGLU.
        inputs: the product of w13, or those of w1 and w3.
        output: the product of w2.
        tokens: x as the products of w13 read it, where x is quantized already.
    """

    gate: Gate
    inputs: tuple[ProductCall, ...]
    output: ProductCall
    tokens: Operand | None = None


@dataclass(frozen=True)
class Matrices:
    """The experts' matrices as products read them, B (E, K, N), and their biases (E, N).

    Args:
        inputs: of w13, or of w1 and w3.
        biases: as many, or None each.
        output: of w2.
    """

    inputs: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    output: Tensor


class NoSecondDerivative(torch.autograd.Function):
    """The identity of a gradient. Its backward raises: a function of codes has no derivative."""

    @staticmethod
    def forward(gradient: Tensor, recipe: str, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.recipe = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError(
            "grouped_mlp: expected no second derivative through a quantized product (recipe "
            f"{ctx.recipe}), got one: the backward pass of minifloat's layers is not "
            "differentiable. Leave the layers that a double backward passes through in high "
            "precision, by filter_fqns or a recipe map"
        )


class ExpertRows(torch.autograd.Function):
    """The rows y (M, D) of all experts. Arguments: plan, x, weights, the order, the matrices."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, x: Tensor, weights: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        order, matrices = unpack(plan, tensors)
        groups, recipes = group_table(order), [call.recipe for call in plan.inputs]
        rows, operands = quantized_rows(recipes, x, order, groups, rowwise=True, tokens=plan.tokens)
        products = [
            call.multiply(rows, b, order.offs, order.row_ids, bias, operands, tail="undefined")
            for call, b, bias in zip(plan.inputs, matrices.inputs, matrices.biases)
        ]
        cast = plan.output.cast_options(order.row_ids)
        h, operands = plan.gate.quantize(
            products, weights.float(), order.pairs, groups, cast, rowwise=True
        )
        ctx.plan = replace(plan, tokens=None)  # backward does not read the codes
        ctx.save_for_backward(x, weights, *tensors, *products)
        return plan.output.multiply(
            h, matrices.output, order.offs, order.row_ids, a_operands=operands
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint refuses to unpack them again
        with torch.no_grad():
            found = ExpertRows.first_derivatives(ctx, saved, grads[0])
        return ExpertRows.without_second(ctx, saved, grads, found)

    @staticmethod
    def without_second(
        ctx: Any, saved: tuple[Any, ...], grads: tuple[Tensor, ...], found: tuple[Any, ...]
    ) -> Any:
        """Returns gradients whose derivative raises, where autograd asks for one."""
        if not torch.is_grad_enabled():
            return found
        sources = [t for t in (grads[0], *saved) if t is not None and t.requires_grad]
        recipe = ctx.plan.output.recipe
        return tuple(
            None if t is None else NoSecondDerivative.apply(t, recipe, *sources) for t in found
        )

    @staticmethod
    def first_derivatives(
        ctx: Any, saved: tuple[Any, ...], g: Tensor, of_tokens: bool = False
    ) -> tuple[Tensor | None, ...]:
        """Returns the gradients of plan, x, weights, the order and the matrices.

        Args:
            saved: the saved tensors.
            g: (M, D), the gradient of rows, or (T, D).
            of_tokens: whether g is the gradient of the sums of tokens' rows.
        """
        plan, count = ctx.plan, len(ctx.plan.inputs)
        x, weights, *rest = saved
        order, matrices = unpack(plan, rest[:-count])
        where = rest[-count:], weights.float(), order.pairs, group_table(order)
        needs_x, needs_weights = ctx.needs_input_grad[1:3]
        needs = ctx.needs_input_grad[3 + len(order) :][: 2 * count + 1]
        needs_h = needs_x or needs_weights or any(needs[:-1])

        g, from_tokens = rows_of_gradient(plan, g, order) if of_tokens else (g, None)
        cast = plan.output.cast_options(order.row_ids)
        h, operands = plan.gate.quantize(*where, cast, columnwise=needs[-1])
        dh, d_output, _ = plan.output.gradients(
            g,
            h,
            matrices.output,
            *order[2:],
            None,
            (needs_h, needs[-1], False),
            operands,
            tail="undefined",
            rows_from_M=from_tokens,
        )
        del h, operands
        if dh is None:
            return (None, None, None, *NO_ORDER, *[None] * (2 * count), d_output)
        d_products, d_weights = plan.gate.backward(dh, *where)
        del dh
        recipes = [call.recipe for call in plan.inputs]
        rows, operands = quantized_rows(recipes, x, order, where[-1], rowwise=False)
        d_rows, d_matrices = gradients_of_inputs(
            plan, d_products, rows, operands, order, matrices, (needs_x, *needs)
        )
        dx = None if d_rows is None else add_slots(d_rows, order)
        return None, dx, d_weights.to(weights.dtype), *NO_ORDER, *d_matrices, d_output


class ExpertTokens(ExpertRows):
    """The sums (T, D) of tokens' rows. Arguments: those of ExpertRows, and where sums begin."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, x: Tensor, weights: Tensor, *tensors: Tensor | None
    ) -> Tensor:
        *tensors_of_rows, base = tensors
        rows = ExpertRows.forward(ctx, plan, x, weights, *tensors_of_rows)
        return add_slots(rows, unpack(plan, tensors_of_rows)[0], base)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            found = ExpertRows.first_derivatives(ctx, saved, grads[0], of_tokens=True)
            d_base = grads[0].float() if ctx.needs_input_grad[-1] else None
        return ExpertRows.without_second(ctx, saved, grads, (*found, d_base))


def gradients_of_inputs(
    plan: Plan,
    d_products: Sequence[Tensor],
    rows: Tensor,
    operands: list[Tensor] | None,
    order: Order,
    matrices: Matrices,
    needs: Sequence[bool],
) -> tuple[Tensor | None, list[Tensor | None]]:
    """Returns the gradient of the rows of x, then those of the matrices and biases of gate and up.

    Args:
        d_products: the gradients of gate and up, or of their fused product.
        rows: x of each row, or a tensor of their shape.
        operands: of rows, columnwise; None: cast by each product.
        needs: which gradients are wanted: of rows, of the matrices, of the biases.
    """
    count, found, d_rows = len(plan.inputs), [], None
    for i, call in enumerate(plan.inputs):
        wanted = needs[0], needs[1 + i], needs[1 + count + i]
        b, bias = matrices.inputs[i], matrices.biases[i]
        d_row, *d_matrix = call.gradients(
            d_products[i], rows, b, *order[2:], bias, wanted, operands
        )
        d_rows = d_row if d_rows is None or d_row is None else d_rows + d_row
        found.append(d_matrix)
    d_inputs, d_biases = zip(*found)
    return d_rows, [*d_inputs, *d_biases]


def rows_of_gradient(plan: Plan, g_TD: Tensor, order: Order) -> tuple[Tensor, Tensor | None]:
    """Returns a gradient of rows, as the tokens' and the token of each row where casts read that.

    A gradient that is not quantized is copied to its rows.
    """
    recipe = Recipe(plan.output.recipe)
    if any(Spec.parse(spec).is_bf16 for spec in (recipe.dgrad.a, recipe.wgrad.a)):
        return take_rows(g_TD, order), None
    return g_TD, order.tokens


def unpack(plan: Plan, tensors: Sequence[Any]) -> tuple[Order, Matrices]:
    """Returns the order and the matrices of ExpertRows' last arguments."""
    order, rest, count = Order(*tensors[:4]), tensors[4:], len(plan.inputs)
    return order, Matrices(tuple(rest[:count]), tuple(rest[count : 2 * count]), rest[-1])


def compose(
    plan: Plan, x_TD: Tensor, weights_Tk: Tensor, order: Order, matrices: Matrices
) -> Tensor:
    """Computes ExpertRows as differentiable ops: what compiled code runs."""
    rows = rows_of_tokens(x_TD, order)
    products = [
        call.multiply(rows, b, order.offs, order.row_ids, bias)
        for call, b, bias in zip(plan.inputs, matrices.inputs, matrices.biases)
    ]
    h = swiglu(plan.gate, weights_Tk.float(), products, order.pairs, group_table(order))
    return plan.output.multiply(h, matrices.output, order.offs, order.row_ids)


def run_experts(
    plan: Plan,
    x_TD: Tensor,
    indices_Tk: Tensor,
    weights_Tk: Tensor,
    order: Order,
    matrices: Matrices,
    output_bias_ED: Tensor | None = None,
) -> Tensor:
    """Computes each token's weighted sum of its experts, (T, D) in x's dtype."""
    base = None
    if output_bias_ED is not None:
        base = weighted_biases(indices_Tk, weights_Tk, output_bias_ED)
    if torch.compiler.is_compiling():
        return sum_of_slots(compose(plan, x_TD, weights_Tk, order, matrices), order, base)
    tensors = *order, *matrices.inputs, *matrices.biases, matrices.output
    return ExpertTokens.apply(plan, x_TD, weights_Tk, *tensors, base)


def weighted_biases(indices_Tk: Tensor, weights_Tk: Tensor, bias_ED: Tensor) -> Tensor:
    """Returns the sum over slots of weight times bias, float32 (T, D), as one product.

    A row's bias is not part of h · w2, because the routing weight multiplies it too.
    """
    experts = bias_ED.shape[0]
    kind = "cpu" if bias_ED.is_meta else bias_ED.device.type  # torch knows no autocast of meta
    with torch.autocast(kind, enabled=False):
        # One more column, of slots without an expert.
        shape = indices_Tk.shape[0], experts + 1
        zeros = torch.zeros(shape, dtype=torch.float32, device=bias_ED.device)
        chosen_Tk = as_expert(indices_Tk.long(), experts)
        dense_TE = zeros.scatter_add(1, chosen_Tk, weights_Tk.float())
        return dense_TE[:, :experts] @ bias_ED.float()


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of products with x: autocast's, or its own."""
    kind = x.device.type
    is_cast = not x.is_meta and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_cast else x.dtype
