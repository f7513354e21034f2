"""A feed-forward that is one op has the bits of its layers and activation one by one."""

import copy
import functools
import io
import pickle
from itertools import product

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from minifloat.nn.fuse import mlp
from minifloat.nn.fuse.mlp import one_op
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint

from tests.support.fused_models import (
    HIDDEN,
    PRESETS,
    READ_AS_VALUES,
    RUNS,
    WIDTH,
    FeedForward,
    LibraryActivation,
    Mlp,
    block,
    hidden,
    results,
    unfused,
    without_up_inputs,
)
from tests.support.same_bits import require_same_results
from tests.support.saved_bytes import saved_bytes

ACTIVATIONS = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
}


def converted(module, recipe="mxfp8", dtype=torch.bfloat16, **options):
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.2)
    module = nn.Sequential(module).to(dtype)
    report = mf.quantize_(module, recipe, **{"fuse": True, **options})
    return module, report


@pytest.fixture
def calls(monkeypatch):
    """Returns a list that grows with each call of the op."""
    found = []
    monkeypatch.setattr(mlp, "one_op", lambda *a: found.append(1) or one_op(*a))
    return found


# Compiled with amax histories, with random bits, and with neither; eagerly under every preset.
COMPILED = ("fp8_delayed", "nvfp4", "mxfp8")


