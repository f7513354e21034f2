"""Layers that would draw the same random bits: mf.step refuses a model that has two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from torch import nn

from ..names import clean_name, join
from .random_hooks import find_hook
from .random_state import RngState
from .recipe_state import RecipeState


def shared_streams(modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    """Returns mf.step's error where two layers of a model draw the same random bits; else None.

    modules: (name, module) of the model.

    Layers that were converted part by part do so under equal seeds, where they have equal names,
    and so do copies of a layer. Left out are parts in evaluation, frozen ones, and all but one of
    the copies that PEFT makes of a module, of which one runs.
    """
    modules = list(modules)
    idle = {each for _, module in modules for each in idle_copies(module)}
    hooks = [(fqn, module, find_hook(module)) for fqn, module in modules]
    parts = [(fqn, module, hook.state) for fqn, module, hook in hooks if hook is not None]
    of_hooks = {state for *_, state in parts}
    for fqn, layer in modules:  # a copy of a part of a converted model has no hook of a root
        if isinstance(layer, RecipeState) and layer.rng_state not in (None, *of_hooks):
            parts.append((fqn, layer, cast(RngState, layer.rng_state)))
    owners: dict[tuple[int, int, int], tuple[str, RngState]] = {}
    for fqn, part, state in parts:
        if not part.training or not any(p.requires_grad for p in part.parameters()):
            continue
        for name, layer in part.named_modules():
            if not isinstance(layer, RecipeState) or layer.rng_state is not state or layer in idle:
                continue
            key, name = (state.seed, state.rank, layer.stream_id), join(fqn, name)
            other, of_other = owners.setdefault(key, (name, state))
            if of_other is not state:
                return (
                    "step: expected layers with random bits of their own, but "
                    f"{clean_name(name)!r} and {clean_name(other)!r} draw those of {layer.fqn!r} "
                    f"under seed {state.seed}; pass each part its own seed, or name, or call "
                    "mf.quantize_ once, on a module that holds both, after layers are copied"
                )
    return None


def idle_copies(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the layers of PEFT's modules_to_save beside those of its first adapter."""
    # FSDP2 makes subclasses.
    if any(kind.__name__ == "ModulesToSaveWrapper" for kind in type(module).__mro__):
        copies = cast(nn.ModuleDict, module.modules_to_save)
        for copy in (cast(nn.Module, module.original_module), *[*copies.values()][1:]):
            yield from copy.modules()
