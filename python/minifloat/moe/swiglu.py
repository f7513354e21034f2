"""SwiGLU between an expert's products, with the routing weight as its last factor.

    h = silu(gate) · up · weight                                         limit is None
    h = a · sigmoid(alpha · a) · (u + 1) · weight                        limit: gpt-oss
        a = min(gate, limit)        u = clamp(up, -limit, limit)

All in fp32; h and the gradients are rounded once, to the dtype of gate and up. The weight
multiplies h, so that the rows of y = h · w2 are not needed in backward.

Shape suffixes: M rows, I width of the hidden layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._native import ops
from ..recipe import Recipe
from ..spec import Spec

ALPHA = 1.702  # of gpt-oss


@dataclass(frozen=True)
class Gate:
    """The form of SwiGLU.

    Args:
        limit: bound of gate and up; None: no bound, and up is not moved by one.
        alpha: factor within the sigmoid, where there is a limit.
        is_interleaved: whether gate and up alternate along the columns of a fused product; else
            gate comes first.
    """

    limit: float | None = None
    alpha: float = ALPHA
    is_interleaved: bool = False

    def forward(
        self,
        products: list[Tensor],
        weights: Tensor,
        pairs_M: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> Tensor:
        """Returns h (M, I).

        Args:
            products: one fused product (M, 2I), or gate and up, (M, I) each.
            weights: float32, M numbers.
            pairs_M: int32, the number of each row's weight; None: its position.
            groups: the table of groups, past which h is zero.
        """
        product, other = pair_of(products)
        return ops.swiglu(product, other, weights, **self._options(pairs_M, groups))

    def quantize(
        self,
        products: list[Tensor],
        weights: Tensor,
        pairs_M: Tensor | None,
        groups: Tensor,
        cast: dict[str, Any],
        *,
        rowwise: bool = False,
        columnwise: bool = False,
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Returns h (M, I), and its operands in the directions that are needed.

        Where operands are returned, h is a tensor of its shape alone. They are None where the
        product reads h itself.

        Args:
            products, weights, pairs_M, groups: as those of forward.
            cast: the recipe and the state of the product that reads h.
        """
        recipe = Recipe(cast["recipe"])
        specs = [*[recipe.fprop.a] * rowwise, *[recipe.wgrad.b] * columnwise]
        for spec in map(Spec.parse, specs):
            if spec.is_bf16 or spec.block[0] > 1:  # the product refuses 2D blocks
                return self.forward(products, weights, pairs_M, groups), None
        product, other = pair_of(products)
        operands = ops.swiglu_operands.default(
            product,
            other,
            weights,
            rowwise=rowwise,
            columnwise=columnwise,
            **self._options(pairs_M, groups),
            **cast,
        )
        width = product.shape[1] // (1 if other is not None else 2)
        return product.new_empty(1, 1).expand(product.shape[0], width), operands

    def backward(
        self,
        dh_MI: Tensor,
        products: list[Tensor],
        weights: Tensor,
        pairs_M: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor]:
        """Returns the gradients of the products, and of the weights in the weights' shape."""
        product, other = pair_of(products)
        options = self._options(pairs_M, groups)
        *d_products, d_weights = ops.swiglu_backward(dh_MI, product, other, weights, **options)
        return d_products[: len(products)], d_weights

    def _options(self, pairs_M: Tensor | None, groups: Tensor | None) -> dict[str, Any]:
        return {
            "limit": self.limit,
            "alpha": self.alpha,
            "interleaved": self.is_interleaved,
            "pairs": pairs_M,
            "groups": groups,
        }


def pair_of(products: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Returns one fused product and None, or two products."""
    return products[0], products[1] if len(products) == 2 else None


class SwiGlu(torch.autograd.Function):
    """Gate.forward, with Gate.backward as its gradient."""

    @staticmethod
    def forward(
        gate: Gate,
        weights: Tensor,
        pairs: Tensor | None,
        groups: Tensor | None,
        *products: Tensor,
    ) -> Tensor:
        return gate.forward(list(products), weights, pairs, groups)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.gate = inputs[0]
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights, pairs, groups, *products = ctx.saved_tensors
        d_products, d_weights = ctx.gate.backward(grads[0], products, weights, pairs, groups)
        return None, d_weights, None, None, *d_products


def swiglu(
    gate: Gate,
    weights: Tensor,
    products: list[Tensor],
    pairs_M: Tensor | None = None,
    groups: Tensor | None = None,
) -> Tensor:
    """Returns h (M, I), differentiably, from the arguments of Gate.forward."""
    if not torch.is_grad_enabled():  # where torch.compile does not find SwiGlu.forward
        return gate.forward(products, weights, pairs_M, groups)
    return SwiGlu.apply(gate, weights, pairs_M, groups, *products)
