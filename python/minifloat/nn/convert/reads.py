"""What a forward has read, so that a later call can tell whether it would read the same again.

A trace (nn/fuse/trace.py) shows what a forward computes with the settings, submodules, functions
and globals of that moment. `Reads` lists what the forward read, and what it looked for and did not
find. `is_unchanged` compares the list with what is there now, so it does not matter who made a
change. One change is not seen: another dict that is assigned to an object's __dict__.

Values are compared by identity. Numbers, texts and tuples are also equal where their class and
value are the same: True is not 1, and 0.0 is not -0.0.

The list must not refer to the traced module, which keeps it: only Python's collector of cycles
would free the parameters then. So None stands for the module, and a dict of the module itself is
recorded by its name: "__dict__" or "_modules". A submodule's dicts are recorded by name too, since
others may take their place, but for __dict__: torch.compile has no guard of `part.__dict__`, only
of the dict itself.

torch.compile traces `is_unchanged` too: its comparisons become guards of the compiled code.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, NamedTuple

from torch import nn

from ..state.random_state import AdvanceRng
from .fast_paths import prevent_fast_path

MISSING = object()  # the value of a name that nothing has
CONSTANTS = (bool, int, float, str)  # classes of settings that are compared by value
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Reads(NamedTuple):
    """What the forward of one module has read.

    Args:
        dicts: (owner, name, items, absent): the dict that is the attribute `name` of an object, or
            of the module itself where the owner is None. Where `name` is None, the owner is a dict:
            of a class, or globals. `items` are its (key, value) that were read, `absent` the keys
            that were looked for and not found.
        attributes: (object, name, value): of classes, Python modules, partials and cells.
        functions: (function, __code__, __defaults__, __kwdefaults__) of those that ran.
        keys: (owner, name, keys) of dicts of which all keys were visited.
        called: (module, its class, its __dict__, the forward there or MISSING, the class's forward,
            its __call__) of submodules that the forward calls.
        lacking: (object, or None for the module itself, name) that hasattr denies.
    """

    dicts: tuple[tuple[Any, str | None, tuple[tuple[Any, Any], ...], tuple[Any, ...]], ...] = ()
    attributes: tuple[tuple[Any, str, Any], ...] = ()
    functions: tuple[tuple[FunctionType, Any, Any, Any], ...] = ()
    keys: tuple[tuple[Any, str | None, tuple[Any, ...]], ...] = ()
    called: tuple[tuple[nn.Module, type[nn.Module], dict[str, Any], Any, Any, Any], ...] = ()
    lacking: tuple[tuple[Any, str], ...] = ()


NOTHING = Reads()


def differs(got: Any, want: Any) -> bool:
    """Tells whether a value is another one."""
    if got is want:
        return False
    cls = type(want)
    if type(got) is not cls:
        return True
    if cls is tuple:
        return len(got) != len(want) or any([differs(g, w) for g, w in zip(got, want)])
    if cls not in CONSTANTS or got != want:
        return True
    return cls is float and not want and str(got) != str(want)  # the sign of zero


def is_unchanged(reads: Reads, module: nn.Module) -> bool:
    """Tells whether a forward would read the same again, and no hook sees what it calls.

    Each forward of a feed-forward that is one op asks, eager or compiled.
    """
    dicts, attributes, functions, all_keys, called, lacking = reads
    for owner, place, items, absent in dicts:
        where = owner if place is None else getattr(module if owner is None else owner, place)
        for key, value in items:
            if (got := where.get(key, MISSING)) is not value and differs(got, value):
                return False
        for key in absent:
            if key in where:
                return False
    for owner, name, value in attributes:
        if (got := getattr(owner, name, MISSING)) is not value and differs(got, value):
            return False
    for function, code, defaults, kwdefaults in functions:
        if function.__code__ is not code or function.__kwdefaults__ is not kwdefaults:
            return False
        if (got := function.__defaults__) is not defaults and differs(got, defaults):
            return False
    for owner, place, keys in all_keys:
        where = owner if place is None else getattr(module if owner is None else owner, place)
        if tuple(where) != keys:
            return False
    for part, cls, instance, own, forward, call in called:
        if getattr(part, "__class__", None) is not cls or has_hooks(part):
            return False
        if cls.forward is not forward or cls.__call__ is not call:
            return False
        if instance.get("forward", MISSING) is not own:
            return False
    return not any([hasattr(module if owner is None else owner, name) for owner, name in lacking])


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
