"""What a converted module's own forward would read, compared before each forward.

A conversion that replaces code stands for it under the settings that it had: its sizes, factors,
activation, config, globals, closures, defaults, and the code itself. They are recorded,
and a later change of one of them raises an error. Compiled code has guards
on them, and compares again where one has changed.

Attributes are found by the names in the code of the forward (nn/convert/foreign_code.py). A module
or function of torch, NumPy or Python's library is one value: nothing within it is recorded.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ...nn.convert.foreign_code import (
    CONTAINERS,
    NOT_FOLLOWED,
    PLAIN,
    Code,
    code_of,
    codes_in,
    is_filled,
    is_followed,
    parts_of,
)
from ...nn.convert.reads import MISSING, has_hooks, hook_of
from ...nn.fuse.views import handles_exceptions
from .same_forward import class_of, foreign_implementation

SETTINGS = "_settings"  # attribute of a converted module
IMPLEMENTATION = "_experts_implementation"  # of transformers, in the config
ACTIVATION = "act_fn"  # a child that the conversion calls as the module's own forward does
GATE = "_apply_gate"  # a method that the conversion calls in place of act_fn
CONVERSION = (GATE, "alpha", "is_concatenated", "limit")  # what it reads of any module
# The mode, and which of several implementations of one computation runs.
NOT_SETTINGS = {"training", "forward", "__class__", "__dict__", "use_grouped_mm", IMPLEMENTATION}
DEPTH = 4  # of attributes within attributes
WHOLE = (*PLAIN, Tensor, FunctionType, BuiltinFunctionType)  # nothing within them is recorded
# Classes of values that are equal where == says so.
CONSTANTS = (bool, int, float, complex, str, bytes, torch.device, set, frozenset)


class Reads(NamedTuple):
    """Entries of one module, by identity; constants and containers of them by value.

    Args:
        own: (name, value) of the module's __dict__. It has no place, which would be a cycle.
        children: (name, module) of its submodules.
        entries: (dict, key, value): of submodules and of globals.
        attributes: (object, name, value): of classes, Python modules, functions and objects.
        called: submodules that the forward calls and the conversion does not.
    """

    own: tuple[tuple[str, Any], ...] = ()
    children: tuple[tuple[str, Any], ...] = ()
    entries: tuple[tuple[Any, str, Any], ...] = ()
    attributes: tuple[tuple[Any, str, Any], ...] = ()
    called: tuple[nn.Module, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copy of the module reads other objects


NOTHING = Reads()


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
    cls, settings = class_of(module), Settings(module)
    code = code_of(cls, *replaced, attributes=module.__dict__)
    names = settings.note_code(code)
    for name in dir(cls):
        method = inspect.getattr_static(cls, name, None)
        if isinstance(method, FunctionType) and inspect.unwrap(method) in code.functions:
            settings.note("attributes", cls, name, method)
    settings.note_module(module, cls, names, 0)
    for name in CONVERSION:
        settings.note_instance(module, name, module.__dict__.get(name, MISSING))
    settings.note("attributes", cls, GATE, getattr(cls, GATE, MISSING))
    config = getattr(module, "config", None)
    if (chosen := getattr(config, IMPLEMENTATION, MISSING)) is not MISSING:
        settings.note("attributes", config, IMPLEMENTATION, chosen)  # the last one
    return settings.reads()


class Settings:
    """Records what the code of a module reads. What is recorded first under a name stays."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.seen = module, {id(module)}
        self.called: dict[int, nn.Module] = {}
        kinds = ("own", "children", "entries", "attributes")
        self.noted: dict[str, dict[tuple[int, str], tuple[Any, str, Any]]] = {k: {} for k in kinds}

    def reads(self) -> Reads:
        """Returns what is recorded."""
        rows = {kind: tuple(noted.values()) for kind, noted in self.noted.items()}
        own, children = (tuple(row[1:] for row in rows[kind]) for kind in ("own", "children"))
        called = tuple(self.called.values())
        return Reads(own, children, rows["entries"], rows["attributes"], called)

    def note(self, kind: str, where: Any, name: str, value: Any) -> None:
        """Records an entry."""
        self.noted[kind].setdefault((id(where), name), (where, name, value))

    def note_instance(self, module: nn.Module, name: str, value: Any) -> None:
        """Records a value of a module's __dict__, MISSING where it has none."""
        if module is self.module:
            self.note("own", None, name, value)
        else:
            self.note("entries", module.__dict__, name, value)

    def note_code(self, code: Code) -> Names:
        """Records functions, their defaults, and the globals and closures that they read."""
        functions = [*filter(is_followed, code.functions)]
        handled = [f for f in functions if any(map(handles_exceptions, codes_in(f.__code__)))]
        found = code.names | code.texts
        names = Names(tuple(sorted(found - NOT_SETTINGS)), found if handled else code.texts)
        for function in functions:
            for name in ("__code__", "__defaults__", "__kwdefaults__"):
                self.note_value("attributes", function, name, getattr(function, name), names)
            for name in globals_of(function):
                value = function.__globals__.get(name, MISSING)
                self.note_value("entries", function.__globals__, name, value, names)
            for cell in filter(is_filled, function.__closure__ or ()):
                self.note_value("attributes", cell, "cell_contents", cell.cell_contents, names)
        return names

    def note_value(
        self, kind: str, where: Any, name: str, value: Any, names: Names, depth: int = 0
    ) -> None:
        """Records a value, and what the code could read of it and of its items by names."""
        self.note(kind, where, name, snapshot(value))
        self.note_parts(value, names, depth + 1)

    def note_parts(self, whole: Any, names: Names, depth: int) -> None:
        """Records what the code could read of objects: of a value itself, or of a container's."""
        for value in parts_of(whole):
            if isinstance(value, WHOLE) or value is MISSING or depth > DEPTH:
                continue
            if id(value) in self.seen:
                continue
            self.seen.add(id(value))
            if isinstance(value, MethodType):
                self.note_parts(value.__self__, names, depth)
            elif isinstance(value, nn.Module):
                self.note_called(value, depth, is_called=False)
            elif isinstance(value, (type, ModuleType)):
                if is_own(value, NOT_FOLLOWED):
                    self.note_attributes(value, names, depth)
            elif type(value) in (dict, partial, *CONTAINERS):
                continue
            elif is_own(type(value), {"torch", "numpy", "minifloat"}):
                self.note_attributes(value, names, depth)

    def note_attributes(self, owner: Any, names: Names, depth: int) -> None:
        """Records attributes of a class, a Python module, or an object that is no nn.Module."""
        for name in names.read:
            value = getattr(owner, name, MISSING)
            if value is MISSING and name not in names.absent:
                continue
            if not differs(getattr(owner, name, MISSING), snapshot(value)):
                self.note_value("attributes", owner, name, value, names, depth)
            elif isinstance(owner, type):  # a classmethod, which each read binds anew
                cls = next(base for base in owner.__mro__ if name in vars(base))
                self.note("entries", vars(cls), name, vars(cls)[name])

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
                for table in (module._parameters, module._buffers):
                    self.note("entries", table, name, MISSING)
                self.note_child(module, name, depth)
            if owner is None or is_followed(owner) or own is not MISSING:
                self.note_instance(module, name, snapshot(own))
                self.note_parts(own, names, depth + 1)
                of_class += [name] if own is MISSING else []
        self.note_attributes(cls, Names(tuple(of_class), frozenset(of_class)), depth)

    def note_child(self, module: nn.Module, name: str, depth: int) -> None:
        """Records a child of a module, or that there is none."""
        child: Any = module._modules.get(name, MISSING)
        if module is self.module:
            self.note("children", None, name, child)
        else:
            self.note("entries", module._modules, name, child)
        if isinstance(child, nn.Module) and id(child) not in self.seen and depth < DEPTH:
            self.seen.add(id(child))
            self.note_called(child, depth + 1, is_called=name == ACTIVATION)

    def note_called(self, module: nn.Module, depth: int, *, is_called: bool) -> None:
        """Records a module that the code calls.

        Args:
            module: the module.
            depth: of attributes within attributes.
            is_called: whether the conversion calls it too, with its hooks.
        """
        cls = type(module)
        self.note("attributes", module, "__class__", cls)
        self.note("attributes", cls, "forward", cls.forward)
        if not is_called:
            self.called[id(module)] = module
            self.note_instance(module, "forward", module.__dict__.get("forward", MISSING))
        code = code_of(cls, cls.forward, attributes=module.__dict__)
        self.note_module(module, cls, self.note_code(code), depth)


