"""Accumulated weight gradients: Megatron's hooks, nothing to accumulate, wrong arguments."""

from __future__ import annotations

import threading

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import nn

from tests.nn.test_accumulation import HOW, K, N, batch, built, step

# ---- Megatron's attributes -----------------------------------------------------------------------


@pytest.mark.parametrize("is_read", [False, True])
def test_megatron_hooks_receive_a_gradient(is_read):
    """Megatron adds .grad where the flag is False or zero_out_wgrad is True, then drops it."""
    layer, plain, calls = built(accumulate="main_grad"), built(), []
    weight = layer.weight
    weight.grad_added_to_main_grad = False
    weight.zero_out_wgrad = is_read

    def hook(*_):
        calls.append(weight.grad is not None)
        if not weight.grad_added_to_main_grad or weight.zero_out_wgrad:
            weight.main_grad.add_(weight.grad)
        weight.grad = None

    leaf = weight.view_as(weight).grad_fn.next_functions[0][0]
    leaf.register_hook(hook)
    for i in range(2):
        step(layer, i), step(plain, i)
    assert calls == [True, True]
    assert weight.grad_added_to_main_grad
    assert torch.equal(weight.main_grad, plain.weight.grad)


# ---- no accumulation -----------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW)
def test_frozen_weights_and_forwards_without_gradients(how):
    layer = built(accumulate=how)
    layer.weight.main_grad = None
    with torch.no_grad():
        layer(batch(0))
    layer.weight.requires_grad_(False)
    x = batch(0).requires_grad_()
    layer(x).square().sum().backward()
    assert x.grad is not None
    assert layer.bias.grad is not None
    assert layer.weight.grad is None


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("main_grad", "message"),
    [
        (None, r"expected an attribute main_grad of .*weight, float32 \(37, 70\)"),
        (
            torch.zeros(N, K, dtype=torch.bfloat16),
            r"main_grad as dense float32 \[37, 70\], got .*BF",
        ),
        (torch.zeros(K, N), r"main_grad as dense float32 \[37, 70\], got .*\[70, 37\]"),
        (torch.zeros(N, K, requires_grad=True), "main_grad that requires no gradient"),
        (torch.zeros(1, K).expand(N, K), "main_grad with memory for each element"),
        (torch.zeros(N, K, device="meta"), "main_grad on cpu, got meta"),
    ],
)
def test_wrong_main_grad(main_grad, message):
    layer = built(accumulate="main_grad")
    layer.weight.main_grad = main_grad
    with pytest.raises(ValueError, match=message):
        layer(batch(0))


def test_bf16_grad_is_refused():
    layer = built(accumulate="grad", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"whose \.grad is float32, got torch\.bfloat16"):
        layer(batch(0, torch.bfloat16))


def test_wrong_texts():
    with pytest.raises(ValueError, match=r"accumulate: expected one of .*got 'sum'"):
        mf.quantize_(nn.Linear(8, 8), "mxfp8", accumulate="sum")
    x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"linear: expected accumulate as .*got 'sum'"):
        ops.linear(x, w, None, "mxfp8", accumulate="sum")
    with pytest.raises(ValueError, match="expected main_grad under accumulate='main_grad', got no"):
        ops.linear(x, w, None, "mxfp8", accumulate="main_grad")
    with pytest.raises(ValueError, match="expected no main_grad under accumulate='grad', got one"):
        ops.linear(x, w, None, "mxfp8", accumulate="grad", main_grad=torch.zeros(8, 8))
    for shared in (w.detach(), w.detach().t()):
        with pytest.raises(ValueError, match="expected main_grad with memory of its own, got the"):
            ops.linear(x, w, None, "mxfp8", accumulate="main_grad", main_grad=shared)


# ---- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", ["grad", "main_grad"])
def test_backward_threads_lose_no_gradient(accumulate):
    """Each thread adds 8 to every element: sums of integers, exact in any order."""
    size, threads = 1024, 8
    model = nn.Sequential(nn.Linear(size, size, bias=False))
    mf.quantize_(model, "fp8_rowwise_gw_hp", keep="nothing", accumulate=accumulate)
    weight = model[0].weight
    for _ in range(10):
        total = torch.zeros_like(weight)
        setattr(weight, accumulate, total)
        losses = [model(torch.ones(8, size)).sum() for _ in range(threads)]
        running = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        assert torch.equal(total, torch.full_like(total, 8.0 * threads))
