"""The operands of a quantized weight, which products read in place of a cast."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..recipe import Recipe
from .operands import Operand, Operands
from .quantized import raw_scale


def codes_of(
    weight: Any,  # a QuantizedTensor: a chain of imports has at most ten levels
    recipe: Recipe,
    columnwise: bool,
    is_row_major: bool = False,
) -> list[Tensor]:
    """Returns the codes of a quantized weight as the op layer_operands would.

    Args:
        weight: (…, N, K), or (…, K, N) where it is row-major.
        recipe: of the products: fprop reads W (N, K) rowwise, dgrad columnwise.
        columnwise: whether dgrad reads the weight.
        is_row_major: whether `weight` is Wᵀ.

    Returns:
        The eight tensors of the op layer_operands.

    Raises:
        ValueError: the weight does not hold these codes.
    """
    none = Operand.none(weight.device)

    def operand(spec: str, is_col: bool) -> Operand:
        if spec == "bf16" or (is_col and not columnwise):
            return none
        part = weight.direction(spec, is_col != is_row_major)
        return Operand(part.codes, raw_scale(part), part.amax, none.decoded)

    row, col = operand(recipe.fprop.b, False), operand(recipe.dgrad.b, True)
    return Operands(row, col).tensors()