def of_presets():
    for recipe, run in product(PRESETS, RUNS):
        is_slow = run == "compiled" and recipe not in COMPILED
        yield pytest.param(recipe, run, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(("recipe", "run"), of_presets())
def test_every_preset_in_a_block(recipe, run, calls):
    fused = block(recipe, bias=True)
    plain = unfused(fused, activation_of_torch=recipe in READ_AS_VALUES)
    got = results(fused, RUNS[run](fused))
    assert bool(calls) == (recipe not in READ_AS_VALUES)
    want = results(plain, RUNS[run](plain))
    require_same_results(without_up_inputs(got), without_up_inputs(want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_without_a_gate(name, dtype, calls):
    fused, report = converted(Mlp(ACTIVATIONS[name]()), dtype=dtype)
    assert report.fused == [("0", f"fc1, fc2 and {name} are one op")]
    plain = unfused(fused)
    plain[0].act_fn = LibraryActivation(name)
    for run in RUNS.values():
        require_same_results(results(fused, run(fused)), results(plain, run(plain)))
    assert len(calls) >= 6


def test_steps_of_delayed_scaling():
    fused = block("fp8_delayed")
    plain = unfused(fused)
    for seed in range(3):
        got, want = (results(m, None, hidden(seed=seed)) for m in (fused, plain))
        require_same_results(without_up_inputs(got), without_up_inputs(want))
        mf.step(fused)
        mf.step(plain)


def test_micro_batches_reuse_the_codes_of_weights(calls):
    fused, _ = converted(FeedForward())
    plain = unfused(fused)
    for seed in range(4):
        for model in (fused, plain):
            model(hidden(seed=seed)).float().square().mean().backward()
    for a, b in zip(fused.parameters(), plain.parameters()):
        assert torch.equal(a.grad, b.grad)
    assert fused[0].w1.weight_codes.cached is not None
    assert len(calls) == 4


@pytest.mark.parametrize("run", ["eager", "compiled"])
@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "mxfp8", "nvfp4"])
def test_primary_weights(recipe, run, calls):
    fused, _ = converted(FeedForward(), recipe, primary=True)
    plain = unfused(fused)
    got, want = results(fused, RUNS[run](fused)), results(plain, RUNS[run](plain))
    require_same_results(got, want)
    assert calls
    fused[0].w2.weight = nn.Parameter(plain[0].w2.weight.detach().dequantize())
    calls.clear()
    fused(hidden())
    assert not calls  # codes beside values


def test_autocast_and_other_dtypes_call_the_layers(calls):
    fused, _ = converted(FeedForward(), dtype=torch.float32)
    plain = unfused(fused, activation_of_torch=True)
    x = hidden(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        got, want = fused(x), plain(x)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
    assert not calls
    x = hidden()
    assert torch.equal(fused(x), plain(x))
    x = x.detach().to("meta")
    assert fused.requires_grad_(False).to("meta")(x).shape == x.shape
    assert not calls


def test_other_calls_reach_the_modules_own_forward(calls):
    class Twice(FeedForward):
        def twice(self, x):
            return self.w1(x) * 2

    fused, report = converted(Twice())
    assert report.fused
    assert isinstance(fused[0], Twice)
    assert isinstance(fused[0], mf.MLP)
    x, plain = hidden(), unfused(fused, activation_of_torch=True)
    assert torch.equal(fused[0](x=x), plain[0](x))
    assert torch.equal(fused[0].twice(x), fused[0].w1(x) * 2)
    assert not calls
    fused(x)
    assert len(calls) == 1


def test_layers_that_were_replaced_are_called(calls):
    fused, _ = converted(FeedForward())
    fused[0].w3 = nn.Linear(WIDTH, HIDDEN).bfloat16()
    assert torch.isfinite(fused(hidden())).all()
    fused, _ = converted(FeedForward())
    fused[0].w1.recipe = "fp8_rowwise"
    fused(hidden())
    fused, _ = converted(FeedForward())
    seen = []
    forward = fused[0].w1.forward
    fused[0].w1.forward = lambda x: seen.append(x) or forward(x)  # as accelerate does
    fused(hidden())
    assert len(seen) == 1
    assert not calls


def test_inference_and_evaluation():
    fused, _ = converted(FeedForward(), "fp8_delayed")
    plain = unfused(fused)
    for model in (fused, plain):
        model.eval()
    x = hidden().detach()
    with torch.inference_mode():
        assert torch.equal(fused(x), plain(x))
    with torch.no_grad():
        assert torch.equal(fused(x), plain(x))
    assert fused[0].w1.amax_history.abs().sum() == 0


@pytest.mark.parametrize("where", ["0.w1", "0.w2", "0.w3"])
def test_hooks_see_tensors(where, calls):
    fused, _ = converted(FeedForward())
    plain = unfused(fused, activation_of_torch=True)
    seen = []
    fused.get_submodule(where).register_forward_hook(lambda m, a, y: seen.extend([*a, y]))
    got, want = results(fused), results(plain)
    assert not calls
    assert seen
    require_same_results(got, want)


def test_hooks_of_all_modules_see_the_layers(calls):
    fused, _ = converted(FeedForward())
    seen = []
    handle = register_module_forward_hook(lambda *call: seen.append(call[0]))
    try:
        fused(hidden())
    finally:
        handle.remove()
    assert {fused[0].w1, fused[0].w2, fused[0].w3} <= {*seen}
    assert not calls


def test_reports():
    whole = ("0", "w1, w3, w2 and silu are one op")
    assert converted(FeedForward())[1].fused == [whole]
    report = converted(FeedForward(), "*: mxfp8; *.w2: fp8_rowwise")[1]
    assert report.not_fused == [("0", "its layers have several recipes")]
    report = converted(FeedForward(), "fp8_rowwise_gw_hp")[1]
    assert "in high precision" in report.not_fused[0][1]
    assert converted(FeedForward(), fuse=False)[1].fused == []


def test_what_is_no_candidate():
    """Modules of other shapes, or with more arguments and no activation of their own, have no row.

    One with other parameters is told to part them from its feed-forward.
    """

    class Normed(FeedForward):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH)

    class Routed(FeedForward):
        def forward(self, x, routes):
            return super().forward(x)

    two = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN))
    for module in (Routed(), two):
        report = converted(module)[1]
        assert report.fused == report.not_fused == []
    report = converted(Normed())[1]
    assert report.fused == []
    assert "more than the feed-forward of w1, w2 and w3" in report.not_fused[0][1]


