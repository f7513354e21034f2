"""The operand of x that the first products of experts read: tokens quantized once for all slots.

    a scale a row or a block    codes of tokens, copied to their rows
    elsewhere                   codes of rows, which the cast reads through an index
    stochastic or delayed       each product quantizes a copy of the rows itself

Shape suffixes: T tokens, M rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._native import ops
from ..nn.operand_cache import can_reuse
from ..recipe import Recipe
from ..spec import Spec
from ..tensor.operands import Operand, Operands
from .permute import Order, take_rows


def group_table(order: Order) -> Tensor:
    """Returns the table of the experts' groups."""
    return ops.group_table(order.offs, order.pairs.shape[0])


def quantized_rows(
    recipes: Sequence[str], x: Tensor, order: Order, groups: Tensor, *, rowwise: bool
) -> tuple[Tensor, list[Tensor] | None]:
    """Returns the rows of x, and their operand in one direction for products of these recipes.

    Where all products can read one operand, x is quantized without a copy of its rows: the rows are
    a tensor of their shape alone. Else they are copied, and the operand is None.
    """
    operands = shared_operands(recipes, x, order, groups, rowwise=rowwise)
    if operands is None:
        return take_rows(x, order), None
    return x.new_empty(1, 1).expand(order.pairs.shape[0], x.shape[1]), operands


def shared_operands(
    recipes: Sequence[str], x: Tensor, order: Order, groups: Tensor, *, rowwise: bool
) -> list[Tensor] | None:
    """Quantizes x once in one direction; None where each product is to do so itself."""
    if len(set(recipes)) > 1:
        return None
    recipe = Recipe(recipes[0])
    spec = Spec.parse(recipe.fprop.a if rowwise else recipe.wgrad.b)
    if not can_reuse(spec.text, allows_delayed=False) or spec.block[0] > 1:  # the op refuses those
        return None
    if rowwise and spec.amax_of != "tensor":
        return token_operands(x, recipe, spec, order)
    return ops.layer_operands.default(
        x,
        recipe.text,
        "x",
        rowwise=rowwise,
        columnwise=not rowwise,
        groups=groups,
        rows_from=order.tokens,
    )


def token_operands(x: Tensor, recipe: Recipe, spec: Spec, order: Order) -> list[Tensor]:
    """Quantizes each token once, and copies its codes to its rows: a row has its own scale."""
    tokens = x.shape[0]
    ends = torch.full((1,), tokens, dtype=torch.int32, device=x.device)
    found = ops.layer_operands.default(
        x,
        recipe.text,
        "x",
        rowwise=True,
        columnwise=False,
        groups=ops.group_table(ends, tokens),
    )
    row, none = Operands.of(found)
    codes, scale, amax, decoded = row
    if row.is_decoded:  # an exact product reads these values, and no codes
        decoded = take_rows(decoded, order)
    else:
        codes = take_rows(codes, order)
    scale = take_rows(scale, order)
    if spec.amax_of == "row":
        amax = take_rows(amax, order)
    return Operands(Operand(codes, scale, amax, decoded), none).tensors()
