"""What a traced forward has read, to be compared with what there is at a later call.

A trace (nn/fuse/trace.py) holds for the values that the forward read then: settings, submodules,
functions, globals. Each is an entry (where, name, value). Values are compared by identity, numbers
and texts also by ==. So a setting that changes later is noticed, whatever changed it.

The module that is traced has entries without a place, by name alone: they would refer to the module
that keeps them, and only Python's collector of cycles would free its parameters then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from ..state.random_state import AdvanceRng
from .fast_paths import prevent_fast_path

MISSING = object()  # the value of a name that nothing has
CONSTANTS = (bool, int, float, str)  # classes of settings that are compared by ==
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Reads(NamedTuple):
    """Entries of one module's trace.

    Args:
        own: (name, value) of the module's __dict__.
        children: (name, module) of its submodules, without the linear layers.
        entries: (dict, key, value): of submodules and of globals.
        attributes: (object, name, value): of classes, Python modules and functions.
        keys: (dict of submodules, or None for the module's own, its keys) where all were visited.
        called: the modules among them that the forward calls.
    """

    own: tuple[tuple[str, Any], ...] = ()
    children: tuple[tuple[str, Any], ...] = ()
    entries: tuple[tuple[dict[Any, Any], Any, Any], ...] = ()
    attributes: tuple[tuple[Any, str, Any], ...] = ()
    keys: tuple[tuple[dict[str, Any] | None, tuple[str, ...]], ...] = ()
    called: tuple[nn.Module, ...] = ()


NOTHING = Reads()


def differs(got: Any, want: Any) -> bool:
    """Tells whether an entry has another value."""
    return got is not want and not (type(want) in CONSTANTS and got == want)


def is_unchanged(reads: Reads, module: nn.Module) -> bool:
    """Tells whether a forward would read the same again, and no hook sees what it calls.

    Each forward of a feed-forward that is one op asks, eager or compiled.
    """
    own, modules = module.__dict__, module._modules
    for name, child in reads.children:
        if modules.get(name) is not child:
            return False
    for name, value in reads.own:
        if (got := own.get(name, MISSING)) is not value and differs(got, value):
            return False
    for where, name, value in reads.entries:
        if (got := where.get(name, MISSING)) is not value and differs(got, value):
            return False
    for where, name, value in reads.attributes:
        if (got := getattr(where, name, MISSING)) is not value and differs(got, value):
            return False
    for children, keys in reads.keys:
        if tuple(modules if children is None else children) != keys:
            return False
    return not any([has_hooks(called) for called in reads.called])


def has_hooks(module: nn.Module) -> bool:
    """Tells whether hooks of others than this package see the module's input or output."""
    if not (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return False
    return hook_of(module) is not None


def hook_of(module: nn.Module) -> str | None:
    """Returns the kind of a module's first hook that is not this package's: "forward_pre_hook"."""
    for name in HOOKS:
        for hook in getattr(module, name).values():
            owner = getattr(hook, "__self__", hook)
            if hook is not prevent_fast_path and not isinstance(owner, AdvanceRng):
                return name.strip("_").removesuffix("s")
    return None
