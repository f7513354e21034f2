"""mf.GraphedStep on one GPU, and what it refuses. tests/gpu/test_sharded_graphs.py has FSDP2."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support import expert_world
from tests.support.same_bits import require_same
from tests.support.sharded_models import Model, batch, built, sharded
from tests.support.worlds import device_of, run_world

pytestmark = pytest.mark.gpu

WARM_UPS, CALLS = 2, 5
RATE = 2.0**-7  # with its halves exact in float32, so that an eager optimizer has the same rates
RECIPES = ["bf16", "fp8_delayed", "fp8_rowwise", "nvfp4", "mxfp4"]


class Job:
    """A model, and its step on two micro-batches."""

    def __init__(self, recipe: str, device: torch.device, compiled: bool = False) -> None:
        torch.manual_seed(0)
        model = Model() if recipe == "bf16" else built(recipe)
        self.model: nn.Module = model.to(device, torch.bfloat16)
        self.run: Any = torch.compile(self.model, fullgraph=True) if compiled else self.model
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, fused=True, capturable=True
        )

    def step(self, first: Tensor, second: Tensor) -> dict[str, Tensor]:
        losses = []
        for x in (first, second):
            loss = self.run(x).float().square().mean()
            loss.backward()
            losses.append(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mf.step(self.model)
        return {"first": losses[0], "second": losses[1]}


def inputs(device: torch.device, step: int) -> list[Tensor]:
    return [batch(2 * step + i, dtype=torch.bfloat16).to(device) for i in range(2)]


def train(job: Job, step: Callable[..., Any], device: torch.device) -> list[Tensor]:
    """Runs steps, each at half the rate of the one before; returns the losses that each gave."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(job.optimizer, lambda i: 2.0**-i)
    losses = []
    for i in range(CALLS):
        losses += step(*inputs(device, i)).values()
        scheduler.step()
    return losses


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_call_is_the_next_step(cuda, recipe, compiled):
    torch.compiler.reset()
    plain, job = Job(recipe, cuda, compiled), Job(recipe, cuda, compiled)
    want = train(plain, plain.step, cuda)
    step = mf.GraphedStep(job.step, job.model, job.optimizer, warm_ups=WARM_UPS)
    got = train(job, step, cuda)
    require_same(torch.stack(got), torch.stack([loss.detach() for loss in want]), "losses")
    for (name, weight), other in zip(plain.model.named_parameters(), job.model.parameters()):
        require_same(other, weight, name)
    for name, state in mf.training_state(plain.model).items():
        require_same(mf.training_state(job.model)[name], state, name)
    assert job.optimizer.param_groups[0]["lr"] == RATE * 2.0**-CALLS


def test_a_rate_in_a_tensor_and_a_rate_that_is_assigned(cuda):
    """Takes a tensor of the user's, then a number in its place."""
    losses = []
    for is_graphed in (False, True):
        job = Job("fp8_rowwise", cuda)
        group = job.optimizer.param_groups[0]
        step: Any = job.step
        if is_graphed:
            step = mf.GraphedStep(job.step, job.model, [job.optimizer], warm_ups=1)
        group["lr"] = torch.tensor(RATE, device=cuda)
        seen = []
        for i in range(CALLS):
            if i == 2:
                group["lr"].mul_(4)
            if i == 3:
                group["lr"] = RATE / 2
            seen.append(step(*inputs(cuda, i))["second"].detach())
        losses.append(torch.stack(seen))
    require_same(losses[1], losses[0], "losses")


def captured_job(device: torch.device) -> tuple[Job, mf.GraphedStep]:
    job = Job("nvfp4", device)
    step = mf.GraphedStep(job.step, job.model, job.optimizer, warm_ups=1)
    for i in range(2):
        step(*inputs(device, i))
    return job, step


def test_what_changes_after_the_capture_is_refused(cuda):
    job, step = captured_job(cuda)
    x, y = inputs(cuda, 2)
    with pytest.raises(ValueError, match=r"expected a tensor .*\(24, 48\).*got .*\(8, 48\)"):
        step(x[:8], y)
    with pytest.raises(ValueError, match="structure"):
        step(x, second=y)
    job.model.eval()
    with pytest.raises(ValueError, match="training=True"):
        step(x, y)
    job.model.train()
    name, inner = [*job.model.named_modules()][-1]
    inner.eval()
    with pytest.raises(ValueError, match=rf"{re.escape(name)} with training=True"):
        step(x, y)
    inner.train()
    weight = next(job.model.parameters()).requires_grad_(False)
    with pytest.raises(ValueError, match="with requires_grad=True"):
        step(x, y)
    weight.requires_grad_()
    group = job.optimizer.param_groups[0]
    group["params"].append(nn.Parameter(torch.ones(1, device=cuda)))
    with pytest.raises(ValueError, match=r"parameters that param_groups\[0\] had at the capture"):
        step(x, y)
    group["params"].pop()
    group["betas"], betas = (0.8, 0.9), group["betas"]
    with pytest.raises(ValueError, match=r"expected param_groups\[0\]\['betas'\]"):
        step(x, y)
    group["betas"] = betas
    step(x, y)
    job.optimizer.load_state_dict(job.optimizer.state_dict())
    with pytest.raises(ValueError, match="load_state_dict"):
        step(x, y)
    state = job.model.state_dict()
    job.model.load_state_dict({name: t.clone() for name, t in state.items()}, assign=True)
    with pytest.raises(ValueError, match="as at the capture, got another"):
        step(x, y)


