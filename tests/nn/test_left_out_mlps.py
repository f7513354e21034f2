"""A module whose source is none of a feed-forward, or cannot be told, is left out with the reason.

Every module here is converted twice, with fuse=True and without. Both then compute the same bits,
forward and backward, in training and in evaluation, and leave the same buffers and lists.
"""

import functools
import types

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.traced_mlps import AUXILIARY, module_of, plain, require_twins, twins

COUNT = 0  # a global that a forward below writes
NO_PART = "{} is no part of a feed-forward"


def clamps(module, x):
    gate, up = module.w1(x).clamp(max=10.0), module.w3(x).clamp(-10.0, 10.0)
    return module.w2(F.silu(gate) * up)


def clamps_the_gate(module, x):
    return module.w2(F.silu(module.w1(x).clamp(max=10.0)) * module.w3(x))


def branches_on_rows(module, x):
    if x.shape[1] > 8:
        return module.w2(F.silu(module.w1(x)) * module.w3(x))
    return module.w2(F.relu(module.w1(x)) * module.w3(x))


def cuts_rows(module, x):
    return module.w2(F.silu(module.w1(x[:, :64])) * module.w3(x[:, :64]))


def updates_a_buffer(module, x):
    module.ema.lerp_(x.detach().abs().mean(), 0.1)
    return module.w2(F.silu(module.w1(x)) * module.w3(x))


def writes_an_attribute(module, x):
    module.calls = module.calls + 1
    return module.w2(F.silu(module.w1(x)) * module.w3(x))


def writes_a_global(module, x):
    global COUNT
    COUNT += 1
    return module.w2(F.silu(module.w1(x)) * module.w3(x))


def appends(module, x):
    AUXILIARY.append(x)
    return module.w2(F.silu(module.w1(x)) * module.w3(x))


def appends_in_an_argument(module, x):
    return module.w2(F.silu(module.w1(x), AUXILIARY.append(x)) * module.w3(x))


def computes_without_gradients(module, x):
    with torch.no_grad():
        gate = module.w1(x)
    return module.w2(F.silu(gate) * module.w3(x))


@torch.no_grad()
def has_no_gradients(module, x):
    return module.w2(F.silu(module.w1(x)) * module.w3(x))


def stops_a_gradient(module, x):
    return module.w2(F.silu(module.w1(x)).detach() * module.w3(x))


def drops(module, x):
    return module.w2(F.dropout(F.silu(module.w1(x)) * module.w3(x), 0.5, module.training))


def drops_by_default(module, x):
    return F.dropout(module.w2(F.silu(module.w1(x)) * module.w3(x)), training=module.training)


def adds_a_term(module, x):
    return module.w2(F.silu(module.w1(x)) * module.w3(x)) + 1e-3


def scales(module, x):
    return module.w2(F.silu(module.w1(x)) * module.w3(x) * module.calls)


def calls_a_function(module, x):
    return plain(module, x)


def tries(module, x):
    try:
        return module.w2(F.silu(module.w1(x)) * module.w3(x))
    finally:
        AUXILIARY.append(x)


def activates_twice(module, x):
    gate = module.w1(x)
    other = F.silu(gate, inplace=True)
    gate = F.silu(gate)
    del other
    return module.w2(gate * module.w3(x))  # of what the first call has written


def activates_x(module, x):
    return module.w2(module.w1(x) * module.w3(F.silu(x)))


def multiplies_products(module, x):
    return module.w2(module.w1(x) * module.w3(x))


def multiplies_by_itself(module, x):
    return module.w2(F.silu(module.w1(x)) * module.w1(x))


def calls_a_layer_that_nothing_reads(module, x):
    up = module.w3(x)
    up = module.w3(x)
    return module.w2(F.silu(module.w1(x)) * up)


def returns_the_hidden_tensor(module, x):
    return F.silu(module.w1(x)) * module.w3(x)


def writes_self(module, x):
    module = module.part
    return module.w2(F.silu(module.w1(x)) * module.w3(x))


def takes_more(module, x, scale=1.0):
    return module.w2(F.silu(module.w1(x)) * module.w3(x))


