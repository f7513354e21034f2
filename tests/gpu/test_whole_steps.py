"""Whole training steps in CUDA graphs: by mode="reduce-overhead", and captured by hand.

Every preset, several steps: gradients and random states are those of eager mode, and a stochastic
recipe draws fresh bits in each step.
"""

from __future__ import annotations

from typing import Any

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gpu.layer_cases import require_close
from tests.support.graphs import captured

pytestmark = pytest.mark.gpu

WIDTH, TOKENS, STEPS, RATE = 128, 192, 4, 5e-5
# Products may be summed in another order. Nothing else rounds differently: see Block.
LIMIT = 2.0**-8


class Block(nn.Module):
    """Layers and a ReLU. Each value has one reader: fused kernels add gradients of two in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(torch.relu(self.w1(x)))


class GatedBlock(nn.Module):
    """A gated feed-forward, which mf.quantize_(…, fuse=True) makes one op."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def build(recipe: str, device: torch.device, fuse: bool) -> nn.Module:
    torch.manual_seed(0)
    block = GatedBlock if fuse else Block
    model = nn.Sequential(block(), block()).to(device, torch.bfloat16)
    if recipe != "bf16":
        report = mf.quantize_(model, recipe, fuse=fuse)
        assert bool(report.fused) == fuse
    return model


# Recipes, each without and with fused feed-forwards. Under these weight gradients read values.
UNFUSED = ("bf16", "fp8_rowwise_gw_hp", "mxfp4_weights_served")
MODELS = [(r, False) for r in mf.presets()]
MODELS += [(r, True) for r in mf.presets() if r not in UNFUSED]


def loss_of(y: Tensor) -> Tensor:
    """Computes a loss with gradients that are not zero in E5M2 before a history scales them."""
    return 1e3 * y.float().square().mean()


def batches(device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (TOKENS, WIDTH)
    return [torch.randn(shape, generator=generator).bfloat16().to(device) for _ in range(STEPS)]


def train(model: nn.Module, run: Any, inputs: list[Tensor]) -> list[Tensor]:
    """Trains with SGD; returns the first weight's gradient in each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    gradients = []
    for x in inputs:
        loss_of(run(x)).backward()
        gradients.append(model[0].w1.weight.grad.clone())
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
    return gradients


@pytest.mark.parametrize(("recipe", "fuse"), MODELS)
def test_reduce_overhead(cuda, recipe, fuse):
    """Compares with eager steps, or of a fused model with compiled ones.

    Inductor adds the gradients of gate and up in fp32, within the norm's backward.
    """
    plain, model = build(recipe, cuda, fuse), build(recipe, cuda, fuse)
    torch.compiler.reset()
    run = torch.compile(plain, fullgraph=True) if fuse else plain
    want = train(plain, run, batches(cuda))
    got = train(model, torch.compile(model, mode="reduce-overhead", fullgraph=True), batches(cuda))
    for i, (a, b) in enumerate(zip(got, want)):
        require_close(a, b, LIMIT, f"{recipe}: gradient of step {i}")
    for name, value in mf.training_state(plain).items():
        if name == "rng":
            assert torch.equal(value, mf.training_state(model)[name]), name


@pytest.mark.parametrize(
    ("recipe", "fuse"), [(r, fuse) for r, fuse in MODELS if mf.Recipe(r).is_stochastic]
)
def test_reduce_overhead_draws_fresh_bits(cuda, recipe, fuse):
    """Trains with a rate of zero on one batch: only random bits change the gradients."""
    model = build(recipe, cuda, fuse)
    torch.compiler.reset()
    compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    x, seen = batches(cuda)[0], []
    for _ in range(5):
        loss_of(compiled(x)).backward()
        seen.append(model[0].w1.weight.grad.clone())
        model.zero_grad()
        mf.step(model)
    for i, a in enumerate(seen):
        for b in seen[:i]:
            assert not torch.equal(a, b)


@pytest.mark.parametrize(("recipe", "fuse"), MODELS)
def test_a_captured_step_is_eagers(cuda, recipe, fuse):
    """Captures forward, backward, SGD and mf.step: each replay is the next eager step."""
    eager, model = build(recipe, cuda, fuse), build(recipe, cuda, fuse)
    inputs, static = batches(cuda), torch.empty(TOKENS, WIDTH, device=cuda, dtype=torch.bfloat16)

    def step(m: nn.Module, x: Tensor) -> Tensor:
        m.zero_grad()
        loss_of(m(x)).backward()
        gradient = m[0].w1.weight.grad.clone()
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(p.grad, alpha=RATE)
        mf.step(m)
        return gradient

    before = [p.detach().clone() for p in model.parameters()]
    state = mf.training_state(model)
    static.copy_(inputs[0])
    graph, gradient = captured(lambda: step(model, static), warm_ups=2)
    with torch.no_grad():
        for p, old in zip(model.parameters(), before):
            p.copy_(old)
    mf.load_training_state(model, state)
    for i, x in enumerate(inputs):
        static.copy_(x)
        graph.replay()
        want = step(eager, x)
        require_close(gradient, want, LIMIT, f"{recipe}: gradient of step {i}")
    for name, value in mf.training_state(eager).items():
        if name == "rng":
            assert torch.equal(value, mf.training_state(model)[name]), name
