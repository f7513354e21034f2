"""mf.quantize_ and mf.restore_: their changes to a model, and the report."""

import copy
import io
import pickle
import re

import minifloat as mf
import pytest
import torch
from minifloat.nn.convert.filters import SMALL_KN
from torch import nn


class Block(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.up = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, dim=32, vocabulary=50):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList([Block(dim), Block(dim)])
        self.output = nn.Linear(dim, vocabulary, bias=False)
        self.output.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


ALL = ["layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down", "output"]
TOKENS = torch.arange(24).reshape(2, 12)


def build():
    torch.manual_seed(0)
    return Model()


def names(pairs):
    return [name for name, _ in pairs]


def test_everything_is_kept():
    model = build()
    layer = model.layers[0].down
    calls = []
    layer.register_forward_hook(lambda *_: calls.append("forward"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    before = dict(model.named_parameters())
    modules, keys = dict(model.named_modules()), list(model.state_dict())
    model.layers[1].eval()

    report = mf.quantize_(model, "nvfp4", keep="nothing")
    assert names(report.converted) == ALL
    assert type(layer) is mf.Linear
    assert all(model.get_submodule(name) is module for name, module in modules.items())
    assert all(p is before[name] for name, p in model.named_parameters())
    assert model.output.weight is model.embed.weight
    assert list(model.state_dict()) == keys
    assert not model.layers[1].up.training
    assert model.layers[0].up.training

    model(TOKENS).sum().backward()
    assert calls == ["forward", "backward"]
    assert all(p.grad is not None for p in before.values())


def test_restore_gives_back_the_original():
    model = build()
    unconverted = build()
    modules = dict(model.named_modules())
    before = {name: dict(module.__dict__) for name, module in modules.items()}
    mf.quantize_(model, "fp8_delayed", keep="nothing")
    mf.restore_(model)
    mf.quantize_(model, "nvfp4", keep="nothing")
    mf.restore_(model)
    for name, module in model.named_modules():
        assert module is modules[name]
        assert module.__dict__.keys() == before[name].keys()
        assert not isinstance(module, mf.Linear)
        assert not module._buffers
        assert not module._forward_pre_hooks
    assert torch.equal(model(TOKENS), unconverted(TOKENS))


def test_report_and_reasons(caplog):
    caplog.set_level("INFO", "minifloat")

    class Mine(nn.Linear):
        pass

    model = build()
    model.mine = Mine(4, 4)
    model.half = nn.Linear(4, 4).half()
    model.patched = nn.Linear(4, 4)
    model.patched.forward = lambda x: x
    report = mf.quantize_(
        model,
        "*: nvfp4; layers.1.*: mxfp8; output: bf16",
        filter_fqns=["layers.0.up"],
        filter_fn=lambda module, name: name != "layers.1.up",
    )
    assert report.converted == [("layers.0.down", "nvfp4"), ("layers.1.down", "mxfp8")]
    reasons = dict(report.skipped)
    assert reasons["layers.0.up"] == "filter_fqns has 'layers.0.up'"
    assert reasons["layers.1.up"] == "filter_fn says no"
    assert reasons["output"] == "the recipe map says bf16"
    assert "subclass" in reasons["mine"]
    assert "float16" in reasons["half"]
    assert "replaced on the instance" in reasons["patched"]
    assert "NonDynamicallyQuantizableLinear" in reasons["layers.0.attention.out_proj"]
    assert caplog.messages == [str(report)]
    assert all(name in str(report) for name in ALL)
    second = mf.quantize_(model, "mxfp8")
    why = dict(second.skipped)["layers.0.down"]
    assert why == "already converted (nvfp4); mf.restore_ undoes that"


def test_no_glob_matches():
    model = build()
    report = mf.quantize_(model, "output: nvfp4")
    assert names(report.converted) == ["output"]
    assert dict(report.skipped)["layers.0.up"] == "no glob of the recipe map matches"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"filter_fqns": [""]}, "5 x filter_fqns"),
        ({"recipe": "bf16"}, "the recipe is bf16"),
        ({"filter_fn": lambda *_: False}, "4 x filter_fn says no"),
        ({"model": nn.Sequential(nn.ReLU())}, "no nn.Linear"),
        ({"recipe": "nvfp5"}, "nvfp5"),
        ({"recipe": "*: nvfp4; output mxfp8"}, "expected"),
        ({"recipe": "nvfp4", "filter_fqns": ["auto_filter_small_kn"]}, "with thresholds"),
        ({"seed": 2**63}, r"seed: expected an int from -2\^63"),
    ],
)
def test_bad_input_leaves_the_model_alone(arguments, message):
    arguments = {"model": build(), "recipe": "mxfp8"} | arguments
    model = arguments["model"]
    with pytest.raises(ValueError, match=message):
        mf.quantize_(**arguments)
    assert not any(isinstance(module, mf.Linear) for module in model.modules())


