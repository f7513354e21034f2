"""Stand-ins of what a traced forward can reach besides tensors.

A View has a value, which the forward never sees: reading an attribute gives a View of its value, or
a constant, and is recorded. Calling one runs a copy of its function on stand-ins, or is a step of
the graph (nn/fuse/symbols.py); everything else is refused by its name in the code. The Run that a
View belongs to does all that (nn/fuse/run.py).
"""

from __future__ import annotations

import builtins
import dis
import functools
import types
from typing import Any, NamedTuple, Protocol

import torch

from ..convert.foreign_code import codes_in
from ..convert.reads import MISSING, Record
from .symbols import Named, kind_of, refuse, refuse_operators, text_of

CONSTANTS = (int, float, complex, bool, str, bytes, type(None), type(...), slice, torch.dtype)
BUILTINS: dict[str, Any] = {  # without an effect
    function.__name__: function
    for function in (
        *(abs, all, any, bool, dict, enumerate, float, getattr, hasattr, int, iter, len, list, map),
        *(max, min, next, range, reversed, set, sorted, str, tuple, zip),
    )
}


class Runner(Protocol):
    """The run that Views belong to, as Run implements it (nn/fuse/run.py)."""

    record: Record

    def wrap(self, value: Any, text: str) -> Any: ...
    def attribute(self, value: Any, name: str, path: str) -> Any: ...
    def call(self, value: Any, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...
    def special(self, view: View, name: str, *args: Any) -> Any: ...
    def is_instance(self, value: Any, classes: Any) -> bool: ...
    def super_of(self, cls: Any = None, module: Any = None) -> View: ...


class Super(NamedTuple):
    """super(cls, module)."""

    cls: type
    module: object


class Unknown:
    """The value of a View that a forward can pass on, and not call or read: some method."""

    def __eq__(self, other: object) -> bool:
        raise NotImplementedError

    __hash__ = object.__hash__


@refuse_operators
class View(Named):
    """A stand-in of any object but a tensor that the forward computes."""

    __slots__ = ("run", "value")

    def __init__(self, run: Runner, value: Any, text: str) -> None:
        for name, field in (("run", run), ("value", value), ("text", text)):
            object.__setattr__(self, name, field)

    def __getattribute__(self, name: str) -> Any:
        return run_of(self).attribute(value_of(self), name, joined(text_of(self), name))

    def __setattr__(self, name: str, value: object) -> None:
        refuse(f"writes {joined(text_of(self), name)}")

    def __delattr__(self, name: str) -> None:
        refuse(f"writes {joined(text_of(self), name)}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_of(self).call(value_of(self), text_of(self), args, kwargs)

    def __iter__(self) -> Any:
        return run_of(self).special(self, "__iter__")

    def __len__(self) -> Any:
        return run_of(self).special(self, "__len__")

    def __getitem__(self, key: Any) -> Any:
        return run_of(self).special(self, "__getitem__", key)

    def __bool__(self) -> bool:
        record, value = run_of(self).record, value_of(self)
        cls = record.class_of(value)
        if {record.member(cls, name) for name in ("__bool__", "__len__")} != {MISSING}:
            refuse(f"branches on {text_of(self)}")
        return True

    def __eq__(self, other: object) -> bool:
        record = run_of(self).record
        for view in (self, other):
            cls = record.class_of(value_of(view))
            is_plain = type(view) is not View or record.member(cls, "__eq__") is object.__eq__
            if kind_of(view) is not None or not is_plain:
                refuse(f"compares {text_of(view)}")
        return self is other  # one view a value

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # refuse_operators refuses it


def value_of(view: Any) -> Any:
    """Returns what a View stands for; other values are their own."""
    return object.__getattribute__(view, "value") if type(view) is View else view


def run_of(view: View) -> Runner:
    """Returns the run that a View belongs to."""
    found: Runner = object.__getattribute__(view, "run")
    return found


def joined(text: str, name: str) -> str:
    """Returns an attribute's name in the code, without `self`."""
    return name if text == "self" else f"{text}.{name}"


class Globals(dict[str, Any]):
    """The globals of a function's copy: stand-ins of the function's own, made as they are read."""

    def __init__(self, run: Runner, real: dict[str, Any]) -> None:
        def importer(name: str, *_: Any) -> None:
            refuse(f"imports {name}")

        opcodes = {"__import__": importer, "__build_class__": lambda *_: refuse("defines a class")}
        super().__init__(__builtins__=opcodes)
        self.run, self.real = run, real

    def __missing__(self, name: str) -> Any:
        record, found = self.run.record, self.real.get(name, MISSING)
        record.item((self.real, None), name, found)
        if found is not MISSING:
            return self.run.wrap(found, name)
        value = getattr(builtins, name, MISSING)
        if value is not MISSING:
            record.attribute(builtins, name, value)
        if name == "super":
            return self.run.super_of
        if name == "isinstance":
            return self.run.is_instance
        if name in BUILTINS:
            return BUILTINS[name]
        if value is MISSING:
            raise KeyError(name)
        return value if is_error(value) else self.run.wrap(value, name)


def is_error(value: object) -> bool:
    """Tells whether a builtin is an exception, which a forward may raise."""
    return isinstance(value, type) and issubclass(value, BaseException)


def is_a(value: object, classes: type | tuple[type, ...]) -> bool:
    """isinstance without a read of value.__class__, which foreign code may compute."""
    return issubclass(type(value), classes)


def found_in(cls: type, name: str) -> Any:
    """Returns a class's member as its own __dict__, or one of its bases', has it."""
    return next((c.__dict__[name] for c in cls.__mro__ if name in c.__dict__), MISSING)


def name_of(function: Any) -> str:
    """Returns a callable's name."""
    return str(getattr(function, "__name__", type(function).__name__))


@functools.cache
def handles_exceptions(code: types.CodeType) -> bool:
    """Tells whether code has an except or finally, which could hide that a run was refused."""
    names = [instruction.opname for instruction in dis.get_instructions(code)]
    handlers = names.count("PUSH_EXC_INFO") - names.count("WITH_EXCEPT_START")
    return handlers > 0 or "SETUP_FINALLY" in names  # of Python 3.10


@functools.cache
def reason_against(code: types.CodeType) -> str | None:
    """Returns why a run of a function's code would not show what the function does, or None.

    A stand-in is another object than its value, so `is` has to compare with a constant. Nothing
    that outlives a call may be written, by inner functions and generators too: they may run later.
    """
    for part in codes_in(code):
        if handles_exceptions(part):
            return "handles exceptions"
        before = None
        for step in dis.get_instructions(part):
            kind, name = step.opname, step.argval
            if kind in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                return f"writes the global {name}"
            if kind in ("STORE_DEREF", "DELETE_DEREF") and name in code.co_freevars:
                return f"writes {name} of an enclosing function"
            if kind in ("MATCH_CLASS", "MATCH_MAPPING", "MATCH_SEQUENCE"):
                return "matches a pattern"
            if kind == "IS_OP" and (step.is_jump_target or not is_singleton(before)):
                return "compares objects by `is`"
            before = step
    return None


def is_singleton(step: dis.Instruction | None) -> bool:
    """Tells whether an instruction loads a constant that is one object, such as None."""
    if step is None or not step.opname.startswith("LOAD_CONST"):
        return False
    return any(step.argval is value for value in (None, True, False, ...))
