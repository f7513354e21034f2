"""What torch.compile records of a linear layer: three calls of the host, of which x's is shared."""

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
from torch.utils.flop_counter import FlopCounterMode, flop_registry

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
        names = (str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        calls = (name.split(".")[1] for name in names if name.startswith("minifloat."))
        found.append(Counter(name for name in calls if not name.startswith("advance")))
        return graph

    torch.compiler.reset()
    partition = min_cut_rematerialization_partition  # Inductor's, which merges equal casts
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
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


def test_what_is_recorded_in_parts():
    """Values in high precision, or sums of gradients, leave the ops within to the compiler."""
    forward, backward = siblings("fp8_rowwise_gw_hp")
    assert forward["linear_forward"] == 2
    assert backward == {"linear_backward": 2}
    of_bf16 = "fprop=e4m3/row*bf16 dgrad=e4m3/row*bf16 wgrad=e4m3/row*e4m3/row"
    forward, _ = siblings(of_bf16)
    assert forward["linear_forward"] == 0
    assert forward["scaled_mm"] == 2


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
