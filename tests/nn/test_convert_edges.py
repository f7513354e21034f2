"""Layers with an unusual weight or class: parametrized, pruned, normalised, subclasses, meta,
inference mode, memory that is not contiguous. They work, or the report has the reason.
"""

import copy
import functools

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import (
    parametrizations,
    parametrize,
    prune,
    remove_spectral_norm,
    remove_weight_norm,
    spectral_norm,
    weight_norm,
)

from tests.moe.test_convert import BLOCKS, tokens

K, N = 32, 48


def sequential(**arguments):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N, **arguments), nn.Linear(N, K, **arguments))


def batch(**arguments):
    return torch.randn(8, K, generator=torch.Generator().manual_seed(1)).to(**arguments)


def convert(model, recipe="mxfp8", **arguments):
    return mf.quantize_(model, recipe, **arguments)


class Half(nn.Module):
    def forward(self, weight):
        return weight * 0.5


def half(layer):
    return parametrize.register_parametrization(layer, "weight", Half())


WEIGHTS = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "parametrize": half,
    "parametrized weight_norm": parametrizations.weight_norm,
    "parametrized spectral_norm": parametrizations.spectral_norm,
}
REASONS = {
    "weight_norm": "no parameter, but computed before each forward (WeightNorm)",
    "spectral_norm": "no parameter, but computed before each forward (SpectralNorm)",
    "prune": "no parameter, but computed before each forward (L1Unstructured)",
}
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")


# ---- computed weights ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("arguments", [{}, {"primary": True}])
def test_a_computed_weight_is_left_out_with_a_reason(name, arguments):
    model, unconverted = sequential(), sequential()
    twin = unconverted[0]
    for layer in (model[0], twin):
        torch.manual_seed(2)  # of spectral_norm's start
        WEIGHTS[name](layer)
    report = convert(model, **arguments)
    assert report.converted == [("1", "mxfp8")]
    assert REASONS.get(name, "parametrized (torch.nn.utils.parametrize)") in report.skipped[0][1]
    model.eval()
    twin.eval()
    assert torch.equal(model[0](batch()), twin(batch()))
    model.train()
    model(batch()).sum().backward()


def test_a_weight_that_is_no_parameter():
    model = sequential()
    weight = model[0].weight.detach()
    del model[0].weight
    model[0].weight = weight
    model[0].register_forward_pre_hook(lambda *_: None)
    report = convert(model)
    assert report.skipped == [("0", "its weight is no parameter")]
    model(batch()).sum().backward()


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_layer_that_is_tied_to_a_computed_weight(name):
    model = sequential()
    model[1] = nn.Linear(K, N)
    model[1].weight = model[0].weight
    WEIGHTS[name](model[0])
    report = convert(model)
    assert report.converted == [("1", "mxfp8")]
    model[1](model[0].weight.new_ones(4, K)).sum().backward()
    assert model[1].weight.grad is not None


def test_a_pruned_bias():
    model = sequential()
    prune.l1_unstructured(model[0], "bias", 0.3)
    report = convert(model)
    assert len(report.converted) == 2
    y = model[0](torch.zeros(1, K))
    assert torch.equal(y[0], model[0].bias)
    assert (y == 0).sum() >= N // 4


def product(layer, x):
    """Computes the layer's result from its present weight, under its recipe."""
    return mf.linear(x, layer.weight.detach(), layer.bias, "mxfp8")


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("primary", [False, True])
def test_a_converted_layer_whose_weight_becomes_computed(name, primary):
    model = sequential()
    convert(model, primary=primary)
    WEIGHTS[name](model[0])
    model.eval()
    for _ in range(3):
        assert torch.equal(model[0](batch()), product(model[0], batch()))
    model.train()
    model(batch()).sum().backward()
    computed = [p for p_name, p in model[0].named_parameters() if "bias" not in p_name]
    assert computed
    assert all(p.grad is not None for p in computed)
    with torch.no_grad():
        for parameter in computed:
            parameter.mul_(2)
    model.eval()
    assert torch.equal(model[0](batch()), product(model[0], batch()))

    keys = {key for key in model.state_dict()}
    mf.restore_(model)
    assert {key for key in model.state_dict()} == keys
    assert not any(isinstance(module, mf.Linear) for module in model.modules())
    assert not any(isinstance(p, mf.QuantizedTensor) for p in model.parameters())
    layer = model[0]
    assert torch.equal(layer(batch()), nn.functional.linear(batch(), layer.weight, layer.bias))


