"""Where a traced forward writes down what it reads: the making of Reads (nn/convert/reads.py)."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from typing import Any

from torch import nn

from ..convert.reads import MISSING, Reads

Place = tuple[Any, str | None]  # of a dict, as Reads.dicts has it
IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE, of types whose members nobody can change


class Record:
    """What the runs of one module's forward have read.

    Args:
        module: whose forward it is.
        cls: its class, without mf.MLP.
    """

    def __init__(self, module: nn.Module, cls: type) -> None:
        self.module, self.cls = module, cls
        self.rows: dict[str, dict[Any, tuple[Any, ...]]] = {name: {} for name in Reads._fields}
        self.items: dict[Any, tuple[Place, dict[Any, Any]]] = {}  # of dicts, MISSING where absent
        self.members: dict[int, Mapping[str, Any]] = {}  # of classes, by id
        self.places: dict[int, Place] = {}  # of submodules' dicts, by id

    def reads(self) -> Reads:
        """Returns what was read."""
        found = {name: tuple(rows.values()) for name, rows in self.rows.items()}
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

    def modules(self, module: nn.Module) -> dict[str, Any]:
        """Returns the dict of a module's submodules, and knows it as the module's from now on."""
        self.places[id(module._modules)] = (self.owner(module), "_modules")
        return module._modules

    def place(self, items: Mapping[Any, Any]) -> Place:
        """Returns the place of a dict."""
        return self.places.get(id(items), (items, None))

    def item(self, place: Place, key: Any, value: Any) -> None:
        """Records an item of a dict, MISSING where there is none."""
        items = self.items.setdefault((id(place[0]), place[1]), (place, {}))[1]
        items.setdefault(key, value)

    def item_of(self, value: Any, name: str, key: str) -> Any:
        """Returns and records an item of a dict that is an attribute, MISSING if there is none."""
        found = getattr(value, name).get(key, MISSING)
        is_dict = name == "__dict__" and value is not self.module  # as torch.compile needs it
        self.item((value.__dict__, None) if is_dict else (self.owner(value), name), key, found)
        return found

    def keys(self, items: dict[Any, Any]) -> None:
        """Records all keys of a dict."""
        place = self.place(items)
        self.rows["keys"].setdefault((id(place[0]), place[1]), (*place, tuple(items)))

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Records an attribute of what needs no other record."""
        self.rows["attributes"].setdefault((id(owner), name), (owner, name, value))

    def lack(self, owner: Any, name: str) -> None:
        """Records that an object has no attribute of this name, of any kind."""
        self.rows["lacking"].setdefault((id(owner), name), (self.owner(owner), name))

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
        if not cls.__flags__ & IMMUTABLE:
            self.item((members, None), name, found)
        return found

    def class_of(self, value: Any) -> type:
        """Returns and records an object's class; that of the module itself without mf.MLP."""
        if value is self.module:
            return self.cls
        if not type(value).__flags__ & IMMUTABLE:
            self.attribute(value, "__class__", type(value))
        return type(value)

    def function(self, function: types.FunctionType) -> None:
        """Records a function that runs."""
        defaults, named = function.__defaults__, function.__kwdefaults__
        row = (function, function.__code__, defaults, named)
        self.rows["functions"].setdefault(id(function), row)
        if named is not None:
            self.all_items(named)

    def partial(self, partial: functools.partial[Any]) -> None:
        """Records a partial that is called."""
        for name in ("func", "args", "keywords"):
            self.attribute(partial, name, getattr(partial, name))
        self.all_items(partial.keywords)

    def all_items(self, items: dict[Any, Any]) -> None:
        """Records all of a dict."""
        self.keys(items)
        for key, value in items.items():
            self.item((items, None), key, value)

    def call(self, module: nn.Module) -> None:
        """Records a submodule that is called."""
        cls = type(module)
        own = module.__dict__.get("forward", MISSING)
        row = (module, cls, module.__dict__, own, getattr(cls, "forward", MISSING), cls.__call__)
        self.rows["called"].setdefault(id(module), row)
