"""What a converted module's own forward would read, compared before each forward.

A conversion that replaces code stands for it under the settings that it had: its sizes, factors,
activation, config, globals, closures, defaults, and the code itself. They are recorded
(nn/convert/reads.py), and a later change of one of them raises an error.

The forward is not run: what it could read is found by the names in its code
(nn/convert/foreign_code.py). A module or function of torch, NumPy or Python's library is one value:
nothing within it is recorded.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ...nn.convert.foreign_code import (
    CONTAINERS,
    PLAIN,
    Code,
    code_of,
    codes_in,
    handles_exceptions,
    is_followed,
    is_watched,
    parts_of,
    reason_unwatched,
)
from ...nn.convert.reads import (
    MISSING,
    NO_HOOKS,
    Reads,
    Record,
    differs,
    first_change,
    name_of,
    snapshot,
    text_of,
)
from .implementations import GATE, class_of

SETTINGS = "_settings"  # attribute of a converted module
ACTIVATION = "act_fn"  # a child that the conversion calls as the module's own forward does
# The mode, and which of several implementations of one computation runs.
NOT_SETTINGS = {"training", "forward", "__class__", "use_grouped_mm"}
# Functions that torchtitan replaces by compiled ones, of the same code, after a conversion.
COMPILED_IN_PLACE = {"_run_experts_for_loop", "_run_experts_grouped_mm"}
DEPTH = 4  # of attributes within attributes
WHOLE = (*PLAIN, Tensor, FunctionType, BuiltinFunctionType)  # nothing within them is recorded


class Names(NamedTuple):
    """Names in code: those that could be of attributes, and those that may have no attribute.

    The latter are texts, which getattr and hasattr take, or all names where the code has an except.
    """

    read: tuple[str, ...]
    absent: frozenset[str]


def read_settings(module: nn.Module, *replaced: Callable[..., object]) -> Reads:
    """Returns what functions of a module's class read.

    Args:
        module: the module, converted or not.
        replaced: the functions.
    """
    return settings_of(module, code_of_functions(module, *replaced)).reads()


def unwatched_setting(module: nn.Module, *replaced: Callable[..., object]) -> str | None:
    """Returns why a later change of what functions read could not be seen; None where it is."""
    code = code_of_functions(module, *replaced)
    return reason_unwatched(code) or settings_of(module, code).unwatched


def code_of_functions(module: nn.Module, *functions: Callable[..., object]) -> Code:
    """Returns what functions of a module's class, before a conversion, reach."""
    return code_of(class_of(module), *functions, attributes=module.__dict__)


def settings_of(module: nn.Module, code: Code) -> Settings:
    """Follows what the code of functions of a module's class reads."""
    cls = class_of(module)
    settings = Settings(module, cls)
    names = settings.note_code(code)
    for name in dir(cls):
        method = inspect.getattr_static(cls, name, None)
        if isinstance(method, FunctionType) and inspect.unwrap(method) in code.functions:
            settings.attribute(cls, name, method)
    settings.note_module(module, cls, names, 0)
    settings.item_of(module, "__dict__", GATE)
    settings.attribute(cls, GATE, getattr(cls, GATE, MISSING))
    return settings


