"""The hooks that begin a count of random bits with a forward: random_state.py says when."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import torch
from torch import Tensor, nn

from ..names import clean_name, join, unwrapped
from .random_state import (
    GRADIENT_RNG,
    RngState,
    functions_of_training,
    is_capturing,
    is_in_backward,
)
from .recomputation import Draws, eager_alone


class AdvanceRng:
    """Hooks of a module that holds layers, before and after its forward.

    Args:
        state: of these layers.
        home: a layer that the module holds, on whose device the state is.
        is_root: whether the module is the one that mf.quantize_ was called with.
    """

    def __init__(self, state: RngState, home: nn.Module, is_root: bool) -> None:
        self.state = state
        self.home = home
        self.is_root = is_root
        self.draws = Draws()

    @eager_alone
    def device(self) -> torch.device:
        """Returns the device of the state's home, which has no stream where it was restored."""
        stream = self.home.__dict__.get("stream")
        home: Tensor = self.home.weight if stream is None else stream  # type: ignore[assignment]
        return home.device

    @eager_alone
    def before(self, module: nn.Module, args: object) -> None:
        """Begins a count, unless the module runs within a call that did so."""
        state, running = self.state, self.state.running
        is_within = not self.is_root and running.current is not None
        if torch.compiler.is_compiling():
            is_advanced = functions_of_training(module.training) is not None
            if not is_within or (is_advanced and not running.is_advanced):
                state.begin(is_advanced)
            if not is_within:
                running.outermost = self
            return
        if not is_within:
            running.outermost = self
            running.replay = state.replays.find(self.draws) if is_in_backward() else None
        if running.replay is not None:
            current = running.replay.next(self.draws)
            if current is not None:
                running.begin(current, True)
                running.is_captured = is_capturing(current.device)
            return
        device = self.device()
        functions = functions_of_training(module.training, device)
        is_advanced, is_repeated = functions is not None, self.draws in running.drawn
        if not is_within or (is_advanced and (not running.is_advanced or is_repeated)):
            state.begin(is_advanced, device)
        if functions is not None and running.current is not None:
            self.draws.record(running.current, running.thread, functions)
            running.drawn.add(self.draws)

    @eager_alone
    def after(self, module: nn.Module, args: object, output: object) -> None:
        """Ends the forward that `before` began, also where it raised an exception."""
        running = self.state.running
        if running.outermost is self:
            running.close()


def add_hooks(root: nn.Module, state: RngState, layers: Sequence[nn.Module]) -> None:
    """Adds hooks to the root and to all modules between the root and the given layers."""
    drawing = {id(layer) for layer in layers}
    homes: dict[str, nn.Module] = {"": layers[0]}  # of each such module, its first drawing layer
    for name, module in root.named_modules():
        names = name.split(".") if id(module) in drawing else []
        for i in range(1, len(names)):
            homes.setdefault(".".join(names[:i]), module)
    for name, home in homes.items():
        module, is_root = root.get_submodule(name), name == ""
        if not any(hook.state is state and hook.is_root == is_root for hook in hooks_of(module)):
            hook = AdvanceRng(state, home, is_root)
            module.register_forward_pre_hook(hook.before)
            # Compiled code has a guard for the key of a hook after the forward. With the keys of
            # register_forward_hook, which counts them, no two blocks would share a graph.
            key = next(key for key in count(-1, -1) if key not in module._forward_hooks)
            module._forward_hooks[key] = hook.after
            module._forward_hooks_always_called[key] = True  # whatever the forward raises


def hooks_of(module: nn.Module) -> list[AdvanceRng]:
    owners = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    return [owner for owner in owners if isinstance(owner, AdvanceRng)]


def find_hook(module: nn.Module) -> AdvanceRng | None:
    """Finds the hooks of a root; None where the module is no root."""
    return next((hook for hook in hooks_of(module) if hook.is_root), None)


def states_of(model: nn.Module) -> Iterator[tuple[str, RngState]]:
    """Yields the name of each root in the model, and the state that its hook advances.

    Also of each model whose gradients are cast stochastically: its name and `gradients`.
    """
    for fqn, module in unwrapped(model).named_modules():
        hook = find_hook(module)
        if hook is not None:
            yield clean_name(fqn), hook.state
        if GRADIENT_RNG in module.__dict__:
            yield join(clean_name(fqn), "gradients"), module.__dict__[GRADIENT_RNG]


def remove_hooks(module: nn.Module, kept: Sequence[AdvanceRng] = ()) -> None:
    """Removes the hooks that advance a state, except `kept`."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, AdvanceRng) and owner not in kept:
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)