@pytest.mark.parametrize(
    "arguments",
    [
        {"model": "a text"},
        {"filter_fqns": "output"},
        {"filter_fn": 3},
        {"recipe": None},
        {"seed": 0.5},
    ],
)
def test_wrong_types(arguments):
    with pytest.raises(TypeError, match="expected"):
        mf.quantize_(**({"model": build(), "recipe": "mxfp8"} | arguments))


def test_a_failing_filter_leaves_the_model_alone():
    def fails(module, name):
        if name == "layers.1.down":
            raise RuntimeError("mine")
        return True

    model = build()
    with pytest.raises(RuntimeError, match="mine"):
        mf.quantize_(model, "mxfp8", filter_fn=fails)
    assert not any(isinstance(module, mf.Linear) for module in model.modules())


def test_the_root_itself():
    layer = nn.Linear(16, 8)
    report = mf.quantize_(layer, "nvfp4")
    assert names(report.converted) == [""]
    assert "(the model itself)" in str(report)
    assert isinstance(layer, mf.Linear)
    layer(torch.ones(2, 16)).sum().backward()
    assert type(mf.restore_(layer)) is nn.Linear


def test_thresholds_are_those_of_presets():
    assert SMALL_KN.keys() <= set(mf.presets())
    documented = mf.nn.auto_filter_small_kn.__doc__.partition("recipe: ")[2].partition(".\n")[0]
    assert re.findall(r'"(\w+)"', documented) == list(SMALL_KN)


def test_auto_filter_small_kn():
    model = nn.ModuleDict(
        {
            "wide": nn.Linear(8192, 2304, device="meta"),
            "small": nn.Linear(1024, 1024, device="meta"),
        }
    )
    for recipe in SMALL_KN:
        keep = mf.nn.auto_filter_small_kn(recipe)
        assert keep(model["wide"], "wide")
        assert not keep(model["small"], "small")
        with_name = mf.quantize_(model, recipe, filter_fqns=["auto_filter_small_kn"])
        assert names(with_name.converted) == ["wide"]
        assert "too small" in dict(with_name.skipped)["small"]
        mf.restore_(model)
    tall = nn.Linear(2048, 1024, device="meta")
    assert mf.nn.auto_filter_small_kn("fp8_tensorwise")(tall, "tall")
    assert not mf.nn.auto_filter_small_kn("fp8_rowwise")(tall, "tall")


def test_deepcopy_pickle_and_torch_save():
    model = build()
    mf.quantize_(model, "layers.*: nvfp4; output: fp8_delayed")
    model(TOKENS).sum().backward()
    mf.step(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    twins.append(torch.load(file, weights_only=False))
    want = model(TOKENS)
    for twin in twins:
        layers = twin.layers
        assert layers[0].up.rng_state is layers[1].down.rng_state
        assert layers[0].up.rng_state is not model.layers[0].up.rng_state
        assert twin.output.weight is twin.embed.weight
        assert torch.equal(twin(TOKENS), want)
        assert (
            layers[0].up.rng_state.tensor[1] == 2
        )  # the hook of the twin advanced the twin's state


def test_state_dicts_go_both_ways():
    unconverted, model = build(), build()
    mf.quantize_(model, "nvfp4")
    with torch.no_grad():
        model.layers[0].up.weight.mul_(2)
    unconverted.load_state_dict(model.state_dict())
    assert torch.equal(unconverted.layers[0].up.weight, model.layers[0].up.weight)
    model.load_state_dict(build().state_dict())
    assert torch.equal(2 * model.layers[0].up.weight, unconverted.layers[0].up.weight)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_meta_device_then_to_empty(recipe):
    with torch.device("meta"):
        model = Model()
        mf.quantize_(model, recipe, seed=3)
    real = build()
    mf.quantize_(real, recipe, seed=3)
    model.to_empty(device="cpu")
    model.load_state_dict(real.state_dict())
    grads = []
    for m in (model, real):
        m(TOKENS).square().mean().backward()
        grads.append(m.layers[0].up.weight.grad)
    assert torch.equal(*grads)


def test_dtype_moves_keep_streams_and_histories():
    model = build()
    mf.quantize_(model, "fp8_delayed", keep="nothing")
    model(TOKENS).sum().backward()
    mf.step(model)
    before = mf.training_state(model)
    model.bfloat16()
    after = mf.training_state(model)
    assert model.output.weight.dtype == torch.bfloat16
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert model.output.amax_history.dtype == torch.float32
    assert model.output.stream.dtype == torch.int64
    model(TOKENS).sum().backward()


def test_names_do_not_depend_on_wrappers():
    model = build()
    mf.quantize_(torch.compile(model), "nvfp4", keep="nothing")
    assert model.output.fqn == "output"
    assert "rng" in mf.training_state(model)
    assert "rng" in mf.training_state(torch.compile(model))


# ---- primary weights -----------------------------------------------------------------------------

TRAINABLE = [
    "fp8_tensorwise",
    "fp8_rowwise",
    "fp8_blockwise",
    "mxfp8",
    "mxfp8_2d",
    "mxfp4",
    "nvfp4",
]


def train(model, specs=None, steps=25):
    """Returns the losses of AdamW, which writes a weight once a step: it decays none.

    specs: of weights that are rounded to them before each update, as primary weights are.
    """
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0)
    x, target = torch.randn(64, 32), torch.randn(64, 16)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        for layer in model if specs is not None else ():
            if isinstance(layer, mf.Linear):
                codes = mf.QuantizedTensor.from_tensor(layer.weight.detach(), *specs)
                layer.weight.data.copy_(codes.dequantize())
        optimizer.step()
        mf.step(model)
        losses.append(loss.item())
    return losses


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 16))