class Settings(Record):
    """Follows the names in code to what they could be of, and records it."""

    def __init__(self, module: nn.Module, cls: type) -> None:
        super().__init__(module, cls, snapshot)
        self.seen: dict[tuple[int, Names | None], object] = {(id(module), None): module}
        self.unwatched: str | None = None  # what the code could read whose changes are not seen

    def leave_out(self, why: str) -> None:
        """Notes the first read whose later changes are not seen."""
        self.unwatched = self.unwatched or why

    def is_new(self, value: object, names: Names | None = None) -> bool:
        """Tells whether a value is seen for the first time, by code with these names."""
        count = len(self.seen)
        self.seen.setdefault((id(value), names), value)
        return len(self.seen) > count

    def note_code(self, code: Code) -> Names:
        """Records functions, their defaults, and the globals and closures that they read."""
        functions = [*filter(is_followed, code.functions)]
        handled = [f for f in functions if any(map(handles_exceptions, codes_in(f.__code__)))]
        found = code.names | code.texts
        names = Names(tuple(sorted(found - NOT_SETTINGS)), found if handled else code.texts)
        for function in functions:
            self.function(function)
            scope = function.__globals__
            values = [
                self.item((scope, None), name, scope.get(name, MISSING))
                for name in globals_of(function)
                if name not in COMPILED_IN_PLACE
            ]
            values += [*self.cells(function), function.__defaults__, function.__kwdefaults__]
            for value in values:
                self.note_parts(value, names, 1)
        return names

    def note_parts(self, whole: Any, names: Names, depth: int) -> None:
        """Records what the code could read of objects: of a value itself, or of a container's."""
        for value in parts_of(whole):
            if value is MISSING:
                continue
            if not is_watched(value):
                self.leave_out(f"reads {type(value).__name__} objects, whose changes are not seen")
            if isinstance(value, WHOLE):
                continue
            if depth > DEPTH:
                self.leave_out(f"reads attributes that are nested deeper than {DEPTH} objects")
                continue
            if isinstance(value, nn.Module):
                self.note_called(value, depth, is_called=False)
            elif not self.is_new(value, names) or type(value) in (dict, partial, *CONTAINERS):
                continue
            elif isinstance(value, MethodType):
                self.note_parts(value.__self__, names, depth)
            elif isinstance(value, (type, ModuleType)):
                if is_followed(value):
                    self.note_attributes(value, names, depth)
            elif is_followed(type(value), {"torch", "numpy", "minifloat"}):
                self.note_attributes(value, names, depth)

    def note_attributes(self, owner: Any, names: Names, depth: int) -> None:
        """Records attributes of a class, a Python module, or an object that is no nn.Module."""
        for name in names.read:
            value = getattr(owner, name, MISSING)
            if value is MISSING and name not in names.absent:
                continue
            if not differs(getattr(owner, name, MISSING), snapshot(value)):
                self.attribute(owner, name, value)
                self.note_parts(value, names, depth + 1)
            elif isinstance(owner, type):  # a classmethod, which each read binds anew
                self.member(owner, name)
            elif is_followed(value if callable(value) else type(value)):
                kind = type(owner).__name__
                self.leave_out(f"reads {name} of a {kind}, which each read makes anew")

    def note_module(self, module: nn.Module, cls: type, names: Names, depth: int) -> None:
        """Records attributes and children of a module, and members of its class."""
        of_class = []
        for name in names.read:
            is_tensor = name in module._parameters or name in module._buffers
            if is_tensor or is_parametrized(module, name):
                continue
            if name in module._modules:
                self.note_child(module, name, depth)
                continue
            owner = next((base for base in cls.__mro__ if name in vars(base)), None)
            own = module.__dict__.get(name, MISSING)
            if owner is None and own is MISSING:
                if name not in names.absent:
                    continue
                for table in ("_parameters", "_buffers", "_modules"):
                    self.item_of(module, table, name)
            if owner is None or is_followed(owner) or own is not MISSING:
                self.item_of(module, "__dict__", name)
                self.note_parts(own, names, depth + 1)
                of_class += [name] if own is MISSING else []
        self.note_attributes(cls, Names(tuple(of_class), frozenset(of_class)), depth)

    def note_child(self, module: nn.Module, name: str, depth: int) -> None:
        """Records a child of a module."""
        child = self.item_of(module, "_modules", name)
        if child is not None and depth < DEPTH:
            self.note_called(child, depth + 1, is_called=name == ACTIVATION)

    def note_called(self, module: nn.Module, depth: int, *, is_called: bool) -> None:
        """Records a module that the code calls.

        Args:
            module: the module.
            depth: of attributes within attributes.
            is_called: whether the conversion calls it too, with its hooks.
        """
        if not self.is_new(module):
            return
        cls = type(module)
        if is_called:
            self.attribute(self.class_of(module), "forward", cls.forward)
        else:
            self.call(module)
        code = code_of(cls, cls.forward, attributes=module.__dict__)
        self.note_module(module, cls, self.note_code(code), depth)


def globals_of(function: FunctionType) -> list[str]:
    """Returns the names of the globals that a function reads."""
    steps = [step for code in codes_in(function.__code__) for step in dis.get_instructions(code)]
    return sorted({step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")})


def key_of(reads: Reads) -> list[object]:
    """Returns what is equal for two modules of one class whose settings are equal.

    It has no module, tensor or other object of a caller's, so that it keeps none in memory.
    """
    return [(name, comparable(value)) for _, name, value in reads.entries()]


def comparable(value: Any) -> object:
    """Returns a plain value, function or class; for other objects their class and parts."""
    if isinstance(value, partial):
        return partial, [comparable(part) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType):
        return MethodType, value.__func__
    if type(value) is dict:
        return dict, [(key, comparable(part)) for key, part in value.items()]
    if type(value) in (list, tuple):
        return type(value), [comparable(part) for part in value]
    is_whole = isinstance(value, (*WHOLE, CodeType, type, property)) or value is MISSING
    return (type(value), value if is_whole and not isinstance(value, Tensor) else None)


def require_settings(module: nn.Module) -> None:
    """Raises RuntimeError where a setting is not what it was at the module's conversion."""
    reads: Reads = module._settings  # type: ignore[assignment]
    change = first_change(reads, module)
    if change is None:
        return
    owner, name, value, got = change
    values = "another value"
    if not torch.compiler.is_compiling():  # in which a value may have no text
        is_hook = name == NO_HOOKS
        values = f"a {got}" if is_hook else f"{text_of(got)} instead of {text_of(value)}"
        name = name_of(owner, name, reads)
    raise RuntimeError(
        f"{type(module).__name__}: expected {name} as at its conversion, got {values}; call "
        "mf.restore_ before such a change, and mf.quantize_ after it"
    )