def has_a_local_function(module, x):
    F = module.functions
    return module.w2(F.silu(module.w1(x)) * module.w3(x))


def by_a_container(module, x):
    return module.w2(F.silu(module.all[0](x)) * module.w3(x))


def by_another_module(module, x):
    return module.w2(F.silu(module.part.w1(x)) * module.w3(x))


def by_another_name(module, x):
    return module.w2(F.silu(module.other(x)) * module.w3(x))


def by_a_partial(module, x):
    return module.w2(module.bound(module.w1(x)) * module.w3(x))


def by_a_property(module, x):
    return module.w2(module.computed(module.w1(x)) * module.w3(x))


def of_another_source():
    """Returns a function whose file has another text in its lines."""
    scope = {"F": F}
    text = "\n" * (returns_the_hidden_tensor.__code__.co_firstlineno - 1)
    text += "def returns_the_hidden_tensor(m, x):\n    return m.w2(F.silu(m.w1(x)).abs() * m.w3(x))"
    exec(compile(text, __file__, "exec"), scope)
    return scope["returns_the_hidden_tensor"]


LAMBDA = lambda m, x: m.w2(F.silu(m.w1(x)) * m.w3(x))  # noqa: E731
UNREAD = "the source of the forward cannot be read"
LEFT_OUT = {
    clamps: NO_PART.format(
        "gate, up = (module.w1(x).clamp(max=10.0), module.w3(x).clamp(-10.0, 10.0))"
    ),
    clamps_the_gate: NO_PART.format("module.w1(x).clamp(max=10.0)"),
    branches_on_rows: NO_PART.format("if x.shape[1] > 8:…"),
    cuts_rows: NO_PART.format("x[:, :64]"),
    updates_a_buffer: NO_PART.format("module.ema.lerp_(x.detach().abs().mean(), 0.1)"),
    writes_an_attribute: NO_PART.format("module.calls = module.calls + 1"),
    writes_a_global: NO_PART.format("global COUNT"),
    appends: NO_PART.format("AUXILIARY.append(x)"),
    appends_in_an_argument: NO_PART.format("F.silu(module.w1(x), AUXILIARY.append(x))"),
    computes_without_gradients: NO_PART.format("with torch.no_grad():…"),
    has_no_gradients: "the forward reads ctx_factory of an enclosing scope",
    stops_a_gradient: NO_PART.format("F.silu(module.w1(x)).detach()"),
    drops: "its forward drops with p=0.5, by "
    "F.dropout(F.silu(module.w1(x)) * module.w3(x), 0.5, module.training)",
    drops_by_default: "its forward drops with p=0.5, by "
    "F.dropout(module.w2(F.silu(module.w1(x)) * module.w3(x)), training=module.training)",
    adds_a_term: NO_PART.format("module.w2(F.silu(module.w1(x)) * module.w3(x)) + 0.001"),
    scales: NO_PART.format("module.calls"),
    calls_a_function: NO_PART.format("plain(module, x)"),
    tries: NO_PART.format("try:…"),
    activates_twice: "its forward reads gate more than once",
    activates_x: NO_PART.format("F.silu(x)"),
    multiplies_products: NO_PART.format("module.w1(x) * module.w3(x)"),
    multiplies_by_itself: "its forward does not call each layer once",
    calls_a_layer_that_nothing_reads: "its forward does not call each layer once",
    returns_the_hidden_tensor: "its forward does not return the last layer's result",
    writes_self: NO_PART.format("module = module.part"),
    takes_more: "the forward takes more than one tensor",
    has_a_local_function: NO_PART.format("module.functions"),
    by_a_container: NO_PART.format("module.all[0](x)"),
    by_another_module: NO_PART.format("module.part.w1(x)"),
    by_another_name: NO_PART.format("if not isinstance(self, Linear):… of other"),
    by_a_partial: NO_PART.format("module.bound(module.w1(x))"),
    by_a_property: "its forward reads computed, which code computes",
    LAMBDA: UNREAD,
    of_another_source(): UNREAD,
}


