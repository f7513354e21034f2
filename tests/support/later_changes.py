"""Rows of what a traced forward can read: (title, condition, change).

Each reads something in one way. It has a condition that holds at first, and one change of what is
read. The forward is a feed-forward while the condition holds, and another function afterwards.
"""

import builtins
import functools
import types

import torch
import torch.nn.functional as F
from torch import nn

from tests.support.fused_models import FeedForward

KIND = "silu"  # what functions below read


class Meta(type):
    pass


class Kind(metaclass=Meta):
    kind = "silu"


class OtherKind(metaclass=Meta):
    kind = "relu"


class Config(Kind):
    """Settings that are no module."""


class Relu(Config):
    kind = "relu"


class Part(nn.Module):
    kind = "silu"

    def forward(self, x, kind="silu"):
        return kind

    def method(self):
        return "silu"

    @staticmethod
    def static():
        return "silu"

    @property
    def computed(self):
        return "silu"


class NearPart(Part):
    """Inherits what is read."""

    def method(self):
        return super().method()


class Callable:
    def __call__(self):
        return "silu"


class Parts(nn.ModuleDict):
    pass


def forward(module, x, is_other=False):
    gate = module.w1(x)
    is_plain = not is_other and module.condition(module)
    return module.w2((F.silu(gate) if is_plain else F.relu(gate)) * module.w3(x))


def kind_of(kind="silu", *, scale=1):
    return kind if scale == 1 else "relu"


def closure(kind):
    return lambda: kind


def module_of(condition):
    torch.manual_seed(0)
    module = types.new_class("Feed", (FeedForward,), {}, lambda d: d.update(forward=forward))()
    module.condition = condition
    module.config, module.callable, module.other = Config(), Callable(), object()
    module.part, module.parts = NearPart(), Parts({"one": Part()})
    module.list, module.table = nn.ModuleList([Part()]), {"kind": "silu"}
    module.based = Meta("Based", (Kind,), {})()
    module.one, module.true, module.zero = 1, True, 0.0
    module.read = types.FunctionType(kind_of.__code__, globals(), "read", ("silu",))
    module.read.__kwdefaults__ = {"scale": 1}
    module.bound, module.closed = functools.partial(module.read, kind="silu"), closure("silu")
    return module


def own_class(module):
    return getattr(module, "class_before", None) or type(module)


def sets(owner, name, value):
    """Returns a change: an attribute is set, of what `owner` returns."""
    return lambda module, patch: patch.setattr(owner(module), name, value, raising=False)


def adds_getattr(cls):
    def change(module, patch):
        found = {"lora": 1}
        fallback = nn.Module.__getattr__

        def getattr_(self, name):
            return found[name] if name in found else fallback(self, name)

        patch.setattr(cls(module), "__getattr__", getattr_, raising=False)

    return change


def reads_later(owner, cls):
    """Ways to add the attribute `lora` to a module."""
    return {
        "an attribute": lambda m, patch: setattr(owner(m), "lora", 1),
        "a parameter": lambda m, patch: setattr(
            owner(m), "lora", nn.Parameter(torch.zeros(1), requires_grad=False)
        ),
        "a buffer": lambda m, patch: owner(m).register_buffer("lora", torch.zeros(1)),
        "a submodule": lambda m, patch: setattr(owner(m), "lora", nn.Identity()),
        "of the class": sets(cls, "lora", 1),
        "of nn.Module": sets(lambda m: nn.Module, "lora", 1),
        "a property": sets(cls, "lora", property(lambda m: 1)),
        "__getattr__": adds_getattr(cls),
    }


def absent_names():
    owners = {
        "the module": (lambda m: m, own_class),
        "a submodule": (lambda m: m.part, lambda m: NearPart),
        "a container": (lambda m: m.parts, lambda m: Parts),
        "one in a container": (lambda m: m.parts["one"], lambda m: Part),
    }
    for title, (owner, cls) in owners.items():
        for how, change in reads_later(owner, cls).items():
            yield f"hasattr of {title}: {how}", has_not(owner), change
            yield f"getattr of {title}: {how}", gets_none(owner), change


def has_not(owner):
    return lambda m: not hasattr(owner(m), "lora")


def gets_none(owner):
    return lambda m: getattr(owner(m), "lora", None) is None