def test_sequential_and_fake_tensors(calls):
    report = converted(Mlp(nn.GELU(), bias=False))[1]
    parts = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Dropout(0.0), nn.Linear(HIDDEN, WIDTH)
    chain, of_chain = converted(nn.Sequential(*parts))
    assert of_chain.fused == [("0", "0, 3 and gelu are one op")]
    assert chain[0][1:](torch.ones(2, HIDDEN).bfloat16()).shape == (2, WIDTH)
    chain(hidden())
    assert len(calls) == 1
    with FakeTensorMode():
        model = nn.Sequential(Mlp(nn.GELU(), bias=False))
        assert mf.quantize_(model, "mxfp8", fuse=True).fused == report.fused


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_public_module(activation, gated, calls):
    """An mf.MLP is one op without fuse=True, and again its layers after mf.restore_."""
    torch.manual_seed(0)
    model = mf.MLP(WIDTH, HIDDEN, activation=activation, gated=gated, dtype=torch.bfloat16)
    x, before = hidden(), copy.deepcopy(model)
    want = before(x)
    report = mf.quantize_(model, "mxfp8")
    names = "gate, up, down" if gated else "up, down"
    assert report.fused == [("", f"{names} and {activation} are one op")]
    found = results(model)
    assert len(calls) == 1
    require_same_results(results(pickle.loads(pickle.dumps(model))), found)
    torch.testing.assert_close(found["y"], want.detach(), rtol=0.1, atol=0.1)
    mf.restore_(model)
    assert repr(model) == repr(before)
    assert torch.equal(model(x), want)


def test_bad_arguments_of_the_public_module():
    with pytest.raises(ValueError, match="expected one of silu, gelu, gelu_tanh, got 'relu'"):
        mf.MLP(WIDTH, HIDDEN, activation="relu")
    with pytest.raises(TypeError, match="gated"):
        mf.MLP(WIDTH, HIDDEN, gated=1)
    with pytest.raises((TypeError, ValueError), match="hidden"):
        mf.MLP(WIDTH, 2.5)


def test_activations_of_other_libraries():
    class Gelu(nn.Module):  # Hugging Face's GELUActivation
        def __init__(self):
            super().__init__()
            self.act = nn.functional.gelu

        def forward(self, input):
            return self.act(input)

    class Tanh(nn.Module):  # Hugging Face's GELUTanh
        def __init__(self):
            super().__init__()
            self.act = functools.partial(nn.functional.gelu, approximate="tanh")

        def forward(self, input):
            return self.act(input)

    class Written(nn.Module):
        def forward(self, x):
            return 0.5 * x * (1 + torch.erf(x / 2**0.5))

    class Ignored(nn.Module):
        def forward(self, x):
            F.silu(x)
            return x

    report = converted(Mlp(Ignored()))[1]
    ignored = "F.silu(x) of act_fn is no part of a feed-forward"
    assert report.not_fused == [("0", ignored)]
    assert converted(Mlp(Gelu()))[1].fused == [("0", "fc1, fc2 and gelu are one op")]
    assert converted(Mlp(Tanh()))[1].fused == [("0", "fc1, fc2 and gelu_tanh are one op")]
    report = converted(Mlp(Written()))[1]
    assert report.not_fused == [("0", "0.5 * x of act_fn is no part of a feed-forward")]
    relu = "F.relu(input, inplace=self.inplace) of act_fn is no part of a feed-forward"
    assert converted(Mlp(nn.ReLU()))[1].not_fused == [("0", relu)]


def test_kept_copied_and_restored():
    torch.manual_seed(0)
    model = nn.Sequential(FeedForward()).bfloat16()
    before, feed = copy.deepcopy(model), model[0]
    parameters, state = dict(model.named_parameters()), dict(feed.__dict__)
    mf.quantize_(model, "mxfp8", fuse=True)
    assert model[0] is feed
    assert isinstance(feed, FeedForward)
    assert list(model.state_dict()) == list(before.state_dict())
    assert all(p is parameters[name] for name, p in model.named_parameters())
    want, stream = results(model), io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [
        copy.copy(model),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stream, weights_only=False),
    ]
    for twin in copies:
        require_same_results(results(twin), want)
        assert type(twin[0]) is type(feed)
    mf.restore_(model)
    assert type(feed) is FeedForward
    assert type(feed.w1) is nn.Linear
    assert feed.__dict__ == state
    assert repr(model) == repr(before)
    assert torch.equal(model(hidden()), before(hidden()))
    assert type(mf.restore_(copies[-1])[0]) is FeedForward


