"""Layers whose backward products are cast by MS-EDEN: their gradients, and training."""

import copy
import functools

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import nn

from tests.support.fused_models import FeedForward
from tests.support.loss_errors import loss_error
from tests.support.specs import EDEN_RECIPE
from tests.tensor.test_eden import is_unbiased, z_scores

BF16_BACKWARD = "fprop=nvfp4*nvfp4/16x16 dgrad=bf16*bf16 wgrad=bf16*bf16"
# Where the operands of a product have two sets of signs, the result has nothing of the product: an
# error of 1.4. With one set each operand has a squared error of 0.0098.
MOST_ERROR = 2 * 0.0098**0.5


MODELS = {
    "linear": lambda: nn.Sequential(nn.Linear(96, 130)),
    "whole transforms": lambda: nn.Sequential(nn.Linear(96, 128)),
    "layers": lambda: nn.Sequential(nn.Linear(96, 128), nn.GELU(), nn.Linear(128, 96)),
    "feed-forward": lambda: FeedForward(width=96, hidden=160),
}


def built(kind, recipe, **options):
    torch.manual_seed(0)
    model = MODELS[kind]()
    mf.quantize_(model, recipe, keep="nothing", **options)
    return model


def gradients(model, x, g):
    x = x.clone().requires_grad_()
    y = model(x)
    return [t.detach() for t in torch.autograd.grad(y, (x, *model.parameters()), g(y))]


def relative_error(got, want):
    return ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_both_operands_of_each_product_have_the_same_signs(kind, fuse, dtype):
    torch.manual_seed(1)
    x, seeds = torch.randn(3, 70, 96, dtype=dtype), torch.randn(3, 70, 160)
    g = lambda y: seeds[..., : y.shape[-1]].to(y.dtype)  # noqa: E731
    got, want = (
        gradients(built(kind, r, fuse=fuse).to(dtype), x, g) for r in (EDEN_RECIPE, BF16_BACKWARD)
    )
    for a, b in zip(got, want, strict=True):
        assert relative_error(a.float(), b.float()) < 2 * MOST_ERROR
    assert relative_error(got[0].float(), want[0].float()) > 0.05


def test_the_mean_of_gradients_over_forwards():
    """Of 3,000 forwards of one layer; in bf16 backward they are exact."""
    torch.manual_seed(2)
    x, seeds = torch.randn(64, 96), torch.randn(64, 128)
    g = lambda y: seeds  # noqa: E731
    want = gradients(built("whole transforms", BF16_BACKWARD), x, g)
    model = built("whole transforms", EDEN_RECIPE)
    draws = [gradients(model, x, g) for _ in range(3000)]
    for i in (0, 1):  # of x and of the weight
        assert is_unbiased(z_scores(torch.stack([d[i] for d in draws]), want[i]))


@pytest.mark.parametrize("sizes", [[40, 0, 128, 7], [1, 200, 33, 64]])
def test_products_of_experts(sizes):
    torch.manual_seed(3)
    rows, offs = sum(sizes), torch.tensor(sizes).cumsum(0).int()
    w = torch.randn(len(sizes), 80, 96) / 8
    x, g = torch.randn(rows, 96), torch.randn(rows, 80)
    found = []
    for recipe in (EDEN_RECIPE, BF16_BACKWARD):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = mf.functional.scaled_grouped_mm(
            a, b.transpose(-2, -1), offs=offs, recipe=recipe, rng=torch.tensor([3, 1])
        )
        found.append(torch.autograd.grad(y, (a, b), g.to(y.dtype)))
    for got, want in zip(*found, strict=True):
        assert relative_error(got, want) < MOST_ERROR


def train(model, optimizer, first, steps):
    losses = []
    for step in range(first, first + steps):
        torch.manual_seed(step % 4)
        x = torch.randn(128, 96)
        loss = (model(x) - x.roll(1, -1)).square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
    return losses


@functools.cache
def losses_of_fp32():
    torch.manual_seed(0)
    model = FeedForward(width=96, hidden=160)
    return train(model, torch.optim.AdamW(model.parameters(), lr=3e-3), 0, 120)


@pytest.mark.parametrize("fuse", [False, True])
def test_training_and_its_continuation(fuse):
    """The loss falls as with gradients in bf16, and a job that goes on has the same losses."""
    losses = {}
    for recipe in (EDEN_RECIPE, BF16_BACKWARD):
        model = built("feed-forward", recipe, fuse=fuse)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        found = train(model, optimizer, 0, 60)
        if recipe == EDEN_RECIPE:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            state = copy.deepcopy(mf.training_state(model))
        losses[recipe] = found + train(model, optimizer, 60, 60)
    eden, bf16, plain = losses[EDEN_RECIPE], losses[BF16_BACKWARD], losses_of_fp32()
    # Three products round their operands in forward; the target has a mean square of 1.
    assert eden[-1] - plain[-1] < loss_error(EDEN_RECIPE, 3, 1.0, plain[-1], 128 * 96)
    # Gradients have a relative error of at most MOST_ERROR, of another sign in each of 120 steps.
    assert abs(eden[-1] - bf16[-1]) < MOST_ERROR / 120**0.5 * (bf16[0] - bf16[-1])

    model = built("feed-forward", EDEN_RECIPE, fuse=fuse)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    mf.load_training_state(model, state)
    assert train(model, optimizer, 60, 60) == eden[60:]


def test_a_compiled_model_has_the_bits_of_an_eager_one():
    x, seeds = torch.randn(64, 96), torch.randn(64, 130)
    g = lambda y: seeds[..., : y.shape[-1]]  # noqa: E731
    eager, compiled = (built("layers", EDEN_RECIPE) for _ in range(2))
    compiled.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for a, b in zip(gradients(eager, x, g), gradients(compiled, x, g), strict=True):
            assert torch.equal(a, b)


def test_engines():
    product = "nvfp4+eden*nvfp4+eden"
    size = {"m": 128, "n": 128, "k": 128}
    found = [ops.engine_of(product, gpu, **size) for gpu in (80, 90, 100, 120)]
    assert found == ["exact", "exact", "block_scaled", "block_scaled"]
    assert [e.name for e in mf.engines(EDEN_RECIPE, (9, 0))] == ["exact"] * 3
