"""A feed-forward that is one op has the bits of its layers and activation one by one."""

import copy
import functools
import pickle

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from minifloat.nn.fuse.deferred import Deferred
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.compiled import compiled
from tests.support.fused_models import (
    HIDDEN,
    PRESETS,
    RUNS,
    WIDTH,
    FeedForward,
    Mlp,
    block,
    hidden,
    results,
    unfused,
)
from tests.support.same_bits import require_same_results
from tests.support.saved_bytes import saved_bytes

READ_AS_VALUES = ("fp8_rowwise_gw_hp",)
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
    report = mf.quantize_(module, recipe, **{"verbose": False, "fuse": True, **options})
    return module, report


@pytest.fixture
def calls(monkeypatch):
    """Returns a list that grows with each call of the op."""
    found = []
    op = torch.ops.minifloat.mlp
    monkeypatch.setattr(
        "minifloat.nn.fuse.deferred_mlp.mlp", lambda *a, **k: found.append(1) or op(*a, **k)
    )
    return found


def without_up_inputs(found):
    """Drops what up's history has of x: the op reads gate's alone."""
    return {
        name: value[1:5] if name.endswith("w3.amax_history") else value
        for name, value in found.items()
    }


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("recipe", PRESETS)
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
    plain[0].is_plain = name
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


