"""Inputs that tests call exact have exact sums, product by product, and the check can fail."""

import minifloat as mf
import pytest
import torch

from tests.distributed.tensor_parallel.test_tensor_parallel_models import Projections
from tests.support.exact_sums import ExactSums, granule, integers
from tests.support.parallel_models import EXACT, WIDTH, built, train_step
from tests.support.whole_layers import BATCH, TOKENS, values


def step(model, weights=None):
    x = integers(10, BATCH, TOKENS, WIDTH)
    with ExactSums() as seen:
        train_step(model, x, integers(11, BATCH, TOKENS, WIDTH) if weights is None else weights)
    return seen.products, seen.sums


@pytest.mark.parametrize("recipe", EXACT)
def test_models_of_integers(recipe):
    assert step(built(recipe)) == (6, 2)  # two layers, with a bias each


@pytest.mark.parametrize("is_frozen", [False, True])
def test_projections_of_integers(is_frozen):
    model = Projections()
    for i, parameter in enumerate(model.parameters()):
        parameter.data.copy_(integers(i, *parameter.shape))
    model.wk.weight.requires_grad_(not is_frozen)
    mf.quantize_(model, "mxfp8")
    assert step(model, torch.ones(())) == (8 if is_frozen else 9, 0)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_delayed", "mxfp8", "fp8_rowwise"])
def test_layers_of_integers(recipe):
    """Checks scales by the tensor's amax too: 7 divides the formats' largest values."""
    x, w, b = (integers(i, *shape) for i, shape in enumerate([(3, 20, 64), (48, 64), (48,)]))
    state = {}
    if recipe == "fp8_delayed":
        state["amax_history"] = torch.full((6, 4), 7.0)
    x, w, b = (t.requires_grad_() for t in (x, w, b))
    with ExactSums() as seen:
        y = mf.linear(x, w, b, recipe, **state)
        y.backward(integers(4, *y.shape))
    assert (seen.products, seen.sums) == (3, 1)


def test_other_sums_are_found():
    x, w = integers(1, 60, 64), integers(2, 48, 64)
    for recipe, a, b, message in (
        ("fp8_tensorwise", x.clamp(max=4), w, "no power of two"),  # 448 / 4 = 112
        ("nvfp4_pow2", x, w, "no power of two"),
        ("mxfp8", values(1, 60, 64), values(2, 48, 64), "steps"),
        ("bf16", values(1, 60, 64), values(2, 48, 64), "steps"),
    ):
        with pytest.raises(AssertionError, match=message), ExactSums():
            mf.linear(a, b, None, recipe, rng=torch.tensor([1, 2, 3]))
    with pytest.raises(AssertionError, match="bias"), ExactSums():
        mf.linear(x, w, torch.full((48,), 2.0**-20), "mxfp8")
    with pytest.raises(AssertionError, match="sum"), ExactSums():
        torch.tensor([[2.0**24, 1.0]]).sum(1)


def test_granules():
    x = torch.tensor([[6.0, -4.0, 0.0], [0.0, 0.0, 0.0], [2.0**-149, 1.0, 3.0], [0.75, 2.0, 5.0]])
    assert granule(x, 1).tolist() == [2.0, float("inf"), 2.0**-149, 0.25]
