"""Linear layers under a recipe, as functions of tensors.

y = x Wᵀ + bias     three products, one forward and two backward, in the formats of the recipe
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._native import ops
from .checks import require_text
from .nn.linear_state import needs_gradient, weight_operands
from .nn.registry import distributed_functions, is_distributed
from .recipe import Recipe

__all__ = ["linear", "linear_group", "scaled_grouped_mm"]


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
        rng: int64 (seed, forward count[, module stream]), required by stochastic rounding. Backward
            reads the tensor too, so it must not be written to before.
        amax_history: float32 (6, 1 + length), required by delayed scaling, a row an operand.
            Column 0 is the active amax. The current amax is written to column 1, in place.

    Returns:
        y (…, N), in x's dtype or autocast's.

    Raises:
        TypeError, ValueError: an argument is not as expected.

    Source: docs/numerics.md, sections 1 (casts) and 9 (products).

    Example:
        >>> x, weight = torch.ones(2, 64), torch.full((1, 64), 0.3)  # 0.3125 in E4M3
        >>> mf.linear(x, weight, recipe="mxfp8")
        tensor([[20.],
                [20.]])
    """
    if is_distributed(weight):
        recipe = recipe if isinstance(recipe, Recipe) else Recipe(recipe)
        return distributed_functions.linear(
            x, weight, bias, recipe, rng=rng, amax_history=amax_history
        )
    return ops.linear(
        x,
        weight,
        bias,
        recipe_text(recipe),
        rng=rng,
        amax_history=amax_history,
        weight_operands=weight_operands(weight, recipe, needs_gradient(x), amax_history),
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

    Example:
        >>> wq, wk = torch.ones(64, 64), torch.ones(32, 64)
        >>> q, k = mf.functional.linear_group(torch.ones(2, 64), [wq, wk], recipe="mxfp8")
        >>> q.shape, k.shape
        (torch.Size([2, 64]), torch.Size([2, 32]))
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


def scaled_grouped_mm(
    A: Tensor,
    B: Tensor,
    offs: Tensor,
    recipe: str | Recipe = "mxfp8",
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    bias: Tensor | None = None,
    rng: Tensor | None = None,
    row_ids: Tensor | None = None,
    first_expert: int = 0,
    amax_history: Tensor | None = None,
    tail: str = "zero",
) -> Tensor:
    """Computes A_e · B_e for the rows A_e of each expert e, differentiable in A, B and bias.

    Groups of rows need no alignment and may be empty. No pass waits for the device, except where
    the recipe leaves float32 operands of a product in high precision.

    Args:
        A: (M, K), float32 or bfloat16: rows in the order of their experts.
        B: (E, K, N): w.transpose(-2, -1) of w (E, N, K), or row-major. Neither is copied, except
            where 16x16 blocks have `+4over6`, and both give the same bytes.
        offs: int32 (E), on A's device: the end of each expert's rows. Ends that fall, are negative
            or exceed M are moved to the nearest legal end.
        recipe: the formats of the three products. x and g take no spec with 2D blocks.
        out_dtype: of y, bfloat16 or float32.
        bias: (E, N).
        rng: int64 (seed, forward count[, module stream]), on A's device, required by stochastic
            rounding. Backward reads the tensor too, so it must not be written to before.
        row_ids: int32 (M), rows of the random counter of x and g rowwise; None: 0, 1, ….
        first_expert: the number of B's first matrix among the experts of all ranks.
        amax_history: float32 (6, E, 1 + length), of delayed scaling: column 0 is the active amax,
            column 1 the current amax of this step, which is written.
        tail: "zero": rows of y and of A's gradient past the last end are zero; "undefined": they
            are not written.

    Returns:
        y (M, N) in `out_dtype`.

    Raises:
        TypeError, ValueError: an argument is not as expected.

    Source: docs/numerics.md, sections 1 (casts), 9 (products) and 10 (groups).

    Example:
        >>> A, B = torch.ones(5, 32), torch.stack([torch.full((32, 1), n) for n in (1.0, 2.0, 3.0)])
        >>> offs = torch.tensor([2, 2, 5], dtype=torch.int32)  # the second expert has no rows
        >>> mf.functional.scaled_grouped_mm(A, B, offs, "mxfp8").flatten()
        tensor([32., 32., 96., 96., 96.], dtype=torch.bfloat16)
    """
    return ops.scaled_grouped_mm(
        A,
        B,
        offs,
        recipe_text(recipe),
        out_dtype=out_dtype,
        bias=bias,
        rng=rng,
        row_ids=row_ids,
        first_expert=first_expert,
        amax_history=amax_history,
        tail=tail,
    )
