"""A copy of a feed-forward that is one op computes what the original does, however it is made."""

import copy
import io
import pickle

import minifloat as mf
import pytest
import torch
from minifloat.nn.fuse.mlp import layers_read
from torch import nn

from tests.support.fused_models import WIDTH, FeedForward
from tests.support.same_bits import require_same


class Reduced(FeedForward):
    def __reduce__(self):
        return (type(self), (), self.__dict__)


class ReducedWithoutState(FeedForward):
    def __reduce__(self):
        return (type(self), ())


class ReducedByProtocol(FeedForward):
    def __reduce_ex__(self, protocol):
        return (type(self), (), self.__dict__)


class WithArguments(FeedForward):
    def __new__(cls, bias=False):
        return super().__new__(cls)

    def __getnewargs__(self):
        return (False,)


class WithState(FeedForward):
    def __getstate__(self):
        return {"own": self.__dict__}

    def __setstate__(self, state):
        super().__setstate__(state["own"])


class Copied(FeedForward):
    def __deepcopy__(self, memo):
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made


class Settings:
    pass


def gate_has_a_list(module):
    module.w1.parent = [module]


def gate_has_the_module(module):
    module.w1.__dict__["parent"] = module


def all_layers_have_it(module):
    for layer in (module.w1, module.w2, module.w3):
        layer.parent = (module,)


def a_weight_has_it(module):
    module.w1.weight.owner = module


def settings_have_it(module):
    module.settings = module.w2.settings = Settings()
    module.settings.owner = module


def saved(value):
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "protocol 0": lambda value: pickle.loads(pickle.dumps(value, 0)),
    "torch.save": saved,
}
CLASSES = (FeedForward, Reduced, ReducedWithoutState, ReducedByProtocol, WithArguments, WithState)
CYCLES = (gate_has_a_list, gate_has_the_module, all_layers_have_it, a_weight_has_it)
CYCLES += (settings_have_it,)


def converted(cls, fuse=True):
    torch.manual_seed(0)
    model = nn.Sequential(cls())
    report = mf.quantize_(model, "mxfp8", keep="nothing", fuse=fuse)
    assert len(report.fused) == fuse
    return model


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_copies_of_classes_with_ways_of_their_own(cls, way):
    model, x = converted(cls), torch.randn(2, WIDTH)
    twin = WAYS[way](model)
    assert layers_read(twin[0], x)
    require_same(twin(x), model(x))


def test_a_class_that_copies_itself():
    x = torch.randn(2, WIDTH)
    require_same(copy.deepcopy(converted(Copied))(x), converted(Copied, fuse=False)(x))


@pytest.mark.parametrize("start", ["model", "w1", "w2", "w3"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CYCLES, ids=lambda f: f.__name__)
def test_copies_of_cycles(change, way, start):
    """Where the layer is copied first, it is not complete when the module is: no op then."""
    model, x = converted(FeedForward), torch.randn(2, WIDTH)
    wants = [model(x), converted(FeedForward, fuse=False)(x)]
    change(model[0])
    first = model if start == "model" else model[0].get_submodule(start)
    _, twin = WAYS[way]((first, model))
    is_one_op = layers_read(twin[0], x)
    require_same(twin(x), wants[0] if is_one_op else wants[1])
    assert is_one_op or start != "model"
    twin[0].w1.weight.data.zero_()  # of its own
    assert not twin(x).any()
    require_same(model(x), wants[0])