@pytest.mark.parametrize("when", ["first", "root"])
def test_random_bits_of_a_layer_that_is_parametrized_later(when):
    model = sequential() if when == "first" else nn.Linear(K, N)
    layer = model[0] if when == "first" else model
    convert(model, "nvfp4")
    half(layer)
    x = batch().requires_grad_()

    def gradient():
        return torch.autograd.grad(model(x).square().sum(), x)[0]

    assert not torch.equal(gradient(), gradient())
    twin = copy.deepcopy(model)
    mf.restore_(model)
    assert isinstance(layer, nn.Linear)
    assert not isinstance(layer, mf.Linear)
    assert not model._forward_pre_hooks
    assert parametrize.is_parametrized(layer)
    assert torch.equal(gradient(), gradient())
    assert isinstance(twin[0] if when == "first" else twin, mf.Linear)  # a copy stays as it is
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer) is nn.Linear
    assert type(layer.weight) is nn.Parameter


@pytest.mark.parametrize(
    ("add", "remove"),
    [
        (weight_norm, remove_weight_norm),
        (spectral_norm, remove_spectral_norm),
        (
            functools.partial(prune.l1_unstructured, name="weight", amount=0.3),
            functools.partial(prune.remove, name="weight"),
        ),
    ],
)
def test_a_computed_weight_stays_in_a_restored_layer(add, remove):
    model = nn.Sequential(nn.Linear(32, 32))
    mf.quantize_(model, "mxfp8", keep="nothing")
    add(model[0])
    model(torch.randn(4, 32))
    values = model[0].weight.detach().clone()
    mf.restore_(model)
    assert torch.equal(model[0].weight, values)
    remove(model[0])
    assert isinstance(model[0].weight, nn.Parameter)


