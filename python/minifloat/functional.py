"""Linear layers under a recipe, as functions of tensors.

y = x Wᵀ + bias     three products, forward and backward, each in the formats of the recipe
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
    """y = x · Wᵀ + bias under a recipe, differentiable. x: (…, K), weight: (N, K); fp32 or bf16.

    rng: int64 (seed, count, module stream), needed where the recipe rounds stochastically; backward
    reads it too, so nobody may write to it afterwards. amax_history: float32 (6, 1 + length),
    needed by delayed scaling, one row an operand: column 0 the amax in force, column 1 this step's
    own, written in place. A weight that is a DTensor: see minifloat.distributed.tensor_parallel.
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
        weight_operands=weight_operands(weight, recipe, x),
    )


def recipe_text(recipe: str | Recipe) -> str:
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
    """linear of one x and several weights (q, k, v; gate, up): x is quantized once."""
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
