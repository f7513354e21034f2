"""Errors that come where the mistake is made, and name the call that helps."""

import minifloat as mf
import pytest
import torch
from torch import Tensor, fx, nn

DIM = 32


def converted(recipe="mxfp8", **options):
    torch.manual_seed(0)
    layer = nn.Linear(DIM, DIM)
    mf.quantize_(layer, recipe, **options)
    return layer


def mixture(recipe="mxfp8"):
    return mf.MoE(dim=DIM, hidden=DIM, experts=2, top_k=1, recipe=recipe)


FORWARD_DELAYED = "fprop=e4m3/tensor+delayed*e4m3/tensor+delayed dgrad=bf16*bf16 wgrad=bf16*bf16"


# ---- A tracer ------------------------------------------------------------------------------------
class WithLeaves(fx.Tracer):
    def is_leaf_module(self, module, name):
        return isinstance(module, mf.Linear) or super().is_leaf_module(module, name)


def test_a_layer_without_state_is_traced():
    model, x = nn.Sequential(nn.Linear(DIM, DIM)), torch.randn(4, DIM)
    mf.quantize_(model, "mxfp8", keep="nothing")
    assert torch.equal(fx.symbolic_trace(model)(x), model(x))


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_state_is_not_traced_as_constants(recipe):
    model, x = nn.Sequential(nn.Linear(DIM, DIM)), torch.randn(4, DIM)
    mf.quantize_(model, recipe, keep="nothing")
    with pytest.raises(NotImplementedError, match=r"^0: expected a forward outside torch\.fx"):
        fx.symbolic_trace(model)
    traced = fx.GraphModule(model, WithLeaves().trace(model))  # as the message says
    for _ in range(2):
        traced(x).sum().backward()
        mf.step(traced)
    state = mf.training_state(traced)
    assert state["rng"][1] == 2 if recipe == "nvfp4" else state["0.amax_history"][0, 0] > 0


# ---- A recipe that is assigned -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("recipe", "lacks"), [("nvfp4", "stochastic rounding"), ("fp8_delayed", "delayed scaling")]
)
@pytest.mark.parametrize("make", [converted, lambda: mixture().experts.w1_product])
def test_a_recipe_without_state_is_refused_when_it_is_assigned(make, recipe, lacks):
    layer = make()
    message = rf"recipe: expected a recipe without {lacks}, .* got {recipe}; call mf\.restore_"
    with pytest.raises(ValueError, match=message):
        layer.recipe = recipe
    assert layer.recipe.text == "mxfp8"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("mxfp8", "fp8_rowwise"),
        ("nvfp4", "mxfp4"),
        ("fp8_delayed", "mxfp8"),
        ("fp8_delayed", FORWARD_DELAYED),
    ],
)
def test_a_recipe_whose_state_is_there_is_used(before, after):
    x = torch.randn(4, DIM)
    layer, model = converted(before), mixture(before)
    layer(x)
    model(x)
    layer.recipe = after
    for name in model.experts.weight_names:
        model.experts.get_submodule(f"{name}_product").recipe = after
    want = converted(after)
    assert torch.equal(layer.eval()(x), want.eval()(x))
    twin = mixture(after).eval()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x), twin(x))


# ---- A weight of another library -----------------------------------------------------------------
class Foreign(Tensor):
    """A weight as torchao's quantize_ assigns it: a subclass with ops of its own."""

    @staticmethod
    def __new__(cls, values):
        return Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values):
        self.values = values

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values)
        raise NotImplementedError(f"{cls.__name__}: {func}")


def test_a_weight_of_another_library_is_refused_when_it_is_assigned():
    layer = converted()
    before = layer.weight
    foreign = nn.Parameter(Foreign(before.detach()), requires_grad=False)
    with pytest.raises(TypeError, match=r"got .*Foreign; call mf\.restore_\(model\) before"):
        layer.weight = foreign
    assert layer.weight is before
    mf.restore_(layer)
    layer.weight = foreign
    assert isinstance(layer.weight, Foreign)


# ---- float16 -------------------------------------------------------------------------------------
def grouped_mlp(x):
    w13, w2 = torch.randn(2, 2 * DIM, DIM), torch.randn(2, DIM, DIM)
    indices = torch.zeros(len(x), 1, dtype=torch.long)
    return mf.grouped_mlp(x, w13, w2, indices, torch.ones(len(x), 1), "mxfp8")


@pytest.mark.parametrize(
    "run",
    [
        converted(),
        mixture(),
        grouped_mlp,
        lambda x: mf.linear(x, torch.randn(DIM, DIM), None, "mxfp8"),
    ],
    ids=["layer", "mixture", "grouped_mlp", "linear"],
)
def test_autocast_to_float16_is_named(run):
    x = torch.randn(4, DIM)
    message = r"autocast: .* got torch\.float16; .*\"cpu\", torch\.bfloat16\)"
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=message):
        run(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(x).dtype == torch.bfloat16


@pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.Linear(DIM, DIM)), mixture])
@pytest.mark.parametrize(("name", "dtype"), [("half", "float16"), ("double", "float64")])
def test_a_dtype_that_primary_weights_cannot_have_is_refused(make, name, dtype):
    model = mf.restore_(make())
    mf.quantize_(model, "mxfp8_2d", primary=True)
    quantized = [p for p in model.parameters() if isinstance(p, mf.QuantizedTensor)]
    before = [p.dequantize() for p in quantized]
    message = rf"\.{name}\(\) of a model with primary weights: .* got torch\.{dtype}; call model\."
    message += rf".* other parameters may be in torch\.{dtype}"
    with pytest.raises(ValueError, match=message):
        getattr(model, name)()
    assert quantized
    assert all(p.dtype == torch.float32 for p in quantized)
    assert all(torch.equal(a, b.dequantize()) for a, b in zip(before, quantized))
    model.bfloat16()  # as the error says: others may be in the refused dtype
    assert all(p.dtype == torch.bfloat16 for p in quantized)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


def test_codes_of_experts_that_were_assigned_refuse_it_too():
    source, model = mf.restore_(mixture()), mixture("mxfp8_2d")
    mf.quantize_(source, "mxfp8_2d", primary=True)
    model.load_state_dict(source.state_dict(), assign=True)
    assert isinstance(model.experts.w1, mf.QuantizedTensor)
    with pytest.raises(ValueError, match=r"which \S+\.w1 computes in, got torch\.float16"):
        model.half()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("is_training", [True, False])
def test_a_nested_tensor_is_refused(layout, is_training):
    """Rows of several lengths have no shape that a cast or product could read."""
    x = torch.nested.nested_tensor([torch.randn(n, 32) for n in (3, 5)], layout=layout)
    layer = nn.Sequential(nn.Linear(32, 32))
    mf.quantize_(layer, "nvfp4", keep="nothing")
    mixture = mf.MoE(32, 32, experts=2, top_k=1, recipe="nvfp4")
    for module in (layer, mixture):
        with pytest.raises(ValueError, match="expected x as a dense tensor, got a nested tensor"):
            module.train(is_training)(x)
