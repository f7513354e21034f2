"""Linear layers under a recipe, as functions of tensors.

y = x Wᵀ + bias     three products, one forward and two backward, in the formats of the recipe
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ._native import ops
from .checks import require_text
from .nn.distributed_hooks import hooks, is_distributed
from .recipe import Recipe
from .tensor.quantized_tensor import weight_operands


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    recipe: str | Recipe = "mxfp8",
    *,
    rng: Tensor | None = None,
    amax_history: Tensor | None = None,
) -> Tensor:
    """Computes y = x · Wᵀ + bias under a recipe, differentiably.

    Args:
        x: (…, K), float32 or bfloat16.
        weight: (N, K), float32 or bfloat16, also a mf.QuantizedTensor. A DTensor is computed as
            minifloat.distributed.tensor_parallel describes.
        bias: (N), float32 or bfloat16.
        recipe: the formats of the three products.
        rng: int64 (seed, forward count, module stream), required by stochastic rounding. Backward
            reads the tensor too, so it must not be written to before.
        amax_history: float32 (6, 1 + length), required by delayed scaling, a row an operand.
            Column 0 is the active amax. The current amax is written to column 1, in place.

    Returns:
        y (…, N), in x's dtype or autocast's.

    Raises:
        TypeError, ValueError: an argument is not as expected.

    Source: docs/numerics.md, sections 1 (casts) and 9 (products).
    """
    if is_distributed(weight):
        recipe = recipe if isinstance(recipe, Recipe) else Recipe(recipe)
        return hooks().linear(x, weight, bias, recipe, rng=rng, amax_history=amax_history)
    return ops.linear(
        x,
        weight,
        bias,
        recipe_text(recipe),
        rng=rng,
        amax_history=amax_history,
        weight_operands=weight_operands(weight, recipe, x, amax_history),
    )


def recipe_text(recipe: str | Recipe) -> str:
    """Returns the text of a recipe."""
    return recipe.text if isinstance(recipe, Recipe) else require_text("recipe", recipe)


def linear_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    recipe: str | Recipe = "mxfp8",
    *,
    rng: Sequence[Tensor] | None = None,
    amax_history: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Computes mf.linear of one x and several weights, and quantizes x once.

    Args:
        x: (…, K), float32 or bfloat16.
        weights: each (N_i, K), as those of q, k, v or of gate, up.
        biases: each (N_i) or None; None: no bias at all.
        recipe: the formats of the products.
        rng: one tensor a weight, as mf.linear's.
        amax_history: one tensor a weight, as mf.linear's.

    Returns:
        y_i (…, N_i) of each weight.

    Raises:
        TypeError, ValueError: an argument is not as expected.
    """
    biases = [None] * len(weights) if biases is None else list(biases)
    rng = None if rng is None else list(rng)
    amax_history = None if amax_history is None else list(amax_history)
    if any(is_distributed(weight) for weight in weights):
        none = [None] * len(weights)
        layers = zip(weights, biases, rng or none, amax_history or none)
        return [linear(x, w, b, recipe, rng=r, amax_history=h) for w, b, r, h in layers]
    return ops.linear_group(
        x, list(weights), biases, recipe_text(recipe), rng=rng, amax_history=amax_history
    )
