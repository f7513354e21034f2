"""A feed-forward that is one op while its settings are what they were, in copies and blocks too."""

import copy
import gc
import random
import weakref

import minifloat as mf
import numpy as np
import torch
import torch.nn.functional as F
from minifloat.nn.fuse.mlp import layers_read
from torch import nn

from tests.support.fused_models import HIDDEN, WIDTH
from tests.support.later_changes import Feed
from tests.support.same_bits import require_same_results
from tests.support.traced_mlps import module_of, plain, results, twins


def test_a_change_that_is_undone():
    fused, _, _ = twins(Feed())
    want = results(fused)
    act, p = fused[0].act, fused[0].drop.p
    fused[0].act, fused[0].drop.p = nn.ReLU(), 0.5
    assert not torch.equal(results(fused)["y"], want["y"])
    fused[0].act, fused[0].drop.p = act, p + 0.0  # an equal number
    require_same_results(results(fused), want)
    assert layers_read(fused[0], torch.randn(2, WIDTH))


def test_blocks_share_compiled_code():
    """The comparison holds for the objects of each block: none of them is a constant."""
    module = Feed()
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
    assert report.not_fused[0][1].startswith("its forward drops with p=0.1, by F.dropout(")
    report = twins(Vision(0.0, nn.Softmax(-1)))[2]
    assert "softmax" in report.not_fused[0][1]


def test_copies_follow_their_own_settings():
    fused, unfused, _ = twins(Feed())
    want = results(fused)
    twin = copy.deepcopy(fused)
    require_same_results(results(twin), want)
    assert layers_read(twin[0], torch.randn(2, WIDTH))
    twin[0].drop.p, unfused[0].drop.p = 0.5, 0.5
    require_same_results(results(twin), results(unfused))
    require_same_results(results(fused), want)


# ---- conversion leaves no trace ------------------------------------------------------------------


def test_conversion_runs_nothing_of_the_module(monkeypatch):
    called = []

    def draws(module, x):
        return module.w2(F.silu(module.w1(x)) * module.w3(x) * called.append(random.random()))

    def refuse(*args, **kwargs):
        raise AssertionError("called")

    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    modules = [module_of(f) for f in (draws, plain)]
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
    assert [len(report.fused) for report in reports] == [0, 1]
    assert called == []
    assert random.getstate() == states[0]
    assert (np.random.get_state()[1] == states[1]).all()
    assert torch.equal(torch.get_rng_state(), states[2])
    assert torch.get_default_dtype() == torch.float32


def test_memory_of_a_converted_model_is_freed_at_once():
    """No cycle of references holds the parameters until Python collects cycles."""
    fused, _, _ = twins(Feed())
    fused[0].act.register_buffer("large", torch.zeros(8))
    watched = weakref.ref(fused[0].w1.weight)
    gc.disable()
    try:
        del fused
        assert watched() is None
    finally:
        gc.enable()
