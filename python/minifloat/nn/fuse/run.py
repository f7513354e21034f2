"""One run of a forward on stand-ins: what reading, calling and iterating do there."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..convert.reads import IMMUTABLE, MISSING, Record, hook_of
from .symbols import (
    FUNCTIONS,
    Named,
    Symbol,
    apply_layer,
    call_text,
    fields_of,
    refuse,
    refuse_node,
    text_of,
)
from .views import (
    CONSTANTS,
    Globals,
    Super,
    Unknown,
    View,
    found_in,
    is_a,
    name_of,
    reason_against,
    value_of,
)

OWN_OF_TORCH = "torch.nn.modules."  # code of torch that is traced into
STATE = ("_parameters", "_buffers")  # of nn.Module
METHODS = (  # descriptors of what a forward can pass on, and not call
    classmethod,
    staticmethod,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.WrapperDescriptorType,
    types.BuiltinFunctionType,
)


class Run:
    """One run of a forward.

    Args:
        record: takes what is read, and has the module.
        layers: its linear layers by name.
        modes: id of a module -> the value of `training` that it has in this run.
    """

    dtype: torch.dtype  # of x

    def __init__(self, record: Record, layers: dict[str, Any], modes: dict[int, bool]) -> None:
        self.record, self.layers, self.modes = record, layers, modes
        self.module, self.cls = record.module, record.cls
        self.names = {id(layer): name for name, layer in layers.items()}
        self.called_layers: list[str] = []
        self.new_modes: list[int] = []
        self.views: dict[int, View] = {}
        self.scopes: dict[int, Globals] = {}

    def start(self, x: Symbol) -> Any:
        """Calls the forward of the module."""
        self.dtype = fields_of(x).dtype
        forward = self.record.member(self.cls, "forward")
        if type(forward) is not types.FunctionType:
            refuse("is no Python function")
        return self.function(forward, "forward", (self.wrap(self.module, "self"), x), {})

    def end(self) -> None:
        """Drops the stand-ins, which refer to the run, so that no cycle keeps parameters."""
        self.views.clear()
        self.scopes.clear()

    def other_modes(self) -> Iterator[dict[int, bool]]:
        """Returns the combinations of `training` that this run has found and not taken."""
        modes = dict(self.modes)
        for found in self.new_modes:
            yield {**modes, found: False}
            modes[found] = True

    # ---- items -----------------------------------------------------------------------------------

    def item(self, items: dict[Any, Any], key: Any, text: str) -> Any:
        """Reads an item of a dict, or a submodule.

        A layer is not recorded: each forward takes it from the module's own submodules, and
        compares it (can_be_one_op).
        """
        value, place = items[key], self.record.place(items)
        if id(value) in self.names and place == (None, "_modules"):
            return self.views.setdefault(id(value), View(self, value, text))
        return self.wrap(self.record.item(place, key, value), text)

    def all_items(self, items: dict[Any, Any], text: str) -> list[tuple[Any, Any]]:
        """Reads all items of a dict; returns them with stand-ins of the values."""
        self.record.keys(items)
        return [(key, self.item(items, key, f"{text}[{key!r}]")) for key in items]

    # ---- attributes ------------------------------------------------------------------------------

    def wrap(self, value: Any, text: str) -> Any:
        """Returns a value's stand-in."""
        if type(value) in CONSTANTS or is_a(value, Named):
            return value
        if id(value) in self.names:
            name = self.names[id(value)]
            refuse(f"reads the layer {name} as {text}, which is no submodule of its own")
        if type(value) is tuple:
            return tuple(self.wrap(item, f"{text}[{i}]") for i, item in enumerate(value))
        if id(value) not in self.views:
            self.views[id(value)] = View(self, value, text)
        return self.views[id(value)]

    def unknown(self, text: str) -> View:
        """Returns a stand-in that ends the run when it is used."""
        return View(self, Unknown(), text)

    def attribute(self, value: Any, name: str, path: str) -> Any:
        """Reads an attribute."""
        if name[:2] == name[-2:] == "__" or is_a(value, Unknown):
            refuse(f"reads {path}")
        if id(value) in self.names:
            weight = value._parameters.get(name)
            return self.wrap(weight, path) if name == "weight" else refuse(f"reads {path}")
        if is_a(value, Tensor):  # a layer's weight: on any device, codes, or a shard
            if name == "dtype":
                return self.dtype
            is_method = callable(getattr(Tensor, name, None))
            return self.unknown(path) if is_method else refuse(f"reads {path}")
        if is_a(value, types.ModuleType):
            if name not in value.__dict__:
                refuse(f"reads {path}")
            self.record.attribute(value, name, value.__dict__[name])
            return self.wrap(value.__dict__[name], path)
        if type(value) is dict and name in ("values", "items", "keys"):
            return functools.partial(self.iterate, value, name, path)
        if is_a(value, (dict, list, set)):
            is_method = type(self.record.member(type(value), name)) in METHODS
            return self.unknown(path) if is_method else refuse(f"reads {path}")
        if is_a(value, Super):
            return self.attribute_of_super(value, name, path)
        if is_a(value, type):
            return self.attribute_of_class(value, name, path)
        return self.attribute_of_object(value, name, path)

    def attribute_of_super(self, value: Super, name: str, path: str) -> Any:
        classes = self.record.class_of(value.module).__mro__
        for cls in classes[classes.index(value.cls) + 1 :]:
            raw = self.record.member_of(cls, name)
            if raw is not MISSING:
                return self.member(raw, value.module, path)
        raise AttributeError(name)

    def attribute_of_class(self, value: type, name: str, path: str) -> Any:
        """Reads an attribute of a class as type.__getattribute__ does."""
        of_type = self.record.member(type(value), name)
        get = self.record.member(type(value), "__getattribute__")
        if get is not type.__getattribute__ or hasattr(type(of_type), "__set__"):
            refuse(f"reads {path}")
        raw = self.record.member(value, name)
        if raw is MISSING:
            refuse(f"reads {path}")
        if type(raw) in (*METHODS, property):
            return self.unknown(path)
        if type(raw) is not types.FunctionType and hasattr(type(raw), "__get__"):
            refuse(f"reads {path}")
        return self.wrap(raw, path)

    def attribute_of_object(self, value: Any, name: str, path: str) -> Any:
        """Reads an attribute as object.__getattribute__ and nn.Module.__getattr__ do."""
        record, is_module = self.record, is_a(value, nn.Module)
        cls = record.class_of(value)
        if record.member(cls, "__getattribute__") is not object.__getattribute__:
            refuse(f"reads {path}")
        if is_module and name == "training":
            if id(value) not in self.modes and id(value) not in self.new_modes:
                self.new_modes.append(id(value))
            return self.modes.get(id(value), True)
        if is_module and name == "_modules":
            return self.wrap(record.modules(value), path)
        raw = record.member(cls, name)
        if type(raw) is property and type(raw.fget) is types.FunctionType:
            return self.property(raw.fget, value, path)
        if hasattr(type(raw), "__set__") or not hasattr(value, "__dict__"):
            refuse(f"reads {path}")
        own = record.item_of(value, "__dict__", name)
        if own is not MISSING:
            return refuse(f"reads {path}") if name in STATE else self.wrap(own, path)
        if raw is not MISSING:
            return self.member(raw, value, path)
        if record.member(cls, "__getattr__") not in (MISSING, nn.Module.__getattr__):
            refuse(f"reads {path}, which __getattr__ of {cls.__name__} decides")
        if is_module:
            for kind in STATE:
                if record.item_of(value, kind, name) is not MISSING:
                    refuse(f"reads the {kind[1:-1]} {path}")
            modules = record.modules(value)
            if name in modules:
                return self.item(modules, name, path)
            record.item_of(value, "_modules", name)
        record.lack(value, name)
        raise AttributeError(f"{path} does not exist")

    def property(self, get: types.FunctionType, value: Any, path: str) -> Any:
        """Reads a property."""
        try:
            return self.function(get, path, (self.wrap(value, "self"),), {})
        except AttributeError:  # Python asks __getattr__ then
            return refuse(f"reads {path}, which raises AttributeError")

    def member(self, raw: Any, value: Any, path: str) -> Any:
        """Returns what a class's member is for an instance."""
        if type(raw) is types.FunctionType:
            return self.wrap(types.MethodType(raw, value), path)
        if type(raw) is staticmethod:
            return self.wrap(raw.__func__, path)
        if type(raw) in METHODS:
            return self.unknown(path)
        return refuse(f"reads {path}") if hasattr(type(raw), "__get__") else self.wrap(raw, path)

    def iterate(self, items: dict[Any, Any], how: str, path: str) -> Iterator[Any]:
        """Iterates over a dict by its method `how`."""
        for key, value in self.all_items(items, path.rpartition(".")[0]):
            yield {"keys": key, "values": value, "items": (key, value)}[how]

    # ---- calls -----------------------------------------------------------------------------------

    def call(self, value: Any, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls what a View stands for."""
        if id(value) in self.names:
            self.called_layers.append(self.names[id(value)])
            return apply_layer(self.names[id(value)], args, kwargs)
        if id(value) in FUNCTIONS:
            if type(value) is types.FunctionType:
                self.record.function(value)
            return FUNCTIONS[id(value)][1](*args, **kwargs)
        if is_a(value, nn.Module):
            return self.call_module(value, text, args, kwargs)
        if type(value) is types.FunctionType:
            return self.function(value, text, args, kwargs)
        if type(value) is functools.partial:
            self.record.partial(value)
            given = self.wrap((value.args, tuple(value.keywords.values())), text)
            merged = {**dict(zip(value.keywords, given[1])), **kwargs}
            return self.wrap(value.func, name_of(value.func))(*given[0], *args, **merged)
        if type(value) is types.MethodType and type(value.__func__) is types.FunctionType:
            return self.function(
                value.__func__, text, (self.wrap(value.__self__, "self"), *args), kwargs
            )
        call = self.record.member(self.record.class_of(value), "__call__")
        if type(call) is types.FunctionType:
            return self.function(call, text, (self.wrap(value, text), *args), kwargs)
        return refuse_node(call_text(text, args, kwargs))

    def call_module(
        self, module: nn.Module, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a submodule as nn.Module.__call__ does."""
        cls = type(module)
        if cls.__call__ is not nn.Module.__call__:
            refuse(f"calls {text}, whose class has a __call__ of its own")
        if hook := hook_of(module):
            refuse(f"calls {text}, which has a {hook}")
        self.record.call(module)
        own = module.__dict__.get("forward", MISSING)
        if own is not MISSING:
            return self.wrap(own, text)(*args, **kwargs)
        forward = found_in(cls, "forward")
        if type(forward) is not types.FunctionType:
            refuse(f"calls {text}, whose forward is no Python function")
        return self.function(forward, text, (self.wrap(module, text), *args), kwargs)

    def function(
        self, function: types.FunctionType, text: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs a copy of a function on stand-ins."""
        scope = function.__globals__
        module = f"{scope.get('__name__')}."
        if module.startswith("torch.") and not module.startswith(OWN_OF_TORCH):
            own = function.__code__.co_name  # of a decorator, where the function has another name
            refuse_node(call_text(text if function.__name__ == own else own, args, kwargs))
        if reason := reason_against(function.__code__):
            refuse(f"runs {function.__qualname__}, which {reason}")
        self.record.function(function)
        if id(scope) not in self.scopes:
            self.scopes[id(scope)] = Globals(self, scope)
        names = function.__code__.co_freevars
        contents = zip(names, self.record.cells(function))
        cells = [
            types.CellType() if content is MISSING else types.CellType(self.wrap(content, name))
            for name, content in contents
        ]
        copy = types.FunctionType(
            function.__code__,
            self.scopes[id(scope)],
            function.__name__,
            self.wrap(function.__defaults__, text),
            tuple(cells),
        )
        copy.__kwdefaults__ = {
            k: self.wrap(v, k) for k, v in (function.__kwdefaults__ or {}).items()
        }
        return copy(*args, **kwargs)

    def special(self, view: View, name: str, *args: Any) -> Any:
        """Calls a method of Python's syntax: __iter__, __len__ or __getitem__."""
        value, text = value_of(view), text_of(view)
        method = self.record.member(self.record.class_of(value), name)
        if is_a(value, nn.Module) and type(method) is types.FunctionType:
            return self.function(method, text, (view, *args), {})
        if not is_a(value, dict) or method is not dict.__dict__.get(name):
            refuse(f"reads the items of {text}")
        if name == "__getitem__":
            if args[0] not in value:
                raise KeyError(args[0])
            return self.item(value, args[0], f"{text}[{args[0]!r}]")
        items = self.all_items(value, text)
        return len(items) if name == "__len__" else iter([key for key, _ in items])

    def is_instance(self, value: Any, classes: Any) -> bool:
        """isinstance of stand-ins."""
        if type(classes) is tuple:
            return any([self.is_instance(value, cls) for cls in classes])
        cls, real = value_of(classes), value_of(value)
        check = self.record.member(type(cls), "__instancecheck__")
        of_type = check is type.__dict__["__instancecheck__"]
        if not (is_a(cls, type) and of_type) and cls is not Tensor:
            refuse(f"asks isinstance of {text_of(classes)}")
        if type(real) is Symbol or is_a(real, Tensor):
            if issubclass(cls, Tensor) and cls is not Tensor:
                refuse(f"asks isinstance of {text_of(classes)}")
            return issubclass(Tensor, cls)
        if type(value) is View and not self.has_plain_class(real):
            refuse(f"asks isinstance of {text_of(value)}")
        return any(base is cls for base in type(real).__mro__)

    def has_plain_class(self, value: Any) -> bool:
        """Tells whether an object's class is what it says, and stays that unless it is recorded.

        The module's own may become a derived one.
        """
        if value is self.module or type(value) in (Super, Unknown):
            return False
        cls = self.record.class_of(value)
        if cls.__flags__ & IMMUTABLE:
            return value.__class__ is cls
        plain = {"__class__": object.__dict__["__class__"]}
        plain["__getattribute__"] = object.__getattribute__
        return all([self.record.member(cls, name) is member for name, member in plain.items()])

    def super_of(self, cls: Any = None, module: Any = None) -> View:
        """super() of a method, or with its two arguments."""
        if cls is None:
            caller = sys._getframe(1)
            cls = caller.f_locals["__class__"]
            module = caller.f_locals[caller.f_code.co_varnames[0]]
        return View(self, Super(value_of(cls), value_of(module)), "super()")
