"""Weights in unusual states: on meta, made under inference_mode, swapped, in other strides; and
modules of a model that are restored alone.
"""

import copy

import minifloat as mf
import pytest
import torch
from torch import nn

K, N = 32, 48
RECIPES = ["mxfp8", "nvfp4", "fp8_delayed"]


def sequential():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(K, N), nn.Linear(N, K))


def converted(recipe, make=sequential):
    model = make()
    mf.quantize_(model, recipe)
    return model


def batch():
    return torch.randn(8, K, generator=torch.Generator().manual_seed(1))


def require_same_training(model, twin, steps=2):
    """Compares results, gradients and training state of two models, bit for bit."""
    for _ in range(steps):
        results = []
        for m in (model, twin):
            y = m(batch())
            grads = torch.autograd.grad(y.square().sum(), list(m.parameters()))
            mf.step(m)
            results.append([y, *grads, *mf.training_state(m).values()])
        assert all(torch.equal(a, b) for a, b in zip(*results))


# ---- parts restored alone ------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["0", "1"])
def test_the_rest_goes_on_when_a_part_is_restored(part):
    model = converted("nvfp4")
    mf.restore_(model.get_submodule(part))
    before = mf.training_state(model)["rng"]
    x = batch().requires_grad_()
    first, second = (torch.autograd.grad(model(x).square().sum(), x)[0] for _ in range(2))
    assert not torch.equal(first, second)
    assert mf.training_state(model)["rng"][1] == before[1] + 2
    mf.restore_(model)
    assert not model._forward_pre_hooks


# ---- meta ----------------------------------------------------------------------------------------


def on_meta():
    with torch.device("meta"):
        return sequential()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_forward_on_meta(recipe):
    model = converted(recipe, on_meta)
    for _ in range(3):
        y = model(torch.empty(5, 8, K, device="meta"))
        assert y.shape == (5, 8, K)
        assert y.is_meta
    y.sum().backward()
    assert model[0].weight.grad.shape == (N, K)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model.eval()(torch.empty(2, K, device="meta")).shape == (2, K)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_values_assigned_to_a_model_on_meta(recipe, compiled):
    model, twin = converted(recipe, on_meta), converted(recipe)
    model.load_state_dict(sequential().state_dict(), assign=True)
    assert model[0].stream.equal(twin[0].stream)
    if compiled:
        model, twin = (torch.compile(m, backend="aot_eager", fullgraph=True) for m in (model, twin))
    require_same_training(model, twin)


# ---- inference_mode ------------------------------------------------------------------------------


def built(recipe):
    with torch.inference_mode():
        return converted(recipe)


def copied(recipe):
    model = converted(recipe)
    with torch.inference_mode():
        return copy.deepcopy(model)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", [built, copied])
def test_a_model_made_under_inference_mode(make, recipe, training):
    model, twin = make(recipe).train(training), converted(recipe).train(training)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad):
        with mode():
            for _ in range(2):
                assert torch.equal(model(batch()), twin(batch()))
        for m in (model, twin):
            mf.step(m)
        states = [mf.training_state(m) for m in (model, twin)]
        assert all(torch.equal(states[0][key], value) for key, value in states[1].items())


@pytest.mark.parametrize("recipe", RECIPES)
def test_conversion_and_moves_under_inference_mode_leave_a_model_to_train(recipe):
    model, twin = sequential(), converted(recipe)
    with torch.inference_mode():
        mf.quantize_(model, recipe)
        for m in (model, twin):
            m(batch())
        model.load_state_dict(model.state_dict())
    require_same_training(model, twin)


# ---- strides -------------------------------------------------------------------------------------


def strided(model, name):
    """Copies values to memory with other strides."""
    for layer in model:
        weight = layer.weight.detach()
        if name == "transposed":
            weight = weight.t().contiguous().t()
        elif name == "expanded":
            weight = weight[:, :1].expand(weight.shape)
        else:
            weight = torch.cat([weight, weight], dim=1)[:, : weight.shape[1]]
        assert not weight.is_contiguous()
        layer.weight = nn.Parameter(weight)
    return model


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["transposed", "expanded", "padded"])
def test_a_weight_that_is_not_contiguous(name, recipe, compiled):
    model, twin = strided(sequential(), name), strided(sequential(), name)
    for layer in twin:
        layer.weight = nn.Parameter(layer.weight.detach().contiguous())
    for m in (model, twin):
        mf.quantize_(m, recipe)
    if compiled:
        model, twin = (torch.compile(m, backend="aot_eager", fullgraph=True) for m in (model, twin))
    require_same_training(model, twin)


@pytest.mark.parametrize("name", ["transposed", "expanded", "padded"])
def test_a_primary_weight_of_one_that_is_not_contiguous(name):
    model = strided(sequential(), name)
    values = [layer.weight.detach().contiguous() for layer in model]
    mf.quantize_(model, "mxfp8", primary=True)
    for layer, value in zip(model, values):
        assert torch.equal(
            layer.weight.dequantize(), mf.tensor.quantize(value, "mxfp8").dequantize()
        )


# ---- swapped -------------------------------------------------------------------------------------


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.usefixtures("swapping")
@pytest.mark.parametrize("recipe", RECIPES)
def test_moves_and_loads_that_swap_parameters(recipe):
    model, twin = converted(recipe), converted(recipe)
    parameters = list(model.parameters())
    for _ in range(3):
        model(batch())
        twin(batch())
    other = {key: 2 * value for key, value in sequential().state_dict().items()}
    for m in (model, twin):
        m.load_state_dict(other)
    assert torch.equal(model[0].weight, other["0.weight"])
    model.to(torch.bfloat16).to(torch.float32)
    for q in twin.parameters():
        q.data = q.data.to(torch.bfloat16).to(torch.float32)
    assert all(p is q for p, q in zip(model.parameters(), parameters))
    mf.step(twin)
    mf.step(model)
    require_same_training(model, twin)


def test_tensors_that_are_swapped():
    model, twin, other = converted("mxfp8"), converted("mxfp8"), sequential()
    with torch.no_grad():
        for m in (twin, other):
            m[0].weight.mul_(-3)
    for _ in range(3):
        model(batch())
    torch.utils.swap_tensors(model[0].weight, other[0].weight)
    assert torch.equal(model(batch()), twin(batch()))
