"""What torch.compile records of products of experts: the cast of rows, and a call each way."""

from __future__ import annotations

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch.utils.flop_counter import FlopCounterMode

from tests.nn.test_grouped_mm import MIXED, PRESETS, Case, recipe_of
from tests.nn.test_recorded_layers import recorded
from tests.support.same_bits import require_same_results

M, K, N, E = 64, 64, 128, 3
RECIPES = ["fp8_tensorwise", "fp8_delayed", "mxfp8", "nvfp4_pow2"]
OFFS = torch.tensor([16, 16, 60], dtype=torch.int32)


def tensor(*shape):
    return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)


def state_of(recipe):
    return torch.ones(6, E, 4) if mf.Recipe(recipe).is_delayed else None


@pytest.mark.parametrize("recompute", ["", "weight"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_calls_of_a_product(recipe, recompute):
    state = {"rng": torch.tensor([1, 2]), "amax_history": state_of(recipe)}

    def run(a, b, bias):
        return ops.scaled_grouped_mm(a, b, OFFS, recipe, bias=bias, recompute=recompute, **state)

    suffix = "_delayed" if mf.Recipe(recipe).is_delayed else ""
    forward, backward = recorded(run, tensor(M, K), tensor(E, K, N), tensor(E, N))
    assert forward == {"group_table": 1, f"quantize{suffix}": 1, f"linear_forward{suffix}": 1}
    assert backward == {f"linear_backward{suffix}": 1}


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "mxfp8"])
def test_calls_of_a_feed_forward_of_experts(recipe):
    """The products of gate and up, whose modules have streams of their own, share a cast."""
    pairs = torch.arange(M).int()
    order = [pairs, pairs.view(M // 2, 2), OFFS, pairs]

    def run(x, weights, *matrices):
        options = {"streams": [1, 2, 3], "recompute": [""] * 3}
        return ops.grouped_mlp(x, weights, order, [*matrices], [None] * 2, [recipe] * 3, **options)

    matrices = [tensor(E, K, N), tensor(E, K, N), tensor(E, N, K)]
    forward, backward = recorded(run, tensor(M // 2, K), tensor(M // 2, 2), *matrices)
    between = {"take_rows": 1, "add_slots": 1}
    casts = {"group_table": 1, "quantize": 2, "linear_forward": 3}
    assert forward == {**between, **casts, "swiglu": 1}
    assert backward == {**between, "linear_backward": 3, "swiglu_backward": 1}


@pytest.mark.parametrize(
    ("layout", "recompute", "dtype"),
    [("column", "weight", torch.float32), ("row", "", None), ("strided", "weight", None)],
)
@pytest.mark.parametrize("recipe", [*PRESETS, *MIXED])
def test_bits_of_eager_code(recipe, layout, recompute, dtype):
    """Of each layout of the matrices, with rows past the last end and other results than bf16."""
    recipe = recipe_of(recipe)
    case = Case(recipe, layout=layout, bias=layout == "row")
    options = {"rng": case.rng, "recompute": recompute, "out_dtype": dtype or torch.bfloat16}
    options |= {"row_ids": torch.arange(len(case.x)).flip(0).int(), "first_expert": 2}
    b = case.w.transpose(-2, -1)
    if layout != "column":
        b = b.contiguous() if layout == "row" else torch.stack([b, b], -1)[..., 0]
    results = []
    torch.compiler.reset()
    for backend in ("eager", "aot_eager"):
        history = None if case.history is None else case.history.clone()
        leaves = [t.detach().requires_grad_() for t in (case.x, b, case.bias) if t is not None]

        def run(a, b, bias=None, history=history):
            state = {"amax_history": history, "bias": bias, **options}
            return ops.scaled_grouped_mm(a, b, case.offs, recipe, **state)

        y = torch.compile(run, fullgraph=True, backend=backend)(*leaves)
        gradients = torch.autograd.grad(y, leaves, case.g.to(y.dtype))
        results.append([y.detach(), *gradients, *([] if history is None else [history])])
    require_same_results(results[1], results[0])


def test_flops():
    """Rows past the last end are counted, as of products in parts."""
    a, b = tensor(M, K), tensor(E, K, N)
    torch.compiler.reset()
    run = torch.compile(
        lambda a, b: ops.scaled_grouped_mm(a, b, OFFS, "mxfp8"), backend="aot_eager"
    )
    with FlopCounterMode(display=False) as counter:
        run(a, b).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * M * K * N
