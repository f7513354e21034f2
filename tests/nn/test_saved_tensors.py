"""What a layer saves for backward is the same each time: a checkpoint compares it."""

from __future__ import annotations

import contextlib

import minifloat as mf
import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

RECIPES = ["fp8_tensorwise", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_delayed", "mxfp8", "nvfp4"]
MODULES = {
    "linear": lambda: nn.Linear(64, 128, bias=False),
    "mlp": lambda: mf.MLP(64, 128, bias=True),
    "gelu": lambda: mf.MLP(64, 128, gated=False, activation="gelu"),
    "experts": lambda: mf.MoE(64, 128, 4, 2),
    "shared experts": lambda: mf.MoE(64, 128, 4, 2, shared_experts=1),
}


class Repeat(TorchDispatchMode):
    """Calls each op, as modes that only watch do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def model_of(module, recipe, **options):
    torch.manual_seed(0)
    model = nn.Sequential(MODULES[module]()).bfloat16()
    mf.quantize_(model, recipe, keep="nothing", **options)
    return model


def input_of(requires_grad):
    return torch.randn(128, 64).bfloat16().requires_grad_(requires_grad)


@pytest.mark.parametrize("recompute", [None, "weight"])
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_dispatch_mode_changes_nothing_that_is_saved(recipe, module, recompute):
    for requires_grad in (True, False):
        x, found = input_of(requires_grad), []
        for mode in (contextlib.nullcontext(), Repeat()):
            saved = []
            pack = lambda t, saved=saved: saved.append((tuple(t.shape), t.dtype)) or t  # noqa: E731
            with saved_tensors_hooks(pack, lambda t: t), mode:
                model_of(module, recipe, recompute=recompute)(x)
            found.append(saved)
        assert found[0] == found[1]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_of_an_input_without_gradient(recipe, module):
    """The first forward casts W, and the second may have the codes that it reads alone."""
    for requires_grad in (True, False):
        x, model = input_of(requires_grad), model_of(module, recipe)
        for _ in range(2):
            checkpoint(model, x, use_reentrant=False).float().sum().backward()
        grads = [p.grad for p in model.parameters()]
        plain = model_of(module, recipe)
        for _ in range(2):
            plain(x).float().sum().backward()
        for got, parameter in zip(grads, plain.parameters(), strict=True):
            assert torch.equal(got, parameter.grad)


def test_a_zero_tensor_is_an_input():
    """It has no memory of its elements."""
    layer = mf.Linear(64, 32, recipe="fp8_delayed")
    y = layer(torch._efficientzerotensor((8, 64)))
    assert torch.equal(y, layer.bias.expand(8, 32))
