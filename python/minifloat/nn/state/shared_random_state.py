"""The random state that all stochastic layers of one converted model share."""

from __future__ import annotations

from torch import nn

from .random_state import (
    RngState,
    add_hooks,
    distributed_rank,
    find_hook,
    remove_hooks,
)
from .recipe_state import RecipeState, draw_from


def share_random_state(
    root: nn.Module, layers: list[RecipeState], seed: int, data_parallel_rank: int | None
) -> None:
    """Gives one RngState, and the hooks that advance it, to the layers with stochastic rounding."""
    stochastic = [m for m in layers if m.recipe.is_stochastic]
    if not stochastic:
        return
    state = state_of(root)
    if state is None:
        if (unused := find_hook(root)) is not None:
            for module in root.modules():
                remove_hooks(module, unused.state)
        state = RngState(seed, data_parallel_rank)
    add_hooks(root, state, stochastic)
    for layer in stochastic:
        draw_from(layer, state)


def state_of(root: nn.Module) -> RngState | None:
    """Returns the state that layers of the root draw from; None: all were restored, or none is."""
    hook = find_hook(root)
    drawn_from = [m.rng_state for m in root.modules() if isinstance(m, RecipeState)]
    return hook.state if hook is not None and hook.state in drawn_from else None


def require_same_random_state(root: nn.Module, seed: int, data_parallel_rank: int | None) -> None:
    """Checks that seed and rank equal those of an earlier mf.quantize_ of the same root."""
    state = state_of(root)
    if state is None:
        return
    rank = distributed_rank() if data_parallel_rank is None else data_parallel_rank
    for name, present, value in (
        ("seed", state.seed, seed),
        ("data_parallel_rank", state.rank, rank),
    ):
        if value != present:
            raise ValueError(
                f"{name}: expected {present}, which this model's converted layers draw their "
                f"random bits with, got {value}"
            )
