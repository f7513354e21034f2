"""Mixtures of experts as plain loops in fp32, and small inputs, for tests of several folders."""

from __future__ import annotations

import minifloat as mf
import torch
from torch import Tensor

ALPHA = 1.702  # of gpt-oss
# Small inputs reach it. It is halfway between two bfloat16 values, so that a value is on the same
# side before and after its rounding.
LIMIT = 1 + 2**-8


def routing(tokens: int, slots: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Draws distinct experts for each token, and weights."""
    generator = torch.Generator().manual_seed(seed)
    scores, indices = torch.rand(tokens, experts, generator=generator).topk(slots, dim=1)
    return indices, scores


def tensors(
    tokens: int, dim: int, hidden: int, experts: int, dtype: torch.dtype, seed: int = 0
) -> dict[str, Tensor]:
    """Draws x, w13, b13, w2 and b2 with gradients."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float) -> Tensor:
        values = torch.randn(shape, generator=generator) * scale
        return values.to(dtype).requires_grad_()

    return {
        "x": draw(tokens, dim, scale=1),
        "w13": draw(experts, 2 * hidden, dim, scale=dim**-0.5),
        "b13": draw(experts, 2 * hidden, scale=0.3),
        "w2": draw(experts, dim, hidden, scale=hidden**-0.5),
        "b2": draw(experts, dim, scale=0.3),
    }


def loop_mlp(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    indices: Tensor,
    weights: Tensor,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    limit: float | None = None,
) -> Tensor:
    """Computes each token's weighted sum of its experts, pair by pair, in fp32 or fp64."""
    out = []
    for token, chosen in enumerate(indices.tolist()):
        total = torch.zeros_like(x[token])
        for slot, e in enumerate(chosen):
            hidden = w13[e] @ x[token] + (0 if b13 is None else b13[e])
            gate, up = hidden.chunk(2)
            if limit is None:
                h = torch.nn.functional.silu(gate) * up
            else:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                h = gate * torch.sigmoid(ALPHA * gate) * (up + 1)
            y = w2[e] @ h + (0 if b2 is None else b2[e])
            total = total + weights[token, slot] * y
        out.append(total)
    return torch.stack(out) if out else x * 1


def state_of(recipe: str, experts: int, products: int = 2) -> dict[str, object]:
    """Returns the random state and histories that mf.grouped_mlp needs under a recipe."""
    parsed = mf.Recipe(recipe)
    state: dict[str, object] = {}
    if parsed.is_stochastic:
        state["rng"] = torch.tensor([3, 5])
    if parsed.is_delayed:
        state["amax_history"] = [torch.full((6, experts, 4), 2.0) for _ in range(products)]
    return state


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Returns the norm of the difference over the norm of what was expected."""
    difference = (found.double() - expected.double()).norm()
    return (difference / expected.double().norm().clamp(min=1e-30)).item()
