"""The op mlp: every byte as `linear`, `activation` and `linear` make it, gradients too."""

from __future__ import annotations

from typing import Any

import minifloat as mf
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.mlp_cases import Case
from tests.support.same_bits import require_same_results
from tests.support.saved_bytes import saved_bytes

ops = torch.ops.minifloat
PRESETS = ops.preset_names()
MIXED = [
    "fprop=mxfp8*mxfp8+sr dgrad=mxfp8*mxfp8+sr wgrad=mxfp8+sr+rht*nvfp4+rht",
    "fprop=e4m3/tensor+delayed*e4m3/tensor dgrad=mxfp8*mxfp8 "
    "wgrad=mxfp8+rht*e4m3/tensor+delayed+rht",
    "fprop=bf16*bf16 dgrad=mxfp8*mxfp8 wgrad=mxfp8*mxfp8",
    "fprop=mxfp8*mxfp8 dgrad=bf16*bf16 wgrad=mxfp8*mxfp8",
]
K, HIDDEN, N = 96, 160, 64


@pytest.mark.parametrize("recipe", [*PRESETS, *MIXED])
def test_bytes_equal_the_composition(recipe: str) -> None:
    case = Case(recipe)
    expected = case.results(case.composed)
    require_same_results(case.results(case.fused), expected)
    require_same_results(case.results(lambda: case.fused(recompute="weight")), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_activations_and_biases(activation: str, is_gated: bool, has_bias: bool) -> None:
    for recipe, dtype in (("mxfp8", torch.bfloat16), ("nvfp4", torch.float32)):
        case = Case(recipe, is_gated, has_bias, dtype, (37,), activation)
        require_same_results(case.results(case.fused), case.results(case.composed))


@pytest.mark.parametrize("missing", ["x", "inputs", "down", "all but x", "all but down"])
def test_gradients_that_are_not_needed(missing: str) -> None:
    case = Case("mxfp8")
    first, last = case.weights[:-1], case.weights[-1:]
    frozen = {
        "x": [case.x],
        "inputs": first,
        "down": last,
        "all but x": case.weights,
        "all but down": [case.x, *first],
    }[missing]
    for tensor in frozen:
        tensor.requires_grad_(False)
    needed = [t for t in case.leaves if t.requires_grad]
    expected = torch.autograd.grad(case.composed(), needed, case.dy)
    compiled = torch.compile(case.fused, backend="aot_eager")
    for run in (case.fused, compiled):
        require_same_results(list(torch.autograd.grad(run(), needed, case.dy)), list(expected))


def test_without_gradients_and_in_inference_mode() -> None:
    case = Case("nvfp4")
    expected = case.composed()
    with torch.no_grad():
        assert torch.equal(case.fused(), expected)
    with torch.inference_mode():
        assert torch.equal(case.fused(), expected)


@pytest.mark.parametrize("recompute", ["", "weight"])
@pytest.mark.parametrize("recipe", PRESETS)
def test_compiled_and_checkpointed(recipe: str, recompute: str) -> None:
    torch.compiler.reset()
    case = Case(recipe, is_gated=recompute == "", has_bias=recompute == "")
    expected = case.results(case.composed)
    run = lambda: case.fused(recompute=recompute)  # noqa: E731
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    require_same_results(case.results(compiled), expected)
    again = lambda: checkpoint(lambda _: run(), case.x, use_reentrant=False)  # noqa: E731
    require_same_results(case.results(again), expected)


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4", "fp8_rowwise"])
def test_compiled_by_inductor(recipe: str) -> None:
    torch.compiler.reset()
    case = Case(recipe, has_bias=True)
    expected = case.results(case.composed)
    require_same_results(case.results(torch.compile(case.fused)), expected)


def test_saves_no_h_and_no_codes_of_weights_that_it_recomputes() -> None:
    case = Case("fp8_tensorwise", tokens=(128,))
    composed = saved_bytes(case.composed, case.leaves)
    fused = saved_bytes(case.fused, case.leaves)
    recomputed = saved_bytes(lambda: case.fused(recompute="weight"), case.leaves)
    weights = sum(w.numel() for w in case.weights)
    assert composed - fused >= 128 * HIDDEN
    assert (
        weights - 8 * len(case.weights) <= fused - recomputed <= weights + 512 * len(case.weights)
    )


def test_recompute_of_linear() -> None:
    for recipe in PRESETS:
        torch.manual_seed(0)
        x, w = torch.randn(40, K, requires_grad=True), torch.randn(N, K, requires_grad=True)
        state: dict[str, Any] = {"rng": torch.tensor([1, 2, 3])}
        found = []
        for recompute in ("", "weight"):
            history = torch.ones(6, 4) if mf.Recipe(recipe).is_delayed else None
            y = ops.linear(x, w, None, recipe, amax_history=history, recompute=recompute, **state)
            grads = torch.autograd.grad(y.square().sum(), (x, w))
            found.append([y, *grads, *([] if history is None else [history])])
        require_same_results(found[1], found[0])


def test_a_weight_that_changed_before_backward_raises() -> None:
    layer = nn.Linear(K, N, bias=False)
    x = torch.randn(8, K, requires_grad=True)
    y = ops.linear(x, layer.weight, None, "mxfp8", recompute="weight")
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "relu"}, "expected activation 'silu', 'gelu' or 'gelu_tanh', got 'relu'"),
        ({"weights": [torch.randn(HIDDEN, K)]}, r"expected 2 weights .* got 1"),
        (
            {
                "weights": [
                    torch.randn(HIDDEN, K),
                    torch.randn(HIDDEN + 1, K),
                    torch.randn(N, HIDDEN),
                ]
            },
            "one shape",
        ),
        (
            {
                "weights": [torch.randn(HIDDEN, K), torch.randn(N, HIDDEN + 1)],
                "biases": [None, None],
            },
            "weight",
        ),
        ({"biases": [None]}, "expected 3 biases, got 1"),
        ({"streams": [1]}, "expected 3 streams for 3 weights, got 1"),
        ({"recompute": "x"}, "expected recompute as '' or 'weight', got 'x'"),
        ({"weight_operands": [torch.zeros(1)] * 8}, "weight_operands"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    weights = [torch.randn(HIDDEN, K), torch.randn(HIDDEN, K), torch.randn(N, HIDDEN)]
    arguments: dict[str, Any] = {
        "x": torch.randn(4, K),
        "weights": weights,
        "biases": [None, None, None],
        "recipe": "mxfp8",
        "activation": "silu",
    } | change
    with pytest.raises(ValueError, match=message):
        ops.mlp(**arguments)


def test_a_trace_computes_layer_by_layer() -> None:
    model = mf.MLP(64, 96, gated=True, activation="silu", bias=True).bfloat16().eval()
    assert mf.quantize_(model, "mxfp8", keep="nothing", fuse=True).fused
    x = torch.randn(2, 30, 64, dtype=torch.bfloat16)
    traced = torch.jit.trace(model, x, check_trace=False)
    for p in model.parameters():
        p.data.mul_(2)
    assert torch.equal(traced(x), model._layer_by_layer(x))
