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

    def split(self, products: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns gate and up of one fused product or of two."""
        if len(products) == 2:
            return products[0], products[1]
        if self.is_interleaved:
            return products[0][:, ::2], products[0][:, 1::2]
        gate, up = products[0].chunk(2, dim=1)
        return gate, up

    def join(self, gate: Tensor, up: Tensor, parts: int) -> list[Tensor]:
        """Returns gate and up as the products that split reads."""
        if parts == 2:
            return [gate, up]
        if self.is_interleaved:
            return [torch.stack([gate, up], dim=2).flatten(1)]
        return [torch.cat([gate, up], dim=1)]

    def factors(self, gate_MI: Tensor, up_MI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns h's two factors without the weight, and the first one's derivative: fp32."""
        a, u = gate_MI.float(), up_MI.float()
        if self.limit is None:
            sigmoid = a.sigmoid()
            return a * sigmoid, u, sigmoid * (1 + a * (1 - sigmoid))
        a = a.clamp(max=self.limit)
        sigmoid = (a * self.alpha).sigmoid()
        derivative = sigmoid * (1 + self.alpha * a * (1 - sigmoid))
        return a * sigmoid, u.clamp(-self.limit, self.limit) + 1, derivative

    def forward(self, products: list[Tensor], weights_M: Tensor) -> Tensor:
        """Returns h (M, I). weights_M: float32."""
        gate, up = self.split(products)
        first, second, _ = self.factors(gate, up)
        return (first * second * weights_M[:, None]).to(gate.dtype)

    def backward(
        self, dh_MI: Tensor, products: list[Tensor], weights_M: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """Returns the gradients of the products and of the weights, float32 (M)."""
        gate, up = self.split(products)
        first, second, derivative = self.factors(gate, up)
        dh = dh_MI.float()
        d_weights = (dh * first * second).sum(1)
        dh = dh * weights_M[:, None]
        d_gate, d_up = dh * second * derivative, dh * first
        if self.limit is not None:
            d_gate = d_gate.masked_fill(gate > self.limit, 0)
            d_up = d_up.masked_fill(up.abs() > self.limit, 0)
        dtype = gate.dtype
        return self.join(d_gate.to(dtype), d_up.to(dtype), len(products)), d_weights


class SwiGlu(torch.autograd.Function):
    """Gate.forward, with Gate.backward as its gradient."""

    @staticmethod
    def forward(gate: Gate, weights_M: Tensor, product: Tensor, other: Tensor | None) -> Tensor:
        products = [product] if other is None else [product, other]
        return gate.forward(products, weights_M)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.gate = inputs[0]
        ctx.save_for_backward(*[t for t in inputs[1:] if t is not None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        weights, *products = ctx.saved_tensors
        d_products, d_weights = ctx.gate.backward(grads[0], products, weights)
        return None, d_weights, *d_products, *[None] * (2 - len(products))


def swiglu(gate: Gate, weights_M: Tensor, products: list[Tensor]) -> Tensor:
    """Returns h (M, I) of one fused product or of two, differentiably."""
    return SwiGlu.apply(gate, weights_M, products[0], products[1] if len(products) == 2 else None)
