"""The products of a mixture's experts, from tokens to tokens: the call of the op grouped_mlp.

Shape suffixes: T tokens, k slots, M = T * k rows, E experts, D model width, I hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._native import ops
from ..nn.grouped_product import ProductCall, Sharding
from ..tensor.operands import Operand
from .permute import Order, as_expert
from .swiglu import Gate


@dataclass(frozen=True)
class Plan:
    """How the products of experts are computed: everything besides tensors of values.

    Args:
        gate: the form of SwiGLU.
        inputs: the product of w13, or those of w1 and w3.
        output: the product of w2.
        tokens: x as the products of w13 read it, where x is quantized already.
        sharding: the ranks that cut the matrices along I; None: they are whole.
    """

    gate: Gate
    inputs: tuple[ProductCall, ...]
    output: ProductCall
    tokens: Operand | None = None
    sharding: Sharding | None = None


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


def compute(
    plan: Plan,
    x: Tensor,
    weights: Tensor,
    order: Order,
    matrices: Matrices,
    *,
    base_TD: Tensor | None = None,
    sums: bool = True,
    codes: Sequence[Tensor] = (),
    gradient: torch.ScriptObject | None = None,
) -> Tensor:
    """Computes the experts of rows, differentiably.

    Args:
        x: (T, D), float32 or bfloat16.
        weights: (T, k), of the slots.
        order: of the rows.
        base_TD: float32, which the rows of each token are added to.
        sums: whether the rows of each token are summed.
        codes: codes, scale and amax of x, which then gives its shape, dtype and device alone.
        gradient: an empty torch.classes.minifloat.GradientCodes, which CombineCodes fills in
            backward, before this op reads it; None: the gradient of rows has values.

    Returns:
        (T, D), or the rows (M, D), in x's dtype.
    """
    calls = *plan.inputs, plan.output
    none = [x.new_empty(0)] * 8
    operands = [t for call in calls for t in call.operands or none]
    tokens = plan.tokens
    sharding = {} if plan.sharding is None else plan.sharding._asdict()
    return ops.grouped_mlp(
        x,
        weights,
        list(order),
        [*matrices.inputs, matrices.output],
        list(matrices.biases),
        [call.recipe for call in calls],
        base=base_TD,
        sums=sums,
        **plan.gate.options(),
        rng=[call.rng for call in calls],
        first_expert=max(call.first_expert for call in calls),  # 0 of one without a recipe
        amax_history=[call.history for call in calls],
        streams=[call.stream for call in calls],
        x_operands=None if tokens is None else [*tokens, *Operand.none(x.device)],
        weight_operands=operands,
        recompute=[call.recompute for call in calls],
        x_codes=list(codes) or None,
        gradient=gradient,
        **sharding,
    )


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
    return compute(plan, x_TD, weights_Tk, order, matrices, base_TD=base)


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
