"""Rows of what a matched forward depends on, and one later change of each: (title, change).

A change takes a feed-forward, converted or not, and pytest's monkeypatch.
"""

import functools

import minifloat as mf
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import silu

from tests.support.fused_models import HIDDEN, WIDTH, FeedForward


class Act(nn.Module):
    inplace = False

    def forward(self, x):
        return silu(x, inplace=self.inplace)


class NearAct(Act):
    """Inherits what is read."""


class Relu(Act):
    def forward(self, x):
        return F.relu(x)


class Chain(nn.Sequential):
    pass


class Feed(FeedForward):
    rate = 0.0

    def __init__(self):
        super().__init__()
        self.act, self.drop = NearAct(), nn.Dropout(0.0)
        self.chain = Chain(nn.Identity(), nn.Dropout(0.0))

    def forward(self, x):
        """Reads from everywhere that a matched forward can."""
        hidden: torch.Tensor = self.drop(self.act(self.w1(x)) * self.w3(x))
        hidden = F.dropout(hidden, p=self.rate, training=self.training)
        return self.chain(self.w2(hidden))


class BoundFeed(FeedForward):
    def __init__(self):
        super().__init__()
        self.bound = functools.partial(F.gelu, approximate="tanh")

    def forward(self, x):
        return self.w2(self.w3(x) * self.bound(self.w1(x)))


class DoubledLinear(mf.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def module_of(title):
    """Returns a feed-forward of a class of its own, for a row."""
    torch.manual_seed(0)
    base = BoundFeed if title.startswith("partial") else Feed
    return type("Own", (base,), {})()


def own_class(module):
    return getattr(module, "class_before", None) or type(module)


def sets(owner, name, value):
    """Returns a change: an attribute is set, of what `owner` returns."""
    return lambda module, patch: patch.setattr(owner(module), name, value, raising=False)


# Dynamo keeps the names of a function's arguments where its code is replaced: those of Feed's.
def relu_forward(self, x):
    return self.w2(F.relu(self.w1(x)) * self.w3(x))


def doubles(module, patch):
    forward = module.w1.forward
    module.w1.forward = lambda x: forward(x) * 2


def meta_layer(module, patch):
    torch.manual_seed(1)
    module.w3 = nn.Linear(WIDTH, HIDDEN)


def double(*call):
    return call[2] * 2


def gelu_of_relu(x, **_):
    return F.relu(x)


def of_relu(module, name):
    return F.relu if name == "act" else object.__getattribute__(module, name)


RELU = staticmethod(F.relu)
ROWS = [
    # a submodule, and what Python finds under its name before it
    ("act: another", lambda m, p: setattr(m, "act", nn.ReLU())),
    ("act: in __dict__", lambda m, p: m.__dict__.update(act=F.relu)),
    ("act: _parameters", lambda m, p: m._parameters.update(act=None)),
    ("act: _buffers", lambda m, p: m._buffers.update(act=None)),
    ("act: of the class", sets(own_class, "act", RELU)),
    ("act: a property", sets(own_class, "act", property(lambda m: F.relu))),
    ("act: of nn.Module", sets(lambda m: nn.Module, "act", RELU)),
    (
        "act: all submodules",
        lambda m, p: setattr(m, "_modules", {**m._modules, "act": nn.ReLU()}),
    ),
    (
        "act: __getattribute__",
        sets(own_class, "__getattribute__", of_relu),
    ),
    ("act: __class__", lambda m, p: setattr(m.act, "__class__", Relu)),
    ("act: forward", lambda m, p: setattr(m.act, "forward", F.relu)),
    ("act: forward of its class", sets(lambda m: Act, "forward", Relu.forward)),
    ("act: forward of the nearer class", sets(lambda m: NearAct, "forward", Relu.forward)),
    ("act: code", sets(lambda m: Act.forward, "__code__", Relu.forward.__code__)),
    ("act: __call__", sets(lambda m: NearAct, "__call__", Relu.forward)),
    ("act: hook", lambda m, p: m.act.register_forward_hook(double)),
    # numbers
    ("dropout: p", lambda m, p: setattr(m.drop, "p", 1.0)),
    ("dropout: p of the class", sets(own_class, "rate", 1.0)),
    ("dropout: p of the instance", lambda m, p: setattr(m, "rate", 1.0)),
    ("dropout: p of a property", sets(own_class, "rate", property(lambda m: 1.0))),
    # functions
    ("global", lambda m, p: p.setitem(globals(), "silu", lambda x, inplace: F.relu(x))),
    ("torch's function", sets(lambda m: F, "dropout", lambda x, **_: x * 2)),
    ("torch's function: code", sets(lambda m: F.silu, "__code__", F.relu.__code__)),
    ("partial: a keyword", lambda m, p: m.bound.keywords.update(approximate="other")),
    ("partial: function", lambda m, p: m.bound.__setstate__((gelu_of_relu, (), {}, {}))),
    ("partial: another", lambda m, p: setattr(m, "bound", F.relu)),
    # a container
    ("chain: appended", lambda m, p: m.chain.append(nn.ReLU())),
    ("chain: one", lambda m, p: m.chain.__setitem__(0, nn.ReLU())),
    ("chain: all", lambda m, p: setattr(m.chain, "_modules", {"0": nn.ReLU()})),
    ("chain: p", lambda m, p: setattr(m.chain[1], "p", 1.0)),
    ("chain: hook", lambda m, p: m.chain[0].register_forward_hook(double)),
    ("chain: __iter__", sets(lambda m: Chain, "__iter__", lambda m: iter([nn.ReLU()]))),
    # the forward
    ("forward: of the class", sets(own_class, "forward", relu_forward)),
    ("forward: code", sets(lambda m: Feed.forward, "__code__", relu_forward.__code__)),
    # layers
    ("layer: forward", doubles),
    ("layer: a bound forward", lambda m, p: setattr(m.w1, "forward", m.w3.forward)),
    ("layer: __class__", lambda m, p: setattr(m.w1, "__class__", DoubledLinear)),
    ("layer: another", meta_layer),
    ("layer: recipe", lambda m, p: setattr(m.w1, "recipe", "fp8_tensorwise")),
    ("layer: a property", sets(own_class, "w1", property(lambda m: lambda x: m.w3(x) * 2))),
    ("layer: hook", lambda m, p: m.w1.register_forward_hook(double)),
]
