"""A module is one op only where its graph is a feed-forward, and only while it stays that graph.

What is left out at once is in test_left_out_mlps.py.
"""

import copy
import functools
import gc
import random
import weakref

import minifloat as mf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from minifloat.nn.fuse.mlp import can_be_one_op
from torch import nn

from tests.support.fused_models import HIDDEN, WIDTH
from tests.support.same_bits import require_same_results
from tests.support.traced_mlps import module_of, plain, require_twins, results, twins

SCALE = 1.0


# ---- what changes after the conversion -----------------------------------------------------------


class Config:
    scale = 1.0


class Act(nn.Module):
    def __init__(self):
        super().__init__()
        self.kind = "silu"

    def forward(self, x):
        return F.silu(x) if self.kind == "silu" else F.relu(x)


class Relu(Act):
    def forward(self, x):
        return F.relu(x)


class Chain(nn.Sequential):
    """An activation in a container."""


def settled(module, x):
    """Reads settings from everywhere that a forward can."""
    hidden = module.drop(module.act(module.w1(x)) * module.w3(x) * module.scale * SCALE)
    hidden = hidden * module.config.scale * module.rate()
    return module.chain(module.w2(hidden)) if module.is_whole else hidden


def settled_module():
    settings = {"scale": 1, "is_whole": True, "config": Config(), "rate": lambda: 1.0}
    parts = {"act": Act(), "drop": nn.Dropout(0.0), "chain": Chain(nn.Identity(), nn.Dropout(0.0))}
    return module_of(settled, **settings, **parts)


def other_forward(module, x):
    return module.w2(F.relu(module.w1(x)) * module.w3(x))


def set_code(function, other, patch):
    patch.setattr(function, "__code__", other.__code__)


class DoubledLinear(mf.Linear):
    def forward(self, x):
        return super().forward(x) * 2


CHANGES = {
    "act replaced": lambda m, patch: setattr(m, "act", nn.ReLU()),
    "act shadowed": lambda m, patch: m.__dict__.update(act=F.relu),
    "flag of act": lambda m, patch: setattr(m.act, "kind", "relu"),
    "class of act": lambda m, patch: setattr(m.act, "__class__", Relu),
    "forward of act": lambda m, patch: setattr(m.act, "forward", F.relu),
    "forward of act's class": lambda m, patch: patch.setattr(Act, "forward", Relu.forward),
    "code of act's class": lambda m, patch: set_code(Act.forward, Relu.forward, patch),
    "dropout": lambda m, patch: setattr(m.drop, "p", 0.5),
    "dropout in a container": lambda m, patch: setattr(m.chain[1], "p", 0.5),
    "module appended": lambda m, patch: m.chain.append(nn.ReLU()),
    "hook in a container": lambda m, patch: m.chain[0].register_forward_hook(lambda *c: c[2] * 2),
    "scale": lambda m, patch: setattr(m, "scale", 2),
    "flag": lambda m, patch: setattr(m, "is_whole", False),
    "global": lambda m, patch: patch.setitem(globals(), "SCALE", 2.0),
    "config": lambda m, patch: setattr(m.config, "scale", 2.0),
    "config's class": lambda m, patch: patch.setattr(Config, "scale", 2.0),
    "method": lambda m, patch: setattr(m, "rate", lambda: 3.0),
    "forward": lambda m, patch: setattr(m, "forward", functools.partial(other_forward, m)),
    "class's forward": lambda m, patch: patch.setattr(own_class(m), "forward", other_forward),
    "torch's function": lambda m, patch: patch.setattr(F, "silu", lambda x, inplace=False: x),
    "class of a layer": lambda m, patch: setattr(m.w3, "__class__", DoubledLinear),
    "layer replaced": lambda m, patch: setattr(m, "w3", nn.Linear(WIDTH, HIDDEN, device="meta")),
}


def own_class(module):
    return getattr(module, "class_before", None) or type(module)


@pytest.mark.parametrize("change", CHANGES)
def test_a_later_change_is_honoured(change, monkeypatch):
    fused, unfused, report = twins(settled_module())
    assert report.fused == [("0", "w1, w3, w2 and silu are one op")]
    x = torch.randn(2, WIDTH)
    assert can_be_one_op(fused[0], x)
    for model in (fused, unfused):
        CHANGES[change](model[0], monkeypatch)
    if change == "layer replaced":
        layer = nn.Linear(WIDTH, HIDDEN)
        fused[0].w3 = unfused[0].w3 = layer
    require_twins(fused, unfused)
    if change != "forward":  # which torch calls instead of the class's
        assert not can_be_one_op(fused[0], x)


