"""What another library's forward has read, so that a later call can tell whether that has changed.

A conversion stands for such a forward under the settings, submodules, functions and globals of that
moment. `Record` lists them, as a match of its source looks them up (nn/fuse/match.py) or as the
names in the code tell (moe/convert/settings.py). `first_change` compares the list with what is
there now, so it does not matter who made a change. One change is not seen: another dict that is
assigned to an object's __dict__.

Values are compared by identity. Numbers, texts, containers and partials are also equal where their
classes and values are the same: True is not 1, and 0.0 is not -0.0.

The list must not refer to the module, which keeps it: only Python's collector of cycles would free
the parameters then. So None stands for the module, and a dict of the module itself is recorded by
its name: "__dict__" or "_modules". A submodule's dicts are recorded by name too, since others may
take their place, but for __dict__: torch.compile has no guard of `part.__dict__`, only of the dict
itself.

torch.compile traces `first_change` too: its comparisons become guards of the compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from ..state.random_hooks import AdvanceRng
from .fast_paths import prevent_fast_path

MISSING = object()  # the value of a name that nothing has
# Classes of values that are equal where == says so, but for the sign of a zero.
CONSTANTS = (bool, int, float, complex, str, bytes, torch.device, set, frozenset)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
NO_HOOKS = "no hooks"  # an entry's name
OF_FUNCTIONS = ("__code__", "__defaults__", "__kwdefaults__")
IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE, of types whose members nobody can change

Place = tuple[Any, str | None]  # of a dict, as Reads.dicts has it
Entry = tuple[Any, Any, Any]  # (owner, name, value)


class Reads(NamedTuple):
    """What the forward of one module has read. A copy of it is None, since copies read others.

    Args:
        dicts: (owner, name, items, absent): the dict that is the attribute `name` of an object, or
            of the module itself where the owner is None. Where `name` is None, the owner is a dict:
            of a class, or globals. `items` are its (key, value) that were read, `absent` the keys
            that were looked for and not found.
        functions: (function, __code__, __defaults__, __kwdefaults__) of those that ran.
        cells: (function that reads it, its name in an error, its content) of enclosing functions'
            variables. torch.compile can read a cell through a function alone.
        keys: (module, or None for the module itself, names of all its submodules).
        called: (module, class, forward, __call__) of submodules that the forward calls, which have
            no hooks. The latter two are the class's.
        attributes: (object, or None for the module itself, name, value), as getattr returns it.
        mro: MLP and the classes behind it, where the module is an MLP (nn/fuse/mlp.py).
    """

    dicts: tuple[tuple[Any, str | None, tuple[tuple[Any, Any], ...], tuple[Any, ...]], ...] = ()
    functions: tuple[tuple[FunctionType, Any, Any, Any], ...] = ()
    cells: tuple[tuple[FunctionType, str, Any], ...] = ()
    keys: tuple[tuple[Any, tuple[str, ...]], ...] = ()
    called: tuple[tuple[nn.Module, type, Any, Any], ...] = ()
    attributes: tuple[Entry, ...] = ()
    mro: tuple[type, ...] = ()

    def __reduce__(self) -> str | tuple[Any, ...]:
        return (type(None), ()) if any(self) else "NOTHING"

    def entries(self) -> Iterator[Entry]:
        """Yields all that has a value, MISSING where there was none."""
        for owner, _, items, absent in self.dicts:
            yield from ((owner, *item) for item in items)
            yield from ((owner, key, MISSING) for key in absent)
        for function, *values in self.functions:
            yield from ((function, *field) for field in zip(OF_FUNCTIONS, values))
        yield from ((None, name, value) for _, name, value in self.cells)
        for part, cls, forward, call in self.called:
            yield from (
                (part, "__class__", cls),
                (cls, "forward", forward),
                (cls, "__call__", call),
            )
        yield from self.attributes


NOTHING = Reads()


class Record:
    """Writes down what the forward of one module reads. What comes first under a name stays.

    Args:
        module: whose forward it is.
        cls: its class, before a conversion.
        copy: returns what is recorded of a value: the value itself, or a `snapshot`.
    """

    def __init__(
        self, module: nn.Module, cls: type, copy: Callable[[Any], Any] = lambda value: value
    ) -> None:
        self.module, self.cls, self.copy = module, cls, copy
        self.rows: dict[str, dict[Any, Any]] = {name: {} for name in Reads._fields}
        self.items: dict[Any, tuple[Place, dict[Any, Any]]] = {}  # of dicts, MISSING where absent
        self.members: dict[int, Mapping[str, Any]] = {}  # of classes, by id

    def reads(self) -> Reads:
        """Returns what was read."""
        found: dict[str, Any] = {n: tuple(rows.values()) for n, rows in self.rows.items()}
        found["dicts"] = tuple(
            (
                *place,
                tuple(item for item in items.items() if item[1] is not MISSING),
                tuple(key for key, value in items.items() if value is MISSING),
            )
            for place, items in self.items.values()
        )
        return Reads(**found)

    def owner(self, value: Any) -> Any:
        """Returns how an object is recorded."""
        return None if value is self.module else value

    def item(self, place: Place, key: Any, value: Any) -> Any:
        """Returns and records an item of a dict, MISSING where there is none."""
        items = self.items.setdefault((id(place[0]), place[1]), (place, {}))[1]
        items.setdefault(key, self.copy(value))
        return value

    def item_of(self, value: Any, name: str, key: str) -> Any:
        """Returns and records an item of a dict that is an attribute, MISSING if there is none."""
        found = getattr(value, name).get(key, MISSING)
        is_dict = name == "__dict__" and value is not self.module  # as torch.compile needs it
        place = (value.__dict__, None) if is_dict else (self.owner(value), name)
        return self.item(place, key, found)

    def keys(self, module: nn.Module) -> None:
        """Records the names of a module's submodules, in their order."""
        self.rows["keys"].setdefault(id(module), (self.owner(module), tuple(module._modules)))

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Records an attribute, as getattr returns it."""
        row = (self.owner(owner), name, self.copy(value))
        self.rows["attributes"].setdefault((id(owner), name), row)

    def member(self, cls: type, name: str) -> Any:
        """Returns and records a class's member as it or one of its bases has it, or MISSING."""
        if not cls.__flags__ & IMMUTABLE:
            self.attribute(cls, "__mro__", cls.__mro__)
        for base in cls.__mro__:
            if (found := self.member_of(base, name)) is not MISSING:
                return found
        return MISSING

    def member_of(self, cls: type, name: str) -> Any:
        """Returns and records what a class itself has, without its bases."""
        members = self.members.setdefault(id(cls), cls.__dict__)
        found = members.get(name, MISSING)
        return found if cls.__flags__ & IMMUTABLE else self.item((members, None), name, found)

    def class_of(self, value: Any) -> type:
        """Returns and records an object's class; that of the module itself before a conversion."""
        if value is self.module:
            return self.cls
        if not type(value).__flags__ & IMMUTABLE:
            self.attribute(value, "__class__", type(value))
        return type(value)

    def function(self, function: FunctionType) -> None:
        """Records a function that runs."""
        values = (snapshot(getattr(function, name)) for name in OF_FUNCTIONS)
        self.rows["functions"].setdefault(id(function), (function, *values))

    def cells(self, function: FunctionType) -> Iterator[Any]:
        """Yields and records what the variables of enclosing functions hold."""
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            content = contents_of(cell)
            if variable != "__class__":
                name = f"{variable} of {text_of(function)}"
                row = (reader_of(cell), name, self.copy(content))
                self.rows["cells"].setdefault(id(cell), row)
            yield content

    def partial(self, value: partial[Any]) -> None:
        """Records a partial that is called."""
        for name in ("func", "args", "keywords"):
            self.attribute(value, name, snapshot(getattr(value, name)))

    def call(self, module: nn.Module) -> None:
        """Records a submodule that is called."""
        cls: Any = type(module)
        self.item_of(module, "__dict__", "forward")
        self.rows["called"].setdefault(id(module), (module, cls, cls.forward, cls.__call__))