@pytest.mark.parametrize("norm", [spectral_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to("cpu"),
        lambda model: model.bfloat16(),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: model.load_state_dict(model.state_dict(), assign=True),
        lambda model: setattr(model[0], "recipe", "nvfp4"),
    ],
)
def test_a_change_computes_no_weight(norm, change):
    """Runs no power iteration, as a plain nn.Linear runs none: u and v are those of the twin."""
    model, twin = sequential(), sequential()
    convert(model, "nvfp4")
    for m in (model, twin):
        torch.manual_seed(2)  # of spectral_norm's start
        norm(m[0])
    before = [b.clone() for b in model.buffers()]
    change(model)
    change(twin)
    assert model.training
    assert before
    for a, b, c in zip(before, model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(b, c)
        assert torch.equal(a.to(b.dtype), b)


class CountedHalf(Half):
    """Counts how often it computes a weight."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return super().forward(weight)


COMPUTED = {
    "layers": lambda: (sequential(), batch()),
    "feed-forward": lambda: (mf.MLP(K, N, bias=True), batch()),
    **{name: lambda make=make: (make(), tokens()) for name, make in BLOCKS.items()},
}


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_forward_computes_each_weight_once(name, is_trained):
    """A parametrization may be stochastic, or change with each call, as power iterations do."""
    torch.manual_seed(0)
    model, x = COMPUTED[name]()
    model = nn.Sequential(model)
    mf.quantize_(model, "mxfp8", keep="nothing")
    counters = []
    for module in list(model.modules()):
        for parameter, value in list(module._parameters.items()):
            if value is not None:
                counters.append(CountedHalf())
                parametrize.register_parametrization(module, parameter, counters[-1])
                counters[-1].calls = 0
    with torch.set_grad_enabled(is_trained):
        y = model(x)
        if is_trained:
            y.square().sum().backward()
    assert {counter.calls for counter in counters} == {1}


def test_replicas_under_delayed_scaling_are_refused():
    model = nn.Sequential(nn.Linear(32, 32))
    mf.quantize_(model, "fp8_delayed", keep="nothing")
    with pytest.raises(ValueError, match=r"^0: expected one process a GPU under delayed scaling"):
        model[0]._replicate_for_data_parallel()
    model.eval()[0]._replicate_for_data_parallel()


def test_a_parametrization_is_removed_while_converted():
    model = sequential()
    weight = model[0].weight
    convert(model)
    half(model[0])
    parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)
    assert type(model[0]) is mf.Linear
    assert torch.equal(model[0](batch()), product(model[0], batch()))
    mf.restore_(model)
    assert type(model[0]) is nn.Linear
    assert model[0].weight is weight


# ---- modules of torch.jit ------------------------------------------------------------------------


class Scriptable(nn.Module):
    """Has parameters of each number of dimensions, buffers and layers."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(K, K), nn.LayerNorm(K)
        self.matrices = nn.Parameter(torch.ones(2, 3, 4))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        return self.norm(self.layer(x)) + self.matrices.sum() + self.seen


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
@pytest.mark.parametrize("kind", [torch.jit.script, lambda m: torch.jit.trace(m, batch())])
def test_modules_of_torch_jit_are_left_out(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, K), kind(Scriptable()), nn.Linear(K, K))

    def loss(model, x):
        return model(x).square().mean()

    rows = mf.inspect(model, batch(), ["mxfp8"], loss=loss).rows
    assert {row.layer for row in rows} == {"0", "2"}
    report = mf.quantize_(model, "nvfp4_served", keep="nothing", fuse=True)
    assert [name for name, _ in report.converted] == ["0", "2"]
    (reason,) = (why for name, why in report.skipped if name == "1.matrices")
    assert reason.endswith("a module of torch.jit")
    loss(model, batch()).backward()
    mf.step(model)
    assert set(mf.calibrate(model, [batch()])) == {"0", "2"}
    mf.load_training_state(model, mf.training_state(model))
    assert len(mf.inspect(model, batch(), loss=loss).rows) == 2
    mf.restore_(model)
    assert not any(isinstance(m, mf.Linear) for m in model.modules())


# ---- subclasses ----------------------------------------------------------------------------------


class Doubled(mf.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def test_a_subclass_of_linear_stays_one():
    torch.manual_seed(0)
    model = nn.Sequential(Doubled(K, N, recipe="mxfp8"), nn.Linear(N, K))
    assert type(model[0]) is Doubled
    assert torch.equal(model[0](batch()), 2 * product(model[0], batch()))
    report = convert(model)
    assert report.skipped == [("0", "already converted (mxfp8); mf.restore_ undoes that")]
    assert type(model[0]) is Doubled
    for make in (lambda: None, lambda: half(model[0])):
        make()
        with pytest.raises(ValueError, match=r"was built as a .*Doubled, a subclass of minifloat"):
            mf.restore_(model)
        assert isinstance(model[0], Doubled)
        assert type(model[1]) is mf.Linear
    mf.restore_(model[1])
    assert type(model[1]) is nn.Linear


def test_tied_layers_of_two_recipes_are_gathered_in_the_compute_dtype():
    """FSDP2 gathers one parameter, whose codes one of them alone could read."""
    for recipes, is_gathered in (("*: mxfp8", True), ("0: mxfp8; 1: nvfp4", False)):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model[1].weight = model[0].weight
        gather = mf.quantize_(model, recipes, keep="nothing").gather
        tied = ["it is tied to another reader's" in gather[name] for name in ("0", "1")]
        assert tied == [not is_gathered] * 2, gather


@pytest.mark.parametrize("gather", ["compute_dtype", "codes"])
def test_a_layer_that_fsdp_shards_alone_is_restored_or_refused(gather):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = sequential()
        convert(model, "0: mxfp8", gather=gather)
        fully_shard(model[0])
        if gather == "codes":
            with pytest.raises(ValueError, match="restore it before fully_shard"):
                mf.restore_(model)
            assert isinstance(model[0], mf.Linear)
        else:
            mf.restore_(model)
            assert isinstance(model[0], FSDPModule)
            assert not isinstance(model[0], mf.Linear)
        model(batch()).sum().backward()
    finally:
        dist.destroy_process_group()


def test_a_new_seed_after_all_parts_were_restored():
    def model_of():
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(nn.Linear(K, K)), nn.Linear(K, K))

    model, fresh = model_of(), model_of()
    convert(model, "nvfp4")
    mf.restore_(model[0][0])
    with pytest.raises(ValueError, match="seed: expected 0, which this model's converted layers"):
        convert(model, "nvfp4", seed=3)
    mf.restore_(model[1])
    grads = []
    for m in (model, fresh):
        convert(m, "nvfp4", seed=3)
        for _ in range(2):
            m(batch()).square().sum().backward()
        grads.append([p.grad for p in m.parameters()])
        assert mf.training_state(m)["rng"].tolist() == [3, 2]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_delayed"])