def is_own(value: type | ModuleType, others: set[str]) -> bool:
    """Tells whether a class or a Python module is of none of the packages `others`."""
    name = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return name.partition(".")[0] not in others


def globals_of(function: FunctionType) -> list[str]:
    """Returns the names of the globals that a function reads."""
    steps = [step for code in codes_in(function.__code__) for step in dis.get_instructions(code)]
    return sorted({step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")})


def key_of(reads: Reads) -> list[object]:
    """Returns what is equal for two modules of one class whose settings are equal.

    It has no module, tensor or other object of a caller's, so that it keeps none in memory.
    """
    rows = [*reads.children, *reads.own, *(row[1:] for row in (*reads.entries, *reads.attributes))]
    return [(name, comparable(value)) for name, value in rows]


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


# ---- comparison ----------------------------------------------------------------------------------


def snapshot(value: Any) -> Any:
    """Returns a container or functools.partial that no later write changes; else the value."""
    kind = type(value)
    if kind is partial:
        return partial(value.func, *snapshot(value.args), **snapshot(value.keywords))
    if kind is dict:
        return {key: snapshot(item) for key, item in value.items()}
    if kind in (set, frozenset):
        return kind(value)
    return kind(map(snapshot, value)) if kind in (list, tuple) else value


def differs(got: Any, want: Any) -> bool:
    """Tells whether an entry has another value; containers are compared item by item."""
    kind = type(want)
    if got is want or type(got) is not kind:
        return got is not want
    if kind is partial:  # which has no identity in compiled code
        parts = (got.func, want.func), (got.args, want.args), (got.keywords, want.keywords)
        return any([differs(*pair) for pair in parts])
    if kind in (list, tuple):
        return len(got) != len(want) or any([differs(*pair) for pair in zip(got, want)])
    if kind is dict:
        return got.keys() != want.keys() or any([differs(got[key], want[key]) for key in want])
    return bool(got != want) if kind in CONSTANTS else True


def first_change(reads: Reads, module: nn.Module) -> tuple[Any, Any, Any, Any] | None:
    """Returns the first entry that has another value: (where, name, value, value now).

    `where` is None for an entry of the module itself. Each forward asks, eager or compiled.
    """
    own, modules = module.__dict__, module._modules
    for name, child in reads.children:
        if (now := modules.get(name, MISSING)) is not child:
            return None, name, child, now
    for name, value in reads.own:
        if (got := own.get(name, MISSING)) is not value and differs(got, value):
            return None, name, value, got
    for where, name, value in reads.entries:
        if (got := where.get(name, MISSING)) is not value and differs(got, value):
            return where, name, value, got
    for where, name, value in reads.attributes:
        if (got := getattr(where, name, MISSING)) is not value and differs(got, value):
            return where, name, value, got
    return None


def require_settings(module: nn.Module) -> None:
    """Raises RuntimeError where a setting is not what it was at the module's conversion."""
    reads: Reads = module._settings  # type: ignore[assignment]
    change = first_change(reads, module)
    if change is None and not any([has_hooks(called) for called in reads.called]):
        return
    is_choice = change is not None and change[1] == IMPLEMENTATION
    if is_choice and foreign_implementation(change[3]) is None:  # type: ignore[index]
        return
    if torch.compiler.is_compiling():  # in which a value may have no text
        name, values = change[1] if change else "no hooks", "another value"
    elif change is None:
        part = next(called for called in reads.called if has_hooks(called))
        name, values = f"no hooks of {place_of(part, reads)}", f"a {hook_of(part)}"
    else:
        where, name, value, found = change
        name = name_of(where, name, reads)
        values = f"{text_of(found)} instead of {text_of(value)}"
    raise RuntimeError(
        f"{type(module).__name__}: expected {name} as at its conversion, got {values}; call "
        "mf.restore_ before such a change, and mf.quantize_ after it"
    )


def name_of(where: object, name: str, reads: Reads) -> str:
    """Returns an entry's name, such as config.scale or package.module.ALPHA."""
    if isinstance(where, CellType):
        for function in (f for f, _, _ in reads.attributes if isinstance(f, FunctionType)):
            for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                if cell is where:
                    return f"{variable} of {text_of(function)}"
    place = place_of(where, reads)
    return f"{place}.{name}" if place else name


def place_of(where: Any, reads: Reads) -> str:
    """Returns where an entry is: the name of a module, class or function, or an entry's own name.

    An entry of the converted module itself has an empty place.
    """
    if isinstance(where, (type, FunctionType)):
        return text_of(where)
    if isinstance(where, ModuleType):
        return where.__name__
    if isinstance(where, dict) and "__name__" in where:
        return str(where["__name__"])
    rows = [(None, *row) for row in (*reads.children, *reads.own)]
    for place, name, value in (*rows, *reads.entries, *reads.attributes):
        of_value = [value, *(getattr(value, part, None) for part in ("__dict__", "_modules"))]
        if where is not None and any(part is where for part in of_value):
            return name_of(place, name, reads)
    return ""


def text_of(value: object) -> str:
    """Returns a setting as an error names it."""
    if value is MISSING:
        return "none"
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{value}"
