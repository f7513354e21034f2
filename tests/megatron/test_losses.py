"""Losses of a small GPTModel under recipes, beside the same one in bfloat16."""

import minifloat as mf
import pytest
import torch

from tests.support.loss_errors import operand_error
from tests.support.megatron_models import begin, build, config, loss
from tests.support.worlds import run_world

STEPS, LAST = 200, 20


def train(recipe):
    """Returns the losses of all steps, with an optimizer in float32."""
    model = build(config())
    if recipe is not None:
        mf.quantize_(model, recipe)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=2e-3)
    losses = []
    for step in range(STEPS):
        value = loss(model, step)
        value.backward()
        for master, parameter in zip(masters, model.parameters()):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters()):
                parameter.copy_(master)
        mf.step(model)
        losses.append(value.item())
    return torch.tensor(losses)


def check(rank):
    """The mean of the last steps moves by at most the squared errors of the products.

    Gradients of a trained model are small, so its loss moves with the square of an error of its
    logits. Each of the 8 products on the way to them adds the relative squared errors of both
    operands, and the loss moves by at most their sum, times itself.
    """
    begin()
    want = train(None)
    mean = want[-LAST:].mean().item()
    assert mean < want[0] / 10
    for recipe in ("mxfp8", "fp8_tensorwise", "nvfp4"):
        fprop = mf.Recipe(recipe).fprop
        error = 8 * (operand_error(fprop.a) + operand_error(fprop.b))
        moved = train(recipe)[-LAST:].mean().item() - mean
        assert moved != 0
        assert abs(moved) <= error * mean, f"{recipe}: {moved} of {mean}, bound {error * mean}"


@pytest.mark.slow
def test_losses_are_those_of_bfloat16():
    run_world(1, check)