def test_a_forward_that_is_wrapped_after_conversion_is_restored(recipe):
    """Wraps methods as accelerate and PEFT do, with the bound method in an attribute or closure."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    x = torch.randn(4, 32)
    want = model(x)
    mf.quantize_(model, recipe, keep="nothing")
    for layer in model:
        layer._old_forward = layer.forward
        layer.forward = functools.partial(lambda module, x: module._old_forward(x), layer)
    method = model[1].forward
    model[1].forward = lambda x: method(x)
    assert not torch.equal(model(x), want)
    mf.restore_(model)
    assert torch.equal(model(x), want)


LAZY = {
    "linear": (lambda: nn.LazyLinear(K), ["2"]),
    "convolution": (lambda: nn.LazyConv1d(4, 1), ["2.weight", "2.bias"]),
    "norm": (lambda: nn.LazyBatchNorm1d(), ["2.weight", "2.bias"]),
}
CHOICES = [
    {"recipe": "mxfp8"},
    {"recipe": "nvfp4", "fuse": True},
    {"recipe": "mxfp8", "primary": True},
    {"recipe": "mxfp8", "keep": "head"},
    {"recipe": "mxfp8", "keep": "nvfp4_paper"},
]


@pytest.mark.parametrize("arguments", CHOICES)
@pytest.mark.parametrize("kind", LAZY)
def test_a_lazy_module_is_named_and_the_rest_converted(kind, arguments):
    make, names = LAZY[kind]
    model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, K), make())
    model.blocks = nn.ModuleList(nn.Sequential(nn.Linear(K, K), make()) for _ in range(8))
    report = mf.quantize_(model, **{"keep": "nothing"} | arguments)
    lazy = [name for name, why in report.skipped if why.startswith("lazy: it has no shape")]
    assert [name for name in lazy if not name.startswith("blocks.")] == names
    assert len(lazy) == 9 * len(names)
    converted = [name for name, _ in report.converted]
    assert converted
    if arguments.keys() <= {"recipe", "fuse", "primary"}:
        assert converted == ["0", "1", *(f"blocks.{i}.0" for i in range(8))]
    mf.step(model)
    mf.restore_(model)


def test_a_lazy_layer_converts_after_its_first_forward():
    model = nn.Sequential(nn.LazyLinear(N))
    with pytest.raises(ValueError, match="nothing to convert; 1 x lazy: it has no shape"):
        mf.quantize_(model, "mxfp8")
    model(batch())
    assert mf.quantize_(model, "mxfp8").converted == [("0", "mxfp8")]
