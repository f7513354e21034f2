"""The cast of a layer's tokens that routed and shared experts both read.

    tokens (T, D) -> rowwise, columnwise      one cast, of w1 and w3 of the shared experts
                     rowwise -> rows (M, D)   copies, for the products of the routed experts

A token has the same codes in both where its scale is a row's or a block's. Where that does not
hold, and where recipes differ, each quantizes x itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._native import ops
from ..nn.cache.operand_cache import SharedInput, conditions_of
from ..nn.grouped_product import product_of
from ..nn.hooks import is_distributed
from ..nn.linear import Linear
from ..tensor.operands import Operand, Operands


@dataclass(frozen=True)
class TokenCast:
    """The cast that shared experts read.

    Args:
        shared: the cache of the operands, which the shared experts' first layers read.
        recipe: text of the recipe of all layers and products.
        columnwise: whether a backward pass of the shared experts reads x.
    """

    shared: SharedInput
    recipe: str
    columnwise: bool

    def rowwise(self, x_TD: Tensor) -> Operand | None:
        """Quantizes the tokens for all readers; None where each is to do so itself."""
        found = self.shared.cast_first(x_TD, self.recipe, self.columnwise, conditions_of(x_TD))
        return None if found is None else Operands.of(found).rowwise


def token_cast(experts: Any, layers: Sequence[nn.Module], x_TD: Tensor) -> TokenCast | None:
    """Returns the cast that routed experts share with linear layers; None where there is none.

    Args:
        experts: the routed experts, a layer.Experts.
        layers: the shared experts' layers that read x.
        x_TD: the tokens.
    """
    if torch.compiler.is_compiling() or type(x_TD) is not Tensor or x_TD.is_meta:
        return None
    products = [product_of(experts, name) for name in experts.input_names]
    readers = [layer for layer in layers if isinstance(layer, Linear)]
    if None in products or len(readers) != len(layers):
        return None
    recipes = [module.recipe.text for module in (*products, *readers) if module is not None]
    shared = readers[0].shared_input
    is_one = all(reader.shared_input is shared for reader in readers)
    if shared is None or not is_one or any(is_distributed(r.weight) for r in readers):
        return None
    if len(set(recipes)) > 1 or not ops.reads_token_codes(recipes[0]):
        return None
    columnwise = torch.is_grad_enabled() and any(r.weight.requires_grad for r in readers)
    return TokenCast(shared, recipes[0], columnwise)
