"""The operand of x that the first products of experts read: tokens quantized once for all slots.

    a scale a row or a block    codes of tokens, copied to their rows
    elsewhere                   codes of rows, which the cast reads through an index
    stochastic or delayed       each product quantizes a copy of the rows itself

Shape suffixes: T tokens, M rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .._native import ops
from ..nn.cache.operand_conditions import can_reuse
from ..recipe import Recipe
from ..spec import Spec
from ..tensor.operands import Operand, Operands
from .permute import Order, take_rows


def group_table(order: Order) -> Tensor:
    """Returns the table of the experts' groups."""
    return ops.group_table(order.offs, order.pairs.shape[0])


def quantized_rows(
    recipes: Sequence[str],
    x: Tensor,
    order: Order,
    groups: Tensor,
    *,
    rowwise: bool,
    tokens: Operand | None = None,
) -> tuple[Tensor, list[Tensor] | None]:
    """Returns the rows of x, and their operand in one direction for products of these recipes.

    Where all products can read one operand, x is quantized without a copy of its rows: the rows are
    a tensor of their shape alone. Else they are copied, and the operand is None.

    Args: those of shared_operands.
    """
    operands = shared_operands(recipes, x, order, groups, rowwise=rowwise, tokens=tokens)
    if operands is None:
        return take_rows(x, order), None
    return x.new_empty(1, 1).expand(order.pairs.shape[0], x.shape[1]), operands


def shared_operands(
    recipes: Sequence[str],
    x: Tensor,
    order: Order,
    groups: Tensor,
    *,
    rowwise: bool,
    tokens: Operand | None = None,
) -> list[Tensor] | None:
    """Quantizes x once in one direction; None where each product is to do so itself.

    Args:
        recipes: the text of each product's.
        x: (T, D).
        order: of the rows.
        groups: the table of the experts' groups.
        rowwise: the direction; else columnwise.
        tokens: the rowwise operand of x, where it is quantized already.
    """
    spec = shared_spec(recipes, rowwise)
    if spec is None:
        return None
    if rowwise and spec.amax_of != "tensor":
        return token_operands(x, recipes[0], spec, order, tokens)
    return ops.layer_operands.default(
        x,
        recipes[0],
        "x",
        rowwise=rowwise,
        columnwise=not rowwise,
        groups=groups,
        rows_from=order.tokens,
    )


def shared_spec(recipes: Sequence[str], rowwise: bool) -> Spec | None:
    """Returns the spec of x in one direction; None where products cannot read one operand."""
    if len(set(recipes)) > 1:
        return None
    recipe = Recipe(recipes[0])
    spec = Spec.parse(recipe.fprop.a if rowwise else recipe.wgrad.b)
    if not can_reuse(spec.text, allows_delayed=False) or spec.block[0] > 1:  # the op refuses those
        return None
    return spec


def spec_of_tokens(recipes: Sequence[str]) -> Spec | None:
    """Returns the spec of x rowwise; None where a token's codes depend on other rows."""
    spec = shared_spec(recipes, rowwise=True)
    return None if spec is None or spec.amax_of == "tensor" else spec


def token_operands(
    x: Tensor, recipe: str, spec: Spec, order: Order, tokens: Operand | None = None
) -> list[Tensor]:
    """Quantizes each token once, and copies its codes to its rows: a row has its own scale.

    Args:
        x, order: as those of shared_operands.
        recipe: its text.
        spec: of the tokens.
        tokens: those of mf.Linear, where they are quantized already; None: they are quantized here.
    """
    row = None if tokens is None else as_experts_read(tokens, x, recipe, spec)
    if row is None:
        row = cast_of_tokens(x, recipe)
    codes, scale, amax, decoded = row
    if row.is_decoded:  # an exact product reads these values, and no codes
        decoded = take_rows(decoded, order)
    else:
        codes = take_rows(codes, order)
    scale = take_rows(scale, order)
    if spec.amax_of == "row":
        amax = take_rows(amax, order)
    return Operands(Operand(codes, scale, amax, decoded), Operand.none(x.device)).tensors()


def cast_of_tokens(x: Tensor, recipe: str) -> Operand:
    """Quantizes tokens rowwise, in the form that products of experts read."""
    count = x.shape[0]
    ends = torch.full((1,), count, dtype=torch.int32, device=x.device)
    groups = ops.group_table(ends, count)
    found = ops.layer_operands.default(x, recipe, "x", columnwise=False, groups=groups)
    return Operands.of(found).rowwise


def as_experts_read(tokens: Operand, x: Tensor, recipe: str, spec: Spec) -> Operand | None:
    """Returns the operand of a linear layer as products of experts read it; None: they cannot.

    The engine of experts may multiply values where that of the linear layer multiplies codes.
    Values alone have no codes.
    """
    if tokens.is_decoded == reads_values(recipe, x.device):
        return tokens
    if not tokens.has_codes:
        return None
    return tokens._replace(decoded=ops.decode(tokens.codes, tokens.scale, spec.text, x.shape[1]))


@lru_cache(maxsize=64)
def reads_values(recipe: str, device: torch.device) -> bool:
    """Tells whether products of experts read values of x: whether a cast of no tokens has any."""
    no_tokens = torch.empty(0, 128, dtype=torch.bfloat16, device=device)
    return cast_of_tokens(no_tokens, recipe).is_decoded