def part_kind(m):
    return m.part.kind == "silu"


def config_kind(m):
    return m.config.kind == "silu"


def is_a_part(m):
    return isinstance(m.part, Part)


def calls_part(m):
    return m.part(1) == "silu"


def calls_method(m):
    return m.part.method() == "silu"


def reads(m):
    return m.read() == "silu"


def calls_partial(m):
    return m.bound() == "silu"


RELU = staticmethod(lambda *_, **__: "relu")

ROWS = [
    *absent_names(),
    # a name that is found in one place, and later in one that Python asks earlier
    ("submodule: __dict__", is_a_part, lambda m, p: m.__dict__.update(part=1)),
    ("submodule: _parameters", is_a_part, lambda m, p: m._parameters.update(part=None)),
    ("submodule: _buffers", is_a_part, lambda m, p: m._buffers.update(part=None)),
    ("submodule: class", is_a_part, sets(own_class, "part", 1)),
    ("submodule: nn.Module", is_a_part, sets(lambda m: nn.Module, "part", 1)),
    ("layer: class", lambda m: True, sets(own_class, "w1", property(lambda m: lambda x: x * 2))),
    (
        "submodule: all others",
        is_a_part,
        lambda m, p: setattr(m, "_modules", {**m._modules, "part": nn.Identity()}),
    ),
    ("class attribute: instance", part_kind, lambda m, p: setattr(m.part, "kind", "relu")),
    ("class attribute: nearer class", part_kind, sets(lambda m: NearPart, "kind", "relu")),
    (
        "class attribute: property",
        part_kind,
        sets(lambda m: NearPart, "kind", property(lambda m: "relu")),
    ),
    ("class attribute: class", part_kind, sets(lambda m: Part, "kind", "relu")),
    ("attribute: property", lambda m: m.one == 1, sets(own_class, "one", property(lambda m: 2))),
    ("settings: attribute", config_kind, lambda m, p: setattr(m.config, "kind", "relu")),
    ("settings: __class__", config_kind, lambda m, p: setattr(m.config, "__class__", Relu)),
    (
        "settings: __getattribute__",
        config_kind,
        sets(lambda m: Config, "__getattribute__", lambda c, n: "relu"),
    ),
    (
        "settings: __bases__",
        lambda m: m.based.kind == "silu",
        lambda m, p: setattr(type(m.based), "__bases__", (OtherKind,)),
    ),
    ("class: attribute", lambda m: Config.kind == "silu", sets(lambda m: Config, "kind", "relu")),
    (
        "class: metaclass",
        lambda m: Config.kind == "silu",
        sets(lambda m: Meta, "kind", property(lambda c: "relu")),
    ),
    (
        "isinstance: __class__",
        lambda m: not isinstance(m.config, Relu),
        lambda m, p: setattr(m.config, "__class__", Relu),
    ),
    (
        "isinstance: metaclass",
        lambda m: isinstance(m.config, Kind),
        sets(lambda m: Meta, "__instancecheck__", lambda *_: False),
    ),
    ("bool: __bool__", lambda m: bool(m.part), sets(lambda m: Part, "__bool__", lambda m: False)),
    ("bool: __len__", lambda m: bool(m.part), sets(lambda m: Part, "__len__", lambda m: 0)),
    (
        "==: __eq__",
        lambda m: m.config != m.other,
        sets(lambda m: Config, "__eq__", lambda *_: True),
    ),
    (
        "property",
        lambda m: m.part.computed == "silu",
        sets(lambda m: Part, "computed", property(lambda m: "relu")),
    ),
    (
        "property: code",
        lambda m: m.part.computed == "silu",
        sets(lambda m: Part.computed.fget, "__code__", (lambda self: "relu").__code__),
    ),
    ("static method", lambda m: m.part.static() == "silu", sets(lambda m: Part, "static", RELU)),
    ("method", calls_method, sets(lambda m: NearPart, "method", lambda m: "relu")),
    ("method: instance", calls_method, lambda m, p: setattr(m.part, "method", lambda: "relu")),
    ("super", calls_method, sets(lambda m: Part, "method", lambda m: "relu")),
    # calls
    (
        "call: forward of the instance",
        calls_part,
        lambda m, p: setattr(m.part, "forward", lambda x: "relu"),
    ),
    ("call: forward", calls_part, sets(lambda m: Part, "forward", lambda m, x: "relu")),
    (
        "call: forward of a nearer class",
        calls_part,
        sets(lambda m: NearPart, "forward", lambda m, x: "relu"),
    ),
    (
        "call: defaults of forward",
        calls_part,
        sets(lambda m: Part.forward, "__defaults__", ("relu",)),
    ),
    ("call: __call__", calls_part, sets(lambda m: NearPart, "__call__", lambda m, x: "relu")),
    (
        "call: hook",
        calls_part,
        lambda m, p: m.part.register_forward_hook(lambda *_: "relu"),
    ),
    ("call: class", calls_part, lambda m, p: setattr(m.part, "__class__", nn.Identity)),
    (
        "call: no module",
        lambda m: m.callable() == "silu",
        sets(lambda m: Callable, "__call__", lambda m: "relu"),
    ),
    (
        "defaults of the forward",
        lambda m: True,
        sets(lambda m: own_class(m).forward, "__defaults__", (True,)),
    ),
    ("defaults", reads, sets(lambda m: m.read, "__defaults__", ("relu",))),
    ("no defaults", reads, sets(lambda m: m.read, "__kwdefaults__", {"scale": 2})),
    ("a keyword's default", reads, lambda m, p: m.read.__kwdefaults__.update(scale=2)),
    ("code", reads, sets(lambda m: m.read, "__code__", (lambda *_, **__: "relu").__code__)),
    (
        "cell",
        lambda m: m.closed() == "silu",
        sets(lambda m: m.closed.__closure__[0], "cell_contents", "relu"),
    ),
    (
        "empty cell",
        lambda m: m.closed() == "silu",
        lambda m, p: p.delattr(m.closed.__closure__[0], "cell_contents"),
    ),
    ("partial: a keyword", calls_partial, lambda m, p: m.bound.keywords.update(kind="relu")),
    ("partial: another keyword", calls_partial, lambda m, p: m.bound.keywords.update(scale=2)),
    ("partial: function", calls_partial, lambda m, p: m.bound.__setstate__((RELU, (), {}, {}))),
    (
        "torch's function: defaults",
        lambda m: True,
        sets(lambda m: F.silu, "__code__", F.relu.__code__),
    ),
    # globals
    ("global", lambda m: KIND == "silu", lambda m, p: p.setitem(globals(), "KIND", "relu")),
    (
        "builtin: global",
        lambda m: abs(1) == 1,
        lambda m, p: p.setitem(globals(), "abs", lambda _: 2),
    ),
    ("builtin", lambda m: abs(1) == 1, sets(lambda m: builtins, "abs", lambda _: 2)),
    # containers
    (
        "keys of a container",
        lambda m: len(m.parts) == 1,
        lambda m, p: m.parts.update({"two": Part()}),
    ),
    (
        "all of a container",
        lambda m: len(m.parts) == 1,
        lambda m, p: setattr(m.parts, "_modules", {}),
    ),
    (
        "iteration",
        lambda m: all([p.kind == "silu" for p in m.list]),
        lambda m, p: m.list.append(nn.Identity()),
    ),
    (
        "item",
        lambda m: m.parts["one"].kind == "silu",
        lambda m, p: m.parts.update({"one": nn.Module()}),
    ),
    ("dict", lambda m: m.table["kind"] == "silu", lambda m, p: m.table.update(kind="relu")),
    (
        "dict replaced",
        lambda m: m.table["kind"] == "silu",
        lambda m, p: setattr(m, "table", {"kind": "relu"}),
    ),
    # numbers that are equal
    ("True to 1", lambda m: m.true is True, lambda m, p: setattr(m, "true", 1)),
    ("True to 1.0", lambda m: isinstance(m.true, int), lambda m, p: setattr(m, "true", 1.0)),
    ("1 to True", lambda m: m.one is not True, lambda m, p: setattr(m, "one", True)),
    ("1 to 1.0", lambda m: isinstance(m.one, int), lambda m, p: setattr(m, "one", 1.0)),
    ("0.0 to -0.0", lambda m: str(m.zero) == "0.0", lambda m, p: setattr(m, "zero", -0.0)),
]
