"""mf.checkpoint_policy: the same bits, and fewer of them in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.support.same_bits import require_same

ROWS, WIDTH, HIDDEN = 256, 64, 256
TWO_AMAXES = "fprop=nvfp4*nvfp4/16x16 dgrad=mxfp8*mxfp8 wgrad=nvfp4+rht*nvfp4+rht"
CONTEXTS = partial(create_selective_checkpoint_contexts, mf.checkpoint_policy)


class Block(nn.Module):
    """A feed-forward whose layers share x, with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def blocks(recipe: str, recompute: str | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block()).bfloat16()
    mf.quantize_(model, recipe, recompute=recompute)
    return model


def run(model: nn.Module, x: Tensor, is_kept: bool) -> Tensor:
    for block in model:
        x = block(x) if is_kept else checkpoint(block, x, use_reentrant=False, context_fn=CONTEXTS)
    return x


def trained(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Returns losses and gradients of two steps."""
    found = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(ROWS, WIDTH, generator=generator).bfloat16().requires_grad_()
        loss = forward(x).float().square().mean()
        loss.backward()
        found += [loss.detach(), x.grad, *(p.grad for p in model.parameters())]
        model.zero_grad()
        mf.step(model)
    return found


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "recipe", ["fp8_tensorwise", "fp8_delayed", "nvfp4", "mxfp4", "fp8_rowwise", TWO_AMAXES]
)
def test_the_same_bits(recipe, compiled):
    found = []
    for is_kept in (True, False):
        model = blocks(recipe)
        forward: Any = partial(run, model, is_kept=is_kept)
        if compiled:
            torch.compiler.reset()
            forward = torch.compile(forward, backend="aot_eager")
        found.append(trained(model, forward))
    for i, (got, want) in enumerate(zip(found[1], found[0], strict=True)):
        require_same(got, want, f"tensor {i}")


def compiled(recipe: str, is_kept: bool) -> tuple[Any, Any]:
    """Returns the forward and the backward graph of the compiled blocks."""
    model, graphs = blocks(recipe, recompute="weight"), []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.graph)
        return graph

    torch.compiler.reset()
    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
    forward = torch.compile(partial(run, model, is_kept=is_kept), backend=backend)
    forward(torch.ones(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)).sum().backward()
    return graphs[0], graphs[1]


def saved_bytes(forward: Any) -> int:
    """Counts the bytes that a forward graph hands to backward, parameters left out."""
    outputs = next(n for n in forward.nodes if n.op == "output").args[0]
    values = (n.meta.get("val") for n in outputs if n is not None and n.op != "placeholder")
    return sum(t.nbytes for t in values if isinstance(t, Tensor))


def test_compiled_code_saves_no_codes_of_inputs():
    kept, again = (saved_bytes(compiled("fp8_rowwise", is_kept)[0]) for is_kept in (True, False))
    results = 2 * ROWS * (2 * WIDTH + 2 * 2 * HIDDEN + WIDTH)  # y; gate and up; what is between
    assert again <= results + 2 * ROWS * WIDTH
    assert kept >= again + 2 * ROWS * (WIDTH + HIDDEN)  # the codes of two blocks' inputs


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_rowwise", "mxfp8", TWO_AMAXES])
def test_backward_casts_inputs_in_one_direction(recipe):
    """The directions of the casts of inputs, of which gate and up share one a block."""
    forward, backward = (directions(graph) for graph in compiled(recipe, is_kept=False))
    assert forward == {(True, False): 4}
    assert backward == {(False, True): 4}
    forward, backward = (directions(graph) for graph in compiled(recipe, is_kept=True))
    assert forward == {(True, True): 4}
    assert not backward


def directions(graph: Any) -> Counter[tuple[bool, bool]]:
    found: Counter[tuple[bool, bool]] = Counter()
    for node in graph.nodes:
        if node.target is mf._native.ops.quantize.default:
            _, row, col = node.args[:3]
            found[bool(row), bool(col)] += 1
    return found
