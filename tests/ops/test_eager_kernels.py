"""Eager layers call kernels without the dispatcher: equal bytes, and modes still see the ops."""

import minifloat as mf
import pytest
import torch

from tests.support.collectives import Begun
from tests.support.saved_bytes import saved_bytes

RECIPES = ["fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8", "nvfp4", "mxfp4"]


def layer_and_input(recipe):
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 48, dtype=torch.bfloat16)
    mf.quantize_(layer, recipe)
    layer.weight_codes = None
    if layer.amax_history is not None:
        layer.amax_history.fill_(4.0)
    return layer.eval(), torch.randn(2, 16, 64, dtype=torch.bfloat16, requires_grad=True)


def results(recipe, forward_mode, backward_mode):
    layer, x = layer_and_input(recipe)
    if forward_mode:
        with forward_mode:
            y = layer(x)
    else:
        y = layer(x)
    if backward_mode:
        with backward_mode:
            y.sum().backward()
    else:
        y.sum().backward()
    history = [] if layer.amax_history is None else [layer.amax_history]
    return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad, *history]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_mode_sees_the_ops_and_changes_no_byte(recipe):
    want = results(recipe, None, None)
    cast = "quantize_delayed" if recipe == "fp8_delayed" else "quantize"
    for has_forward, has_backward in ((True, True), (True, False), (False, True)):
        forward, backward = Begun(), Begun()
        got = results(recipe, forward if has_forward else None, backward if has_backward else None)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
        if has_forward:
            assert forward.names.count(cast) == 2
            assert forward.names.count("scaled_mm") == 1
        if has_backward:
            assert backward.names.count(cast) == 1
            assert backward.names.count("scaled_mm") == 2


def test_a_profiler_sees_the_ops():
    layer, x = layer_and_input("nvfp4")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layer(x)
    names = [event.name for event in profile.events()]
    assert names.count("minifloat::quantize") == 2
    assert names.count("minifloat::scaled_mm") == 1


@pytest.mark.parametrize("recipe", RECIPES)
def test_inference_mode_has_the_same_bytes(recipe):
    layer, x = layer_and_input(recipe)
    want = layer(x).detach()
    layer, x = layer_and_input(recipe)
    with torch.inference_mode():
        assert torch.equal(layer(x.detach()), want)


def test_what_is_saved_does_not_hold_what_is_not():
    """Saves only x's columnwise codes: the rowwise ones are another allocation, freed by then."""
    layer, x = layer_and_input("mxfp8")
    layer.weight.requires_grad_(True)
    codes = x.numel() + layer.weight.numel()
    scales = codes // 32
    assert saved_bytes(lambda: layer(x)) <= codes + scales + 2 * 256