def test_optimizers_that_a_graph_would_freeze_are_refused(cuda):
    model = built("nvfp4").to(cuda)
    with pytest.raises(ValueError, match="make it with capturable=True"):
        mf.GraphedStep(print, model, torch.optim.AdamW(model.parameters(), fused=True))


def test_the_call_after_the_warm_ups_captures(cuda):
    """A call that raises is no warm-up. Replays run no Python."""
    job = Job("nvfp4", cuda)
    calls, fails = [], [True]

    def step(*micro_batches: Tensor) -> dict[str, Tensor]:
        calls.append(torch.cuda.is_current_stream_capturing())
        if fails and fails.pop():
            raise KeyError("a batch")
        return job.step(*micro_batches)

    run = mf.GraphedStep(step, job.model, job.optimizer, warm_ups=2)
    stream = torch.cuda.current_stream()
    with pytest.raises(KeyError, match="a batch"):
        run(*inputs(cuda, 0))
    for i in range(5):
        run(*inputs(cuda, i))
    assert calls == [False, False, False, True]
    assert torch.cuda.current_stream() == stream


def test_delayed_scaling_without_its_step_is_refused(cuda):
    job = Job("fp8_delayed", cuda)

    def step(x: Tensor) -> None:
        job.model(x).float().square().mean().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()

    run = mf.GraphedStep(step, job.model, job.optimizer, warm_ups=1)
    x = inputs(cuda, 0)[0]
    run(x)
    with pytest.raises(ValueError, match=r"expected mf\.step\(model\) once a step"):
        run(x)
    mf.step(job.model)  # between calls is as good
    run(x)


def check_wait(rank: int) -> None:
    """Waits for the device on rank 0, as a program that prints its loss does."""
    device = device_of(rank, "cuda")
    model: Any = sharded(built("nvfp4").to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True, capturable=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
        if rank == 0:
            loss.item()
        return loss

    run = mf.GraphedStep(step, model, optimizer, warm_ups=2)
    x = batch(0).to(device)
    for _ in range(2):
        run(x)
    stream = torch.cuda.current_stream()
    with pytest.raises((RuntimeError, ValueError), match="nothing in it may wait for the device"):
        run(x)
    assert torch.cuda.current_stream() == stream


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_that_waits_is_refused_on_all_ranks(cuda, ranks):
    run_world(ranks, check_wait, kind="cuda")


def check_experts(rank: int) -> None:
    """Trains experts that ranks divide: eagerly, and by a GraphedStep."""
    x = expert_world.draw(rank, 24)
    losses = []
    for is_graphed in (False, True):
        moe = expert_world.built("fp8_rowwise")
        mf.expert_parallel(moe, dist.group.WORLD, capacity="all")
        optimizer = torch.optim.AdamW(moe.parameters(), lr=RATE, fused=True, capturable=True)

        def step(x: Tensor, moe: Any = moe, optimizer: Any = optimizer) -> Tensor:
            loss: Tensor = moe(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            mf.step(moe)
            return loss.detach()

        run = mf.GraphedStep(step, moe, optimizer, warm_ups=2) if is_graphed else step
        losses.append(torch.stack([run(x) for _ in range(CALLS)]))
    require_same(losses[1], losses[0], "losses")


def check_exact_sizes(rank: int) -> None:
    moe = mf.expert_parallel(expert_world.built("fp8_rowwise"), dist.group.WORLD)
    optimizer = torch.optim.AdamW(moe.parameters(), fused=True, capturable=True)
    with pytest.raises(ValueError, match=r"expected a capacity of the divided experts"):
        mf.GraphedStep(print, moe, optimizer)


@pytest.mark.parametrize("check", [check_experts, check_exact_sizes])
def test_experts_that_ranks_divide_need_a_capacity(cuda, check):
    run_world(2, check, kind="cuda")