def contents_of(cell: CellType) -> Any:
    """Returns what a variable of an enclosing function holds, MISSING where it is not set."""
    return reader_of(cell)()


def reader_of(cell: CellType) -> FunctionType:
    """Returns a function of no arguments that returns what a cell holds, or MISSING."""
    content = None

    def read() -> Any:
        try:
            return content
        except NameError:
            return MISSING

    return FunctionType(read.__code__, globals(), "read", closure=(cell,))


# ---- comparison ----------------------------------------------------------------------------------


def snapshot(value: Any) -> Any:
    """Returns a container or functools.partial that no later write changes; else the value."""
    kind = type(value)
    if kind is partial:
        return partial(value.func, *snapshot(value.args), **snapshot(value.keywords))
    if kind is dict:
        return {key: snapshot(item) for key, item in value.items()}
    if kind in (list, tuple):
        parts = kind(map(snapshot, value))
        is_same = kind is tuple and all(part is item for part, item in zip(parts, value))
        return value if is_same else parts
    return kind(value) if kind is set else value


def differs(got: Any, want: Any) -> bool:
    """Tells whether a value is another one."""
    if got is want:
        return False
    cls = type(want)
    if type(got) is not cls:
        return True
    if cls is partial:  # which has no identity in compiled code
        parts = (got.func, want.func), (got.args, want.args), (got.keywords, want.keywords)
        return any([differs(*pair) for pair in parts])
    if cls in (list, tuple):
        return len(got) != len(want) or any([differs(*pair) for pair in zip(got, want)])
    if cls is dict:
        return got.keys() != want.keys() or any([differs(got[key], want[key]) for key in want])
    if cls not in CONSTANTS or got != want:
        return True
    return cls in (float, complex) and not want and str(got) != str(want)  # the sign of zero


