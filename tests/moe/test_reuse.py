"""Weights of experts are quantized once a step, with the results of quantizing each time."""

import copy

import minifloat as mf
import pytest
import torch
from minifloat.nn.grouped_product import GroupedProduct
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.moe.test_convert import BLOCKS, tokens
from tests.support.reuse_counts import Casts


def pair(name: str, recipe: str) -> tuple[nn.Module, nn.Module]:
    """Returns a model with converted experts, and a twin that reuses nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(BLOCKS[name]())
    mf.quantize_(model, f"*: bf16; *.experts: {recipe}")
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, GroupedProduct):
            module.cache_of = lambda weight: None
    return model, twin


def casts_of_weights(run, *args: object) -> tuple[int, list[torch.Tensor]]:
    """Counts the casts of 3D tensors."""
    with Casts() as seen:
        out = run(*args)
    return sum(n for shape, n in seen.count.items() if len(shape) == 3), out


def products(model: nn.Module) -> int:
    return sum(isinstance(m, GroupedProduct) for m in model.modules())


def step(
    model: nn.Module, optimizer, is_checkpointed: bool = False, autocast: bool = False
) -> list[torch.Tensor]:
    """Runs three micro-batches and a step, and returns outputs and gradients."""
    outputs = []
    for count in (24, 12, 24):
        x = tokens(count).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
        y.square().sum().backward()
        outputs += [y.detach(), x.grad]
    outputs += [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    mf.step(model)
    return outputs


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_delayed"])
@pytest.mark.parametrize("name", BLOCKS)
def test_micro_batches_quantize_weights_once_a_step(name, recipe, is_checkpointed):
    models = pair(name, recipe)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    for i in range(3):
        results = []
        for model, optimizer in zip(models, optimizers):
            casts, out = casts_of_weights(step, model, optimizer, is_checkpointed)
            results.append(out)
            if model is models[0] and i > 0:
                assert casts == products(model)
        assert casts > 3 * products(models[1]) - 1  # the twin's
        assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("name", BLOCKS)
def test_gradients_under_autocast_do_not_depend_on_reuse(name):
    models = pair(name, "mxfp8")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    for _ in range(2):
        results = [step(*both, autocast=True) for both in zip(models, optimizers)]
        assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", BLOCKS)
def test_evaluation_quantizes_weights_once(name, recipe):
    model, twin = (m.eval() for m in pair(name, recipe))

    def evaluate(m: nn.Module) -> list[torch.Tensor]:
        with torch.no_grad():
            return [m(tokens(count)) for count in (24, 12, 24, 8)]

    casts, found = casts_of_weights(evaluate, model)
    assert casts == 2 * products(model)  # the second forward shows that weights stay
    assert casts_of_weights(evaluate, model)[0] == 0
    assert all(torch.equal(a, b) for a, b in zip(found, evaluate(twin)))
    for p in model.parameters():
        p.data.mul_(2)
    for p in twin.parameters():
        p.data.mul_(2)
    assert all(torch.equal(a, b) for a, b in zip(evaluate(model), evaluate(twin)))


@pytest.mark.parametrize("name", ["grouped_mm method", "another activation"])  # not mf.grouped_mlp
def test_a_trace_has_no_codes(name):
    model = pair(name, "mxfp8")[0].eval()
    traced = torch.jit.trace(model, tokens(24), check_trace=False)
    for p in model.parameters():
        p.data.mul_(2)
    assert torch.equal(traced(tokens(24)), model(tokens(24)))