@pytest.mark.parametrize("recipe", TRAINABLE)
def test_primary_weights_train(recipe):
    """As weights do that are cast, and rounded before each update."""
    model, cast = mlp(), mlp()
    mf.quantize_(model, recipe, primary=True)
    mf.quantize_(cast, recipe)
    weight = model[0].weight
    assert isinstance(weight, mf.QuantizedTensor)
    assert isinstance(weight, nn.Parameter)
    losses = train(model)
    assert losses == train(cast, weight.specs)
    assert losses[-1] < losses[0]
    assert model[0].weight is weight


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_step_rounds_the_new_values(foreach):
    model = mlp()
    mf.quantize_(model, "mxfp8_2d", primary=True)
    weight = model[0].weight
    model(torch.randn(20, 32)).sum().backward()
    lr = 0.125  # a power of two: lr * grad is exact, whether or not it is fused with the difference
    want = weight.dequantize() - lr * weight.grad
    torch.optim.SGD(model.parameters(), lr=lr, foreach=foreach).step()
    assert torch.equal(weight.dequantize(), mf.tensor.quantize(want, "mxfp8/32x32").dequantize())


def test_a_primary_weight_multiplies_as_its_recipe_does():
    primary, cast = mlp(), mlp()
    mf.quantize_(primary, "nvfp4", primary=True)
    mf.quantize_(cast, "nvfp4")
    x, g = torch.randn(20, 32), torch.randn(20, 16)
    grads = []
    for model in (primary, cast):
        model(x).backward(g)
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))
    with torch.inference_mode():
        assert torch.equal(primary(x), cast(x))


def test_primary_keeps_what_it_is_asked_to():
    model = mlp()
    initial = model[0].weight.detach().clone()
    model[0].weight.partition_dim = 1  # an attribute of other code
    mf.quantize_(model, "mxfp8", primary=True, keep_high_precision_init=True)
    weight = model[0].weight
    assert torch.equal(weight.get_high_precision_init_val(), initial)
    twin = copy.deepcopy(model)[0].weight
    twin.clear_high_precision_init_val()
    assert not hasattr(twin, "get_high_precision_init_val")
    model.to(torch.bfloat16).float()  # torch swaps the parameter's __dict__
    assert torch.equal(model[0].weight.get_high_precision_init_val(), initial)
    assert (model[0].weight.partition_dim, twin.partition_dim) == (1, 1)
    values = model[0].weight.dequantize()
    mf.restore_(model)
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model[0].weight, values)
    assert vars(model[0].weight) == {"partition_dim": 1}


def test_primary_refuses_what_it_cannot_keep():
    model = build()
    report = mf.quantize_(model, "nvfp4", keep="nothing", primary=True)
    assert "tied" in dict(report.skipped)["output"]
    for recipe, message in [
        ("fp8_delayed", "delayed"),
        ("fprop=nvfp4*nvfp4+sr dgrad=nvfp4*nvfp4 wgrad=nvfp4*nvfp4", "stochastic"),
        ("fprop=nvfp4*nvfp4 dgrad=bf16*bf16 wgrad=nvfp4*nvfp4", "high precision"),
        ("fprop=mxfp4+rht*mxfp4+rht dgrad=mxfp4+rht*mxfp4+rht wgrad=bf16*bf16", "transforms"),
        ("fprop=mxfp4+rht*mxfp4+rht dgrad=bf16*fprop.w wgrad=bf16*bf16", "transforms"),
    ]:
        with pytest.raises(ValueError, match=message):
            mf.quantize_(mlp(), recipe, primary=True)


@pytest.mark.parametrize(("recipe", "equal_losses"), [("nvfp4_mxfp8", 25), ("nvfp4", 1)])
def test_quantized_model_init(recipe, equal_losses):
    """It trains as a converted model. Gradients of nvfp4 draw by names, which differ here."""
    with mf.nn.quantized_model_init(recipe, keep_high_precision_init=True):
        model = mlp()
    reference = mlp()
    assert type(nn.Linear(2, 2)) is nn.Linear
    for built, unconverted in zip(model, reference):
        if isinstance(unconverted, nn.Linear):
            assert type(built) is mf.Linear
            assert torch.equal(built.weight.get_high_precision_init_val(), unconverted.weight)
    assert model[0].stream != model[2].stream
    mf.quantize_(reference, recipe, keep="nothing", primary=True)
    losses, wanted = train(model), train(reference)
    assert losses[:equal_losses] == wanted[:equal_losses]
    with pytest.raises(ValueError, match="high precision"), mf.nn.quantized_model_init("bf16"):
        pass
