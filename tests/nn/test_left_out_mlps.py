"""A module whose graph is none of a feed-forward, or cannot be told, is left out with the reason.

Every module here is converted twice, with fuse=True and without. Both then compute the same bits,
forward and backward, in training and in evaluation, and leave the same buffers and lists.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.traced_mlps import AUXILIARY, module_of, plain, require_twins, twins


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad.clamp(-1e-3, 1e-3)


def clamps(module, x):
    gate, up = module.w1(x).clamp(max=10.0), module.w3(x).clamp(-10.0, 10.0)
    return module.w2(F.silu(gate) * up)


def branches_on_rows(module, x):
    return plain(module, x) if x.shape[1] > 8 else module.w2(F.relu(module.w1(x)))


def branches_on_positions(module, x):
    return plain(module, x[:, :64]) if x.size(1) > 64 else plain(module, x)


def updates_a_buffer(module, x):
    hidden = F.silu(module.w1(x)) * module.w3(x)
    if module.training:
        module.ema.lerp_(hidden.detach().abs().mean(), 0.1)
    return module.w2(hidden)


def writes_an_attribute(module, x):
    module.calls = module.calls + 1
    return plain(module, x)


def appends(module, x):
    AUXILIARY.append(x)
    return plain(module, x)


def appends_a_loss(module, x):
    hidden = F.silu(module.w1(x)) * module.w3(x)
    AUXILIARY.append(hidden.mean())
    return module.w2(hidden)


def stops_a_gradient(module, x):
    return module.w2(F.silu(module.w1(x)).detach() * module.w3(x))


def computes_without_gradients(module, x):
    with torch.no_grad():
        gate = module.w1(x)
    return module.w2(F.silu(gate) * module.w3(x))


@torch.no_grad()
def has_no_gradients(module, x):
    return plain(module, x)


def switches_gradients(module, x):
    torch.set_grad_enabled(False)
    gate = F.silu(module.w1(x))
    torch.set_grad_enabled(True)
    return module.w2(gate * module.w3(x))


def asks_for_gradients(module, x):
    return plain(module, x) * (1 if torch.is_grad_enabled() else 2)


def hooks_a_tensor(module, x):
    gate = module.w1(x)
    gate.register_hook(lambda grad: grad * 2)
    return module.w2(F.silu(gate) * module.w3(x))


def clips_gradients(module, x):
    return module.w2(Clipped.apply(F.silu(module.w1(x))) * module.w3(x))


def drops(module, x):
    return module.w2(F.dropout(F.silu(module.w1(x)) * module.w3(x), 0.5, module.training))


def scales_in_evaluation(module, x):
    return plain(module, x) * (1 if module.training else 2)


def adds_a_term(module, x):
    return plain(module, x) + 1e-3


def tries(module, x):
    try:
        return module.w2(F.silu(module.w1(x).clamp(max=1.0)) * module.w3(x))
    except BaseException:
        return plain(module, x)


LEFT_OUT = {
    clamps: "w1(x).clamp(max=10.0) is no part of a feed-forward",
    branches_on_rows: "its forward reads x.shape",
    branches_on_positions: "x.size(1) is no part of a feed-forward",
    updates_a_buffer: "its forward reads the buffer ema",
    writes_an_attribute: "its forward writes calls",
    appends: "AUXILIARY.append(x) is no part of a feed-forward",
    appends_a_loss: "(silu(w1(x)) * w3(x)).mean() is no part of a feed-forward",
    stops_a_gradient: "silu(w1(x)).detach() is no part of a feed-forward",
    computes_without_gradients: "torch.no_grad() is no part of a feed-forward",
    has_no_gradients: "decorate_context(self, x) is no part of a feed-forward",
    switches_gradients: "torch.set_grad_enabled(False) is no part of a feed-forward",
    asks_for_gradients: "torch.is_grad_enabled() is no part of a feed-forward",
    hooks_a_tensor: "w1(x).register_hook(…) is no part of a feed-forward",
    clips_gradients: "Clipped.apply(silu(w1(x))) is no part of a feed-forward",
    drops: "dropout(silu(w1(x)) * w3(x), p=0.5, training=True) is no part of a feed-forward",
    scales_in_evaluation: "w2(silu(w1(x)) * w3(x)) * 2 is no part of a feed-forward",
    adds_a_term: "w2(silu(w1(x)) * w3(x)) + 0.001 is no part of a feed-forward",
    tries: "its forward runs tries, which handles exceptions",
}


@pytest.mark.parametrize("forward", LEFT_OUT, ids=lambda f: f.__name__)
def test_a_graph_that_differs_is_left_out_with_its_node(forward):
    module = module_of(forward, calls=0)
    module.register_buffer("ema", torch.zeros(()))
    before = {**module.__dict__, **module._buffers}
    AUXILIARY.clear()
    fused, unfused, report = twins(module)
    assert report.fused == []
    assert report.not_fused == [("0", LEFT_OUT[forward])]
    assert AUXILIARY == []
    assert {**module.__dict__, **module._buffers} == before
    require_twins(fused, unfused)
    assert fused[0].calls == unfused[0].calls


@pytest.mark.parametrize("where", ["w1", "act"])
def test_a_hook_that_is_there_before(where):
    module = module_of(lambda m, x: m.w2(m.act(m.w1(x)) * m.w3(x)), act=nn.SiLU())
    module.get_submodule(where).register_forward_hook(lambda m, a, y: y * 2)
    fused, unfused, report = twins(module)
    assert report.fused == []
    assert report.not_fused[0][1].endswith("has a forward_hook")
    require_twins(fused, unfused)
