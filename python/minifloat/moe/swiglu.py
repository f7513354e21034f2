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
from typing import TypedDict

from torch import Tensor

from .._native import ops

ALPHA = 1.702  # of gpt-oss


class GateOptions(TypedDict):
    """The form of SwiGLU, as ops take it."""

    limit: float | None
    alpha: float
    interleaved: bool


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

    def options(self) -> GateOptions:
        """Returns the form as an op's arguments."""
        return {"limit": self.limit, "alpha": self.alpha, "interleaved": self.is_interleaved}


def swiglu(gate: Gate, weights: Tensor, products: list[Tensor]) -> Tensor:
    """Returns h (M, I), differentiably.

    Args:
        weights: float32, M numbers.
        products: one fused product (M, 2I), or gate and up, (M, I) each.
    """
    product, *other = products
    return ops.swiglu(product, other[0] if other else None, weights, **gate.options())
