"""What torch.compile records of layers: the cast of x, which they share, and a call each way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._ops import HigherOrderOperator
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tests.support.mlp_cases import Case

ROWS, WIDTH, HIDDEN = 64, 64, 128


class Siblings(nn.Module):
    """Two layers that read x."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, HIDDEN, bias=bias) for bias in (False, True))

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.b(x)


def siblings(recipe: str, **options: object) -> list[Counter[str]]:
    torch.manual_seed(0)
    model = Siblings().bfloat16()
    mf.quantize_(model, recipe, **options)
    return recorded(model, torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True))


def recorded(function: Callable[..., Tensor], *inputs: Tensor) -> list[Counter[str]]:
    """Returns how often each op of ours is in the forward graph, and in the backward graph."""
    found: list[Counter[str]] = []

    def keep(graph, inputs):
        calls = [n for n in graph.graph.nodes if n.op == "call_function"]
        # A call that writes is an argument of torch's auto_functionalized.
        names = (
            str(n.args[0] if isinstance(n.target, HigherOrderOperator) else n.target) for n in calls
        )
        calls = (name.split(".")[1] for name in names if name.startswith("minifloat."))
        found.append(Counter(name for name in calls if not name.startswith("advance")))
        return graph

    torch.compiler.reset()
    partition = min_cut_rematerialization_partition  # Inductor's, which merges equal casts
    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    torch.compile(function, backend=backend)(*inputs).sum().backward()
    return found


@pytest.mark.parametrize("recompute", [None, "weight"])
@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "mxfp8", "nvfp4_pow2"])
def test_calls_of_two_layers_that_share_x(recipe, recompute):
    forward, backward = siblings(recipe, recompute=recompute)
    assert forward == {"quantize": 1, "linear_forward": 2}
    assert backward == {"linear_backward": 2}


def test_calls_of_a_group():
    """The layers of mf.functional.linear_group have a call each."""
    x = torch.randn(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(n, WIDTH, dtype=torch.bfloat16, requires_grad=True) for n in (64, 128)]
    group = partial(mf.functional.linear_group, recipe="fp8_tensorwise")
    forward, backward = recorded(lambda x, *weights: torch.cat(group(x, weights), 1), x, *weights)
    assert forward == {"quantize": 1, "linear_forward": 2}
    assert backward == {"linear_backward": 2}


@pytest.mark.parametrize("recompute", ["", "weight"])
@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_delayed", "mxfp8", "nvfp4_pow2"])
def test_calls_of_a_feed_forward(recipe, recompute):
    suffix = "_delayed" if mf.Recipe(recipe).is_delayed else ""
    for is_gated in (True, False):
        case = Case(recipe, is_gated, has_bias=True)
        run = lambda x, *weights: case.fused(recompute=recompute)  # noqa: B023, E731
        forward, backward = recorded(run, case.x, *case.weights)
        # The cast of x raises one history itself; those of two weights are raised after it.
        cast = f"quantize{suffix}" if not is_gated else "quantize"
        assert forward == {cast: 1, f"mlp_forward{suffix}": 1}
        assert backward == {f"mlp_backward{suffix}": 1}


def test_feed_forwards_that_are_recorded_in_parts():
    """Backward reads the codes of h that forward read, or adds to sums of gradients."""
    case = Case("mxfp4_weights_served")
    forward, _ = recorded(lambda x: case.fused(), case.x)
    assert forward["mlp_forward"] == 0
    case = Case("mxfp8")
    forward, backward = recorded(lambda x: case.fused(accumulate="grad"), case.x)
    assert forward["mlp_forward"] == 1
    assert backward["mlp_backward"] == 0
    assert backward["scaled_mm"] == 6


def test_what_is_recorded_in_parts():
    """Values in high precision, or sums of gradients, leave the ops within to the compiler."""
    forward, backward = siblings("fp8_rowwise_gw_hp")
    assert forward["linear_forward"] == 2
    assert backward == {"linear_backward": 2}
    of_bf16 = "fprop=e4m3/row*bf16 dgrad=e4m3/row*bf16 wgrad=e4m3/row*e4m3/row"
    forward, _ = siblings(of_bf16)
    assert forward["linear_forward"] == 0
    assert forward["scaled_mm"] == 2


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "fp8_delayed", "nvfp4"])
@pytest.mark.parametrize("make", [nn.Linear, mf.MLP])
def test_no_rows(make, recipe):
    model = nn.Sequential(make(WIDTH, HIDDEN))
    mf.quantize_(model, recipe, keep="nothing")
    x = torch.randn(0, WIDTH, requires_grad=True)
    torch.compiler.reset()
    torch.compile(model, backend="aot_eager")(x).sum().backward()
    assert x.grad.shape == x.shape
    assert not any(p.grad.any() for p in model.parameters())


def test_flops_of_recorded_layers():
    x, w = torch.randn(ROWS, WIDTH), torch.randn(HIDDEN, WIDTH)
    count = flop_registry[ops.linear_forward]
    left = ops.quantize(x, "nvfp4", "")[:4]
    assert count(*left, w, out_val=None) == 2 * ROWS * WIDTH * HIDDEN
    grad = torch.randn(2, ROWS // 2, HIDDEN)
    count = flop_registry[ops.linear_backward]
    for needed, products in (([True, True, True], 2), ([False, True, False], 1)):
        flops = count(grad, [x] * 6, "nvfp4", needed, WIDTH, out_val=None)
        assert flops == products * 2 * ROWS * WIDTH * HIDDEN
    with FlopCounterMode(display=False) as counter:
        mf.linear(x.requires_grad_(), w, recipe="mxfp8").sum().backward()
    assert counter.get_total_flops() == 2 * 2 * ROWS * WIDTH * HIDDEN


@pytest.mark.parametrize("is_gated", [True, False])
def test_flops_of_recorded_feed_forwards(is_gated):
    """As many as of the products in parts, whichever gradients are needed."""
    for frozen in ([], ["x"], ["x", "inputs"], ["output"]):
        totals = []
        for backend in ("aot_eager", "eager"):
            torch.compiler.reset()
            case = Case("mxfp8", is_gated)
            of = {"x": [case.x], "inputs": case.weights[:-1], "output": case.weights[-1:]}
            for name in frozen:
                for tensor in of[name]:
                    tensor.requires_grad_(False)
            run = torch.compile(case.fused, backend=backend)
            with FlopCounterMode(display=False) as counter:
                run().backward(case.dy)
            totals.append(counter.get_total_flops())
        assert totals[0] == totals[1] > 0