@pytest.mark.parametrize("forward", LEFT_OUT, ids=lambda f: f.__name__)
def test_a_source_that_differs_is_left_out_with_its_text(forward):
    functions = types.SimpleNamespace(silu=torch.relu)
    module = module_of(forward, calls=2, functions=functions, bound=functools.partial(torch.relu))
    module.part = nn.Module()
    module.part.__dict__.update(w1=module.w1, w2=module.w2, w3=module.w3)
    module.__dict__.update(all=[module.w1], other=module.w1)
    type(module).computed = property(lambda m: F.relu)
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


def acts(module, x):
    return module.w2(module.act(module.w1(x)) * module.w3(x))


class CallsItself(nn.Module):
    def forward(self, x):
        return self.again(x)


class OwnCall(nn.SiLU):
    def __call__(self, x):
        return super().__call__(x) * 2


class OwnGetattr(nn.SiLU):
    def __getattr__(self, name):
        return super().__getattr__(name)


class ByPosition(nn.Module):
    def forward(self, x):
        return F.gelu(x, "tanh")  # which torch refuses


def of_another_keyword():
    return functools.partial(F.gelu, other=1)


def calls_itself():
    part = CallsItself()
    part.__dict__["again"] = part
    return part


def has_a_forward():
    part = nn.SiLU()
    part.forward = torch.relu
    return part


ACTS = {
    nn.ReLU: NO_PART.format("F.relu(input, inplace=self.inplace) of act"),
    calls_itself: "deeper than 8 submodules",
    OwnCall: "its forward calls act, which has a call or forward of its own",
    has_a_forward: "its forward calls act, which has a call or forward of its own",
    ByPosition: NO_PART.format("F.gelu(x, 'tanh') of act"),
    of_another_keyword: NO_PART.format("module.act(module.w1(x))"),
    OwnGetattr: "its forward reads inplace of act, which code computes",
}


@pytest.mark.parametrize("act", ACTS, ids=lambda f: f.__name__)
def test_an_activation_that_differs(act):
    report = mf.quantize_(nn.Sequential(module_of(acts, act=act())), "mxfp8", fuse=True)
    assert report.fused == []
    assert report.not_fused[0][1].endswith(ACTS[act])


def test_a_layer_of_a_closure():
    module = module_of(None)
    w1 = module.w1

    def forward(module, x):
        return module.w2(F.silu(w1(x)) * module.w3(x))

    type(module).forward = forward
    report = mf.quantize_(nn.Sequential(module), "mxfp8", keep="nothing", fuse=True)
    assert report.not_fused == [("0", "the forward reads w1 of an enclosing scope")]


@pytest.mark.parametrize("where", ["w1", "act"])
def test_a_hook_that_is_there_before(where):
    module = module_of(acts, act=nn.SiLU())
    module.get_submodule(where).register_forward_hook(lambda m, a, y: y * 2)
    fused, unfused, report = twins(module)
    assert report.fused == []
    assert report.not_fused[0][1].endswith("has a forward_hook")
    require_twins(fused, unfused)


def test_a_layer_under_two_names():
    module = module_of(plain)
    module.w3 = module.w1
    fused, unfused, report = twins(module)
    assert report.not_fused == [("0", "one of its layers has two names")]
    require_twins(fused, unfused)


class WholeBlock(nn.Module):
    """A block whose forward computes attention's products and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.wq, self.wo = (nn.Linear(32, 32, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(32, 64, bias=False) for _ in range(2))
        self.w2 = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        h = x + self.wo(self.wq(x))
        y = self.norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Adapted(nn.Module):
    """Three layers whose shapes are a feed-forward's, without an activation, and a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.b(self.a(x)) * self.scale


def test_a_feed_forward_within_a_larger_forward_is_reported():
    """Not one of a module whose forward was replaced on the instance: nobody knows what that is."""
    replaced = WholeBlock()
    replaced.forward = lambda x: replaced.wq(x)
    model = nn.ModuleDict({"block": WholeBlock(), "adapted": Adapted(), "replaced": replaced})
    report = mf.quantize_(model, "mxfp8", fuse=True)
    [(name, reason)] = report.not_fused
    assert name == "block"
    assert "more than the feed-forward of w1, w3 and w2; move those into a module" in reason
    assert not mf.quantize_(WholeBlock(), "mxfp8").not_fused