def test_a_forward_that_a_wrapper_keeps_is_restored(calls):
    """As accelerate's hooks keep it."""
    model = nn.Sequential(FeedForward(), Mlp(nn.GELU(), bias=False))
    want = model(hidden().float())
    mf.quantize_(model, "mxfp8", fuse=True)
    for part in model:
        part.forward = functools.partial(lambda kept, *args: kept(*args), part.forward)
    assert not torch.equal(model(hidden().float()), want)
    assert len(calls) == 2
    mf.restore_(model)
    assert torch.equal(model(hidden().float()), want)


def test_two_calls_for_one_model():
    model = nn.Sequential(FeedForward(), FeedForward()).bfloat16()
    first = mf.quantize_(model, "mxfp8", filter_fqns=["1."], fuse=True)
    kept = model[0].mlp_parts
    second = mf.quantize_(model, "fp8_rowwise", filter_fqns=["0."], fuse=True)
    assert [name for name, _ in first.fused] == ["0"]
    assert [name for name, _ in second.fused] == ["0", "1"]
    assert model[0].mlp_parts == kept
    assert type(model[0]) is type(model[1])


def test_an_error_leaves_modules_alone(monkeypatch):
    model = nn.Sequential(FeedForward(), mf.MLP(WIDTH, HIDDEN), nn.Linear(WIDTH, WIDTH))

    def fail(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr("minifloat.nn.fuse.find_mlps.clean_name", fail)
    with pytest.raises(ZeroDivisionError):
        mf.quantize_(model, "mxfp8", fuse=True)
    assert type(model[0]) is FeedForward
    assert type(model[0].w1) is nn.Linear
    assert type(model[1].up) is nn.Linear


def test_fuse_is_a_bool():
    with pytest.raises(TypeError, match="fuse"):
        block(fuse="no")


@pytest.mark.parametrize("run", ["eager", "compiled"])
@pytest.mark.parametrize("fuse", [True, False])
def test_codes_of_weights_that_backward_casts_again(fuse, run):
    model = block("mxfp8", fuse=fuse)
    small = block("mxfp8", fuse=fuse, recompute="weight")
    assert small.attention.wq.recompute == "weight"
    assert "recompute='weight'" in repr(small.attention.wq)
    require_same_results(results(small, RUNS[run](small)), results(model, RUNS[run](model)))
    copies = (copy.deepcopy(small), pickle.loads(pickle.dumps(small)))
    assert all(twin.attention.wq.recompute == "weight" for twin in copies)
    assert "recompute" not in mf.restore_(small).attention.wq.__dict__


@pytest.mark.parametrize("order", ["one by one", "two in flight"])
def test_checkpointed_forwards_save_weights_alike(order):
    """A recomputed forward reads no cached codes where the forward before it saved a weight."""
    found = []
    for recompute in (None, "weight"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        mf.quantize_(model, "fp8_rowwise", recompute=recompute)
        for _ in range(2):
            losses = []
            for _ in range(2):
                x = hidden(torch.float32)
                losses.append(checkpoint(model, x, use_reentrant=False).square().sum())
                if order == "one by one":
                    losses.pop().backward()
            for loss in losses:
                loss.backward()
            mf.step(model)
        found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_saved_bytes_of_a_layer():
    def saved(recompute):
        layer, _ = converted(nn.Linear(WIDTH, 4 * WIDTH), "fp8_rowwise", recompute=recompute)
        return saved_bytes(lambda: layer(hidden()), layer.parameters())

    assert saved("weight") <= saved(None) - WIDTH * 4 * WIDTH


def test_autocast_saves_codes_and_no_rounded_weight():
    """Under both choices: a rounded copy of the weight would have more bytes than its codes."""

    def saved(recompute):
        linear = nn.Linear(WIDTH, 4 * WIDTH)
        layer, _ = converted(linear, "fp8_rowwise", torch.float32, recompute=recompute)
        with torch.autocast("cpu", torch.bfloat16):
            return saved_bytes(lambda: layer(hidden(torch.float32)), layer.parameters())

    assert saved("weight") == saved(None)


def test_bad_recompute():
    with pytest.raises(ValueError, match="recompute: expected one of None, weight, got 'small'"):
        block(recompute="small")