def first_change(reads: Reads, module: nn.Module) -> tuple[Any, Any, Any, Any] | None:
    """Returns the first entry that has another value: (owner, name, value, value now).

    The owner is None for an entry of the module itself. A hook of a submodule that the forward
    calls is a change. Each forward asks, eager or compiled.
    """
    dicts, functions, cells, all_keys, called, attributes, _ = reads
    for owner, place, items, absent in dicts:
        where = owner if place is None else getattr(module if owner is None else owner, place)
        for key, value in items:
            if (got := where.get(key, MISSING)) is not value and differs(got, value):
                return owner, key, value, got
        for key in absent:
            if key in where:
                return owner, key, MISSING, where[key]
    for function, code, defaults, named in functions:
        if function.__code__ is not code:
            return function, "__code__", code, function.__code__
        if (got := function.__defaults__) is not defaults and differs(got, defaults):
            return function, "__defaults__", defaults, got
        if (got := function.__kwdefaults__) is not named and differs(got, named):
            return function, "__kwdefaults__", named, got
    for read, name, value in cells:
        if (got := read()) is not value and differs(got, value):
            return None, name, value, got
    for owner, keys in all_keys:
        if (names := tuple((module if owner is None else owner)._modules)) != keys:
            return owner, "keys", keys, names
    for part, cls, forward, call in called:
        if type(part) is not cls:
            return part, "__class__", cls, type(part)
        if cls.forward is not forward:
            return cls, "forward", forward, cls.forward
        if cls.__call__ is not call:
            return cls, "__call__", call, cls.__call__
        if has_hooks(part):
            return part, NO_HOOKS, MISSING, hook_of(part)
    for owner, name, value in attributes:
        got = getattr(module if owner is None else owner, name, MISSING)
        if got is not value and differs(got, value):
            return owner, name, value, got
    return None


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


# ---- names in errors -----------------------------------------------------------------------------


def name_of(owner: Any, name: str, reads: Reads) -> str:
    """Returns an entry's name, such as config.scale or package.module.ALPHA."""
    place = place_of(owner, reads)
    if name == NO_HOOKS:
        return f"{name} of {place}"
    return f"{place}.{name}" if place else name


def place_of(owner: Any, reads: Reads) -> str:
    """Returns where an entry is: the name of a module, class or function, or an entry's own name.

    An entry of the converted module itself has an empty place.
    """
    if isinstance(owner, (type, FunctionType, ModuleType)):
        return text_of(owner)
    if isinstance(owner, dict) and "__name__" in owner:
        return str(owner["__name__"])
    for place, name, value in reads.entries() if owner is not None else ():
        if value is owner or getattr(value, "__dict__", None) is owner:
            return name_of(place, name, reads)
    return ""


def text_of(value: object) -> str:
    """Returns a value as an error names it."""
    if value is MISSING:
        return "none"
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, (FunctionType, BuiltinFunctionType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{value}"
