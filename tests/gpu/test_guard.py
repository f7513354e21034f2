"""mf.inspector.StepGuard on one device: nothing waits, and a CUDA graph skips a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import minifloat as mf
import pytest
import torch
from minifloat.inspector import StepGuard
from torch import Tensor, nn

from tests.support.guard_warnings import said_by
from tests.support.same_bits import require_all_same
from tests.support.sharded_models import batch, built

pytestmark = pytest.mark.gpu

STEPS, BAD = 6, 4  # the graph's third step; warm-ups and its capture come first
RATE = 2.0**-7  # exact in float32, so that an eager optimizer has the same rate
Optimizers = dict[str, Callable[[Any], torch.optim.Optimizer]]
OPTIMIZERS: Optimizers = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=RATE, fused=True, capturable=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=RATE, momentum=0.5, fused=True),
}


class Job:
    def __init__(self, device: torch.device, optimizer: str) -> None:
        self.model = built("fp8_delayed").to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.guard: StepGuard | None = None

    def step(self, x: Tensor, factor: Tensor) -> Tensor:
        loss = (self.model(x) * factor).square().mean()
        loss.backward()
        if self.guard is not None:
            self.guard.check()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mf.step(self.model)
        return loss

    @property
    def state(self) -> dict[str, Tensor]:
        found = dict(self.model.state_dict()) | mf.training_state(self.model)
        for i, states in self.optimizer.state_dict()["state"].items():
            found |= {f"{name} of {i}": t for name, t in states.items()}
        return {name: t.detach().clone() for name, t in found.items()}


def inputs(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns a batch, and the factor of the loss, which makes step BAD's gradients Inf or NaN."""
    factor = torch.tensor(math.inf if step == BAD else 1.0)
    return batch(step).to(device), factor.to(device)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nothing_waits_for_the_device(device, name):
    """Weights, states and histories are those without the step, which the next one reports."""
    guarded, plain = Job(device, name), Job(device, name)
    batches = [inputs(step, device) for step in range(STEPS)]
    guarded.step(*batches[0])  # kernels are loaded
    plain.step(*batches[0])
    guard = guarded.guard = StepGuard(guarded.model, guarded.optimizer, on_nonfinite="skip")

    def steps(numbers: Any) -> None:
        is_cuda = device.type == "cuda"
        if is_cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            for step in numbers:
                guarded.step(*batches[step])
        finally:
            if is_cuda:
                torch.cuda.set_sync_debug_mode("default")

    assert not said_by(lambda: steps(range(1, BAD + 1)))
    (text,) = said_by(lambda: guarded.step(*batches[BAD + 1]))
    assert text.startswith(f"minifloat: step {BAD}: 12 of 12")
    guard.remove()
    for step in range(1, STEPS):
        if step != BAD:
            plain.step(*batches[step])
    require_all_same(guarded.state, plain.state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_graph_skips_a_step(device, name):
    graphed, plain = Job(device, name), Job(device, name)
    guard = graphed.guard = StepGuard(graphed.model, graphed.optimizer, on_nonfinite="skip")
    step = mf.GraphedStep(graphed.step, graphed.model, graphed.optimizer, warm_ups=2)

    def steps() -> None:
        for i in range(STEPS):
            step(*inputs(i, device))
        guard.remove()

    (text,) = said_by(steps)
    assert text.startswith(f"minifloat: step {BAD + 1}: 12 of 12")
    for i in range(STEPS):
        if i != BAD:
            plain.step(*inputs(i, device))
    require_all_same(graphed.state, plain.state)


def test_a_graph_raises_before_the_next_step(device):
    job = Job(device, "adamw")
    guard = job.guard = StepGuard(job.model, job.optimizer, on_nonfinite="raise")
    step = mf.GraphedStep(job.step, job.model, job.optimizer, warm_ups=2)
    for i in range(BAD):
        step(*inputs(i, device))
    before = job.state
    step(*inputs(BAD, device))
    with pytest.raises(FloatingPointError, match=f"step {BAD + 1}: 12 of 12"):
        step(*inputs(BAD + 1, device))
    require_all_same(job.state, before)
    assert guard.steps == BAD + 1


def test_what_a_graph_cannot_skip_is_refused(cuda):
    model = nn.Linear(16, 16, device=cuda)
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
    guard = StepGuard(model, optimizer, on_nonfinite="skip")

    def step(x: Tensor) -> None:
        model(x).sum().backward()
        guard.check()
        optimizer.step()
        optimizer.zero_grad()

    run = mf.GraphedStep(step, model, optimizer, warm_ups=1)
    run(torch.ones(2, 16))
    with pytest.raises(ValueError, match="expected optimizers that a CUDA graph can leave a step"):
        run(torch.ones(2, 16))


def test_a_guard_that_comes_after_the_capture_is_refused(cuda):
    job = Job(cuda, "adamw")
    step = mf.GraphedStep(job.step, job.model, job.optimizer, warm_ups=1)
    for i in range(2):
        step(*inputs(i, cuda))
    guard = StepGuard(job.model, job.optimizer, on_nonfinite="skip")
    with pytest.raises(ValueError, match="expected the guard that the model had at the capture"):
        step(*inputs(2, cuda))
    guard.remove()
    step(*inputs(2, cuda))


def test_a_graph_repeats_the_batch_of_its_step(cuda):
    """The next call's arguments are written where that batch was."""
    job = Job(cuda, "adamw")

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        return loss

    guard = StepGuard(job.model, job.optimizer, on_nonfinite="raise", loss=loss_of)

    def step(x: Tensor) -> None:
        loss_of(job.model, x).backward()
        guard.check(x)
        job.optimizer.step()
        job.optimizer.zero_grad()
        mf.step(job.model)

    run = mf.GraphedStep(step, job.model, job.optimizer, warm_ups=2)
    for i in range(BAD):
        run(batch(i).to(cuda))
    x = batch(BAD)
    x[0, 0] = math.inf
    run(x.to(cuda))
    with pytest.raises(FloatingPointError, match=r"in blocks\.0\.norm, x: 1 of 1152 values"):
        run(batch(BAD + 1).to(cuda))


def test_a_graph_leaves_out_a_step_of_one_optimizer(device):
    """The other's check reads all gradients, before the first has made new ones."""
    models = nn.ModuleList(nn.Linear(16, 16, device=device) for _ in range(2))
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    guard = StepGuard(models, optimizers, on_nonfinite="skip")

    def step(x: Tensor) -> None:
        for model, optimizer, factor in zip(models, optimizers, x):
            optimizer.zero_grad()
            (model(torch.ones(2, 16, device=device)) * factor).sum().backward()
            guard.check()
            optimizer.step()

    run = mf.GraphedStep(step, models, optimizers, warm_ups=2)
    for _ in range(4):
        run(torch.ones(2, device=device))
    before = [model.weight.detach().clone() for model in models]
    wrong = torch.tensor([math.inf, 1.0], device=device)
    assert len(said_by(lambda: [run(wrong), guard.remove()])) == 1
    assert [torch.equal(m.weight, w) for m, w in zip(models, before)] == [True, False]


@pytest.mark.parametrize("bad", [0, 1])
def test_a_graph_reports_each_of_its_checks(cuda, bad):
    """Two optimizers are checked before each step, and a check of all gradients comes between."""
    models = nn.ModuleList(nn.Linear(16, 16, device=cuda) for _ in range(2))
    optimizers = [OPTIMIZERS["adamw"](model.parameters()) for model in models]
    guard = StepGuard(models, optimizers, on_nonfinite="skip")

    def step(x: Tensor) -> None:
        for i in range(2):
            (models[i](torch.ones(2, 16, device=cuda)) * x[i]).sum().backward()
            guard.check()
            optimizers[i].step()
            optimizers[i].zero_grad()

    run = mf.GraphedStep(step, models, optimizers, warm_ups=2)
    fine = torch.ones(2)
    wrong = fine.clone()
    wrong[bad] = math.inf
    for _ in range(4):
        run(fine)
    before = [p.detach().clone() for p in models[bad].parameters()]
    assert not said_by(lambda: run(wrong))
    require_all_same([p.detach() for p in models[bad].parameters()], before)
    for model in models:
        model(torch.ones(2, 16, device=cuda)).sum().backward()
    assert len(said_by(guard.check)) == 1
    for optimizer in optimizers:
        optimizer.zero_grad()
    assert not said_by(lambda: run(fine))
    assert not said_by(lambda: run(wrong))
    assert len(said_by(guard.remove)) == 1
    assert guard.steps == 2 * 7 + 1
    assert all(p.isfinite().all() for p in models.parameters())
