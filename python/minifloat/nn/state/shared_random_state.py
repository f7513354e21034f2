"""The random state that all stochastic layers of one converted model share."""

from __future__ import annotations

from torch import nn

from ..names import clean_name, unwrapped
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


def require_own_streams(name: str, model: nn.Module) -> None:
    """Raises ValueError where two parts of a model draw the same random bits.

    Parts that were converted one by one do so under equal seeds, where they have layers of equal
    names. A part that is in evaluation, or frozen, is left out.

    Args:
        name: of the caller.
        model: it holds the parts.
    """
    hooks = [(fqn, m, find_hook(m)) for fqn, m in unwrapped(model).named_modules()]
    roots = [(fqn, module, hook.state) for fqn, module, hook in hooks if hook is not None]
    if len(roots) < 2:
        return
    owners: dict[tuple[int, int, int], tuple[str, RngState]] = {}
    for fqn, root, state in roots:
        if not (root.training and any(p.requires_grad for p in root.parameters())):
            continue
        for layer in root.modules():
            if not isinstance(layer, RecipeState) or layer.rng_state is not state:
                continue
            key = state.seed, state.rank, layer.stream_id
            other, of_other = owners.setdefault(key, (fqn, state))
            if of_other is not state:
                raise ValueError(
                    f"{name}: expected layers with random bits of their own, but "
                    f"{clean_name(fqn)!r} and {clean_name(other)!r} were converted with one seed, "
                    f"{state.seed}, and both have a layer {layer.fqn!r}; pass each its own seed, "
                    "or call mf.quantize_ once, on a module that holds both"
                )