@pytest.mark.parametrize("run", ["eager", "checkpoint", "compiled"])
def test_a_norm_before_one_layer_under_delayed_scaling(run):
    """The op takes the codes of the norm, by the history of the layer that alone reads them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.RMSNorm(WIDTH), Mlp(nn.GELU())).bfloat16()
    report = mf.quantize_(model, "fp8_delayed", fuse=True, verbose=False)
    assert [name for name, _ in report.fused] == ["0", "1"]
    plain = unfused(model)
    plain[1].is_plain = "gelu"
    runs = [(m, RUNS[run](m)) for m in (model, plain)]
    for seed in range(3):
        require_same_results(*[results(m, call, hidden(seed=seed)) for m, call in runs])
        for m, _ in runs:
            mf.step(m)


def test_micro_batches_reuse_the_codes_of_weights(calls):
    fused, _ = converted(FeedForward())
    plain = unfused(fused)
    for seed in range(4):
        for model in (fused, plain):
            model(hidden(seed=seed)).float().square().mean().backward()
    for a, b in zip(fused.parameters(), plain.parameters()):
        assert torch.equal(a.grad, b.grad)
    assert fused[0].w1.weight_codes.codes is not None
    assert len(calls) == 4


def test_what_reads_an_intermediate_result():
    fused, _ = converted(FeedForward())
    plain = unfused(fused)
    reads = {
        "product": lambda f, x: f.w1(x) + 1,
        "activation": lambda f, x: F.silu(f.w1(x)).sum(-1),
        "hidden": lambda f, x: (F.silu(f.w1(x)) * f.w3(x)).relu(),
        "other order": lambda f, x: f.w3(x) * F.silu(f.w1(x)) - 1,
        "other activation": lambda f, x: f.w2(F.relu(f.w1(x)) * f.w3(x)),
        "dropout": lambda f, x: f.w2(F.dropout(F.silu(f.w1(x)) * f.w3(x), 0.0)),
        "up activated": lambda f, x: f.w2(F.silu(f.w3(x)) * f.w1(x)),
        "other input": lambda f, x: f.w2(F.silu(f.w1(x)) * f.w3(x + 1)),
        "numbers": lambda f, x: f.w2(2 * F.silu(f.w1(x))),
        "module order": lambda f, x: f.w1(x) * f.w3(x),
    }
    for name, read in reads.items():
        torch._dynamo.reset()
        for wrap in (lambda run: run, compiled):
            got, want = (
                results(m, wrap(lambda x, m=m, read=read: read(m[0], x) * 1))
                for m in (fused, plain)
            )
            assert type(got["y"]) is torch.Tensor, name
            require_same_results(got, want)


def test_each_layer_multiplies_at_most_once(monkeypatch):
    fused, _ = converted(FeedForward())
    product = fused[0].w1(hidden())
    assert isinstance(product, Deferred)
    assert product.shape == (2, 32, HIDDEN)
    assert (product.dtype, product.requires_grad, product.ndim) == (torch.bfloat16, True, 3)
    calls = []
    multiply = mf.Linear.multiply
    monkeypatch.setattr(mf.Linear, "multiply", lambda *a: calls.append(1) or multiply(*a))
    (product + 1, product.sum(), F.relu(product), F.silu(product) * 2)
    assert len(calls) == 1


def test_grad_modes_and_autocast_of_the_layers_call():
    fused, _ = converted(FeedForward(), dtype=torch.float32)
    x = hidden(torch.float32)
    with torch.no_grad():
        product = fused[0].w1(x)
    assert not product.requires_grad
    assert not (product * 1).requires_grad
    product = fused[0].w1(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert product.dtype == (product * 1).dtype == torch.float32
        assert type(fused[0].w1(x)) is torch.Tensor
        assert fused(x).dtype == torch.bfloat16
    with torch.no_grad():
        assert (fused[0].w1(x) * 1).requires_grad is False


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
    assert not any(isinstance(value, Deferred) for value in seen)
    require_same_results(got, want)


def test_a_write_to_the_input_is_an_error():
    fused, _ = converted(FeedForward())
    x = hidden().detach()
    feed = fused[0]
    product = F.silu(feed.w1(x)) * feed.w3(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        feed.w2(product)


def report_of(forward, recipe="mxfp8", options=()):
    class Feed(FeedForward):
        def forward(self, x):
            return forward(self, x)

    return converted(Feed(), recipe, **dict(options))[1]


def test_reports():
    whole = ("0", "w1, w3, w2 and silu are one op")
    assert report_of(lambda f, x: f.w2(F.silu(f.w1(x)) * f.w3(x))).fused == [whole]
    assert report_of(lambda f, x: f.w2(f.w3(x) * F.silu(f.w1(x)))).fused == [whole]
    cases = {
        "the function relu is no silu or gelu": lambda f, x: f.w2(F.relu(f.w1(x)) * f.w3(x)),
        "gate and up read different inputs": lambda f, x: f.w2(F.silu(f.w1(x)) * f.w3(x + 1)),
        "a result within it has a second reader": lambda f, x: (
            f.w2(F.silu(g := f.w1(x)) * f.w3(x)) + g.sum()
        ),
        "a tensor is modified in place within it": lambda f, x: f.w2(
            F.silu(f.w1(x)) * f.w3(x.add_(1))
        ),
    }
    for reason, forward in cases.items():
        report = report_of(forward)
        assert report.fused == []
        assert reason in [why for _, why in report.not_fused] or "modified" in reason
    forward = lambda f, x: f.w2(F.silu(f.w1(x)) * f.w3(x))  # noqa: E731
    report = report_of(forward, "*: mxfp8; *.w2: fp8_rowwise")
    assert report.not_fused == [("0", "its layers have several recipes")]
    assert "in high precision" in report_of(forward, "fp8_rowwise_gw_hp").not_fused[0][1]
    assert report_of(forward, options={"fuse": False}.items()).fused == []


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
    assert report.not_fused == [("0", "0.act_fn, a Ignored, is no silu or gelu")]
    assert converted(Mlp(Gelu()))[1].fused == [("0", "fc1, fc2 and gelu are one op")]
    assert converted(Mlp(Tanh()))[1].fused == [("0", "fc1, fc2 and gelu_tanh are one op")]
    report = converted(Mlp(Written()))[1]
    assert report.not_fused == [("0", "0.act_fn, a Written, is no silu or gelu")]
    assert "0.act_fn, a ReLU, is no silu or gelu" in str(converted(Mlp(nn.ReLU()))[1])


def test_copies_and_restore():
    fused, _ = converted(FeedForward())
    want = results(fused)
    for twin in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        require_same_results(results(twin), want)
        assert twin[0].w1.fused_mlp is twin[0].w2.fused_mlp
        assert twin[0].w1.fused_mlp.gate is twin[0].w1
    mf.restore_(fused)
    assert type(fused[0].w1) is nn.Linear
    assert "fused_mlp" not in fused[0].w1.__dict__
    assert type(fused[0].w1(hidden())) is torch.Tensor


def test_an_error_leaves_layers_alone(monkeypatch):
    model = nn.Sequential(FeedForward(), nn.Linear(WIDTH, WIDTH))

    def fail(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr("minifloat.nn.fuse.mlp_patterns.Fusion", fail)
    with pytest.raises(ZeroDivisionError):
        mf.quantize_(model, "mxfp8", fuse=True, verbose=False)
    assert all("fused_mlp" not in m.__dict__ for m in model.modules())
    assert type(model[0].w1) is nn.Linear


@pytest.mark.parametrize("run", ["eager", "compiled"])
@pytest.mark.parametrize("fuse", [True, False])
def test_codes_of_weights_that_backward_casts_again(fuse, run):
    model = block("mxfp8", fuse=fuse)
    small = block("mxfp8", fuse=fuse, memory="weights")
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
    for memory in ("speed", "weights"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        mf.quantize_(model, "fp8_rowwise", memory=memory, verbose=False)
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
    def saved(memory):
        layer, _ = converted(nn.Linear(WIDTH, 4 * WIDTH), "fp8_rowwise", memory=memory)
        return saved_bytes(lambda: layer(hidden()), layer.parameters())

    assert saved("weights") <= saved("speed") - WIDTH * 4 * WIDTH


def test_autocast_saves_codes_and_no_rounded_weight():
    """Under both choices: a rounded copy of the weight would have more bytes than its codes."""

    def saved(memory):
        linear = nn.Linear(WIDTH, 4 * WIDTH)
        layer, _ = converted(linear, "fp8_rowwise", torch.float32, memory=memory)
        with torch.autocast("cpu", torch.bfloat16):
            return saved_bytes(lambda: layer(hidden(torch.float32)), layer.parameters())

    assert saved("weights") == saved("speed")


def test_bad_memory():
    with pytest.raises(ValueError, match="memory: expected one of"):
        block(memory="small")
