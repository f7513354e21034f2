"""A feed-forward that is one op follows its class: another one, other bases, other members."""

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from minifloat.nn.fuse.mlp import layers_read
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tests.support.fused_models import WIDTH, FeedForward
from tests.support.later_changes import Feed
from tests.support.same_bits import require_same


def relu(module, x):
    return F.relu(x)


def relu_forward(module, x):
    return module.w2(F.relu(module.w1(x)) * module.w3(x))


def makes_its_class():
    """Returns a class whose forward reads a number and a submodule."""
    return type("Own", (Feed,), {})


class Mixin(nn.Module):
    """Stands between the class and nn.Module."""


# Each takes a converted module's own class, as it is now, and returns the one that it is given.
DERIVED = {
    "an attribute": lambda cls: type("Derived", (cls,), {"rate": 1.0}),
    "a forward": lambda cls: type("Derived", (cls,), {"forward": relu_forward}),
    "a property": lambda cls: type("Derived", (cls,), {"rate": property(lambda m: 1.0)}),
    "of a mixin": lambda cls: type("Derived", (type("Front", (), {"rate": 1.0}), cls), {}),
    "between": lambda cls: type("Derived", (cls, Mixin), {}),
    "twice": lambda cls: type("Twice", (type("Derived", (cls,), {"rate": 1.0}),), {}),
}


def sets_class(derive):
    def change(module, patch):
        module.__class__ = derive(type(module))

    return change


def sets_bases(module, patch):
    """Puts a class in front of the one that the module had before its conversion."""
    cls = type(module)
    if not isinstance(module, mf.MLP):
        cls.rate = 1.0
        return
    cls.__bases__ = (type("Front", (mf.MLP,), {"rate": 1.0}), *cls.__bases__[1:])


def sets_bases_of_its_own(module, patch):
    cls = getattr(module, "class_before", None) or type(module)
    front = type("Front", (FeedForward,), {"forward": relu_forward})
    cls.__bases__ = (front,)


def sets_members(name, value):
    return lambda module, patch: patch.setattr(type(module), name, value, raising=False)


CHANGES = {f"derived: {name}": sets_class(derive) for name, derive in DERIVED.items()}
CHANGES |= {
    "bases": sets_bases,
    "bases of its own class": sets_bases_of_its_own,
    "member: attribute": sets_members("rate", 1.0),
    "member: method": sets_members("act", relu),
    "member: property": sets_members("rate", property(lambda m: 1.0)),
    "member: a layer": sets_members("w1", property(lambda m: lambda x: m._modules["w3"](x))),
}


def twins(cls):
    models = []
    for fuse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(cls())
        report = mf.quantize_(model, "mxfp8", keep="nothing", fuse=fuse)
        assert [name for name, _ in report.fused] == ["0"] * fuse, report.not_fused
        models.append(model)
    return models


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_modules_class(name, monkeypatch):
    found, x = [], torch.randn(2, WIDTH)
    for model in twins(makes_its_class()):
        if isinstance(model[0], mf.MLP):
            assert layers_read(model[0], x)
        with monkeypatch.context() as patch:
            CHANGES[name](model[0], patch)
            found.append(model(x))
            if isinstance(model[0], mf.MLP) and name != "derived: a forward":  # then not asked
                assert not layers_read(model[0], x)
    require_same(*found)


def test_another_modules_class():
    """Also one that is converted: the modules then compute what that class says."""
    x = torch.randn(2, WIDTH)
    model, other = twins(makes_its_class())[0], twins(makes_its_class())[0]
    type(other[0]).class_before.rate = 1.0
    model[0].__class__ = type(other[0])
    assert not layers_read(model[0], x)
    require_same(model(x), other(x))
    model[0].__class__ = type(other[0]).class_before
    require_same(model(x), other(x))


def test_derived_classes_that_change_nothing_read():
    """As fully_shard derives one: the module stays one op."""
    x = torch.randn(2, WIDTH)
    fused = twins(makes_its_class())[0]
    want, cls = fused(x), type(fused[0])
    fused[0].__class__ = type("FSDPFeed", (FSDPModule, cls), {"__deepcopy__": None})
    assert layers_read(fused[0], x)
    require_same(fused(x), want)
    fused[0].__class__ = cls
    cls.unread = 1
    assert layers_read(fused[0], x)
    require_same(fused(x), want)
    other = nn.Sequential(cls.class_before())  # converted after its class has another member
    mf.quantize_(other, "mxfp8", keep="nothing", fuse=True)
    assert layers_read(other[0], x)