def test_a_change_that_is_undone():
    fused, _, _ = twins(settled_module())
    want = results(fused)
    act, p = fused[0].act, fused[0].drop.p
    fused[0].act, fused[0].drop.p = nn.ReLU(), 0.5
    assert not torch.equal(results(fused)["y"], want["y"])
    fused[0].act, fused[0].drop.p = act, p + 0.0  # an equal number
    require_same_results(results(fused), want)
    assert can_be_one_op(fused[0], torch.randn(2, WIDTH))


@pytest.mark.parametrize(
    "changes",
    [
        ("act replaced", "dropout", "scale", "class's forward"),
        ("flag of act", "forward of act's class", "config", "global"),
        ("class of act", "dropout in a container", "forward of act", "module appended"),
    ],
    ids="; ".join,
)
def test_a_later_change_is_honoured_by_compiled_code(changes, monkeypatch):
    for change in changes:
        torch.compiler.reset()
        fused, unfused, _ = twins(settled_module())
        run = torch.compile(fused, backend="eager", fullgraph=True)
        require_same_results(results(fused, run=run), results(fused), change)
        with monkeypatch.context() as patch:
            for model in (fused, unfused):
                CHANGES[change](model[0], patch)
            require_same_results(results(fused, run=run), results(unfused), change)


def test_blocks_share_compiled_code():
    """The comparison holds for the objects of each block: none of them is a constant."""
    module = settled_module()
    model = nn.Sequential(*(copy.deepcopy(module) for _ in range(5)))
    report = mf.quantize_(model, "mxfp8", keep="nothing", fuse=True)
    assert len(report.fused) == 5
    want = model(torch.ones(2, WIDTH))
    for i, block in enumerate(model):
        model[i] = torch.compile(block, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(recompile_limit=2):  # one where x has no gradient, one more
        assert torch.equal(model(torch.ones(2, WIDTH)), want)


def test_vision_feed_forwards():
    """act, dropout, an optional norm and dropout again, as vision transformers have them."""

    class Vision(nn.Module):
        def __init__(self, p, norm):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
            self.act, self.norm = nn.GELU(), norm
            self.drop1, self.drop2 = nn.Dropout(p), nn.Dropout(p)

        def forward(self, x):
            x = self.drop1(self.act(self.fc1(x)))
            return self.drop2(self.fc2(self.norm(x)))

    report = twins(Vision(0.0, nn.Identity()))[2]
    assert report.fused == [("0", "fc1, fc2 and gelu are one op")]
    report = twins(Vision(0.1, nn.Identity()))[2]
    dropped = "dropout(gelu(fc1(x)), p=0.1, training=True)"
    assert report.not_fused == [("0", f"{dropped} is no part of a feed-forward")]
    report = twins(Vision(0.0, nn.Softmax(-1)))[2]
    assert "softmax" in report.not_fused[0][1]


def test_copies_follow_their_own_settings():
    fused, unfused, _ = twins(settled_module())
    want = results(fused)
    twin = copy.deepcopy(fused)
    require_same_results(results(twin), want)
    assert can_be_one_op(twin[0], torch.randn(2, WIDTH))
    twin[0].drop.p, unfused[0].drop.p = 0.5, 0.5
    require_same_results(results(twin), results(unfused))
    require_same_results(results(fused), want)


# ---- conversion leaves no trace ------------------------------------------------------------------


def test_conversion_runs_nothing_of_the_module(monkeypatch):
    called = []

    def draws(module, x):
        called.append(random.random())
        return plain(module, x)

    def draws_by_numpy(module, x):
        np.random.seed(0)
        return plain(module, x)

    def draws_by_torch(module, x):
        return plain(module, x) * torch.rand(())

    def set_dtype(module, x):
        torch.set_default_dtype(torch.float64)
        return plain(module, x)

    def refuse(*args, **kwargs):
        raise AssertionError("called")

    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    modules = [module_of(f) for f in (draws, draws_by_numpy, draws_by_torch, set_dtype, plain)]
    torch.set_rng_state(states[2])
    with monkeypatch.context() as patch:  # nothing that another thread would see
        for name in ("set_default_dtype", "set_rng_state", "manual_seed", "set_default_device"):
            patch.setattr(torch, name, refuse)
        for name in ("manual_seed", "set_rng_state", "fork_rng"):
            patch.setattr(torch.random, name, refuse)
        patch.setattr(nn.Module, "__call__", refuse)
        reports = [
            mf.quantize_(nn.Sequential(m), "mxfp8", keep="nothing", fuse=True) for m in modules
        ]
    assert [len(report.fused) for report in reports] == [0, 0, 0, 0, 1]
    assert called == []
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.get_default_dtype() == torch.float32


def test_memory_of_a_converted_model_is_freed_at_once():
    """No cycle of references holds the parameters until Python collects cycles."""
    fused, _, _ = twins(settled_module())
    fused[0].act.register_buffer("large", torch.zeros(8))
    watched = weakref.ref(fused[0].w1.weight)
    gc.disable()
    try:
        del fused
        assert watched() is None
    finally:
        gc.enable()
