"""mf.step and mf.training_state in stages of a pipeline, against one process."""

import copy

import minifloat as mf
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.functional import mse_loss

from tests.support.same_bits import require_same
from tests.support.worlds import run_world

D, TOKENS, MICRO, STEPS = 64, 32, 4, 3


class Experts(nn.Module):
    """A residual mixture of experts, whose balance bias every step moves."""

    def __init__(self):
        super().__init__()
        self.moe = mf.MoE(D, D, 8, 2, balance="bias")

    def forward(self, x):
        return x + self.moe(x)


def built(recipe, sizes, has_experts):
    """Returns a converted model of stages, of equal bytes everywhere.

    Magnitudes differ from stage to stage, and so do amaxes and the loads of experts.
    """
    torch.manual_seed(0)
    stages = [
        nn.Sequential(
            *(nn.Sequential(nn.Linear(D, D), nn.GELU()) for _ in range(layers)),
            *([Experts()] if has_experts else []),
        )
        for layers in sizes
    ]
    model = nn.Sequential(*stages)
    with torch.no_grad():
        for i, stage in enumerate(model):
            stage[0][0].weight.mul_(1 + 8 * (i % 2))
    mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0, verbose=False)
    return model


def batch(step, rank=0, ranks=1):
    """Returns a data-parallel rank's rows of a step's batch."""
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(step))
    return x.chunk(ranks)[rank], x.flip(1).chunk(ranks)[rank]


def train_alone(model, group):
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x, y = batch(step)
        of_micro = []
        for inputs, targets in zip(x.chunk(MICRO), y.chunk(MICRO)):
            of_micro.append(mse_loss(model(inputs), targets))
            of_micro[-1].backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(MICRO)
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model, group)
        losses.append(torch.stack(of_micro).detach())
    return losses


class Pipeline:
    """The stages of this rank, each a copy with a random state of its own.

    numbers: of the stages on each rank.
    """

    def __init__(self, schedule, model, numbers, group=None):
        rank, count = dist.get_rank(group), len(model)
        self.numbers = numbers[rank]
        self.modules = nn.ModuleList(copy.deepcopy(model[i]) for i in self.numbers)
        # With inputs and outputs given, torch runs no forward to find their shapes.
        some = torch.zeros(TOKENS // MICRO, D)
        stages = [
            PipelineStage(
                m, i, count, torch.device("cpu"), input_args=some, output_args=some, group=group
            )
            for i, m in zip(self.numbers, self.modules)
        ]
        is_multi = len(numbers[0]) > 1
        self.schedule = schedule(stages if is_multi else stages[0], MICRO, loss_fn=mse_loss)
        self.optimizer = torch.optim.SGD(self.modules.parameters(), lr=0.05)
        self.is_first, self.is_last = 0 in self.numbers, count - 1 in self.numbers

    def train(self, steps=range(STEPS)):
        losses = []
        for step in steps:
            x, y = batch(step)
            of_micro = []
            inputs = (x,) if self.is_first else ()
            self.schedule.step(
                *inputs, **({"target": y, "losses": of_micro} if self.is_last else {})
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
            mf.step(self.modules if len(self.modules) > 1 else self.modules[0])
            if self.is_last:
                losses.append(torch.stack(of_micro).detach())
        return losses


def states_of(module):
    """Returns all that training has changed: weights, biases of routers, amaxes, counts."""
    found = {name: t for name, t in module.state_dict().items() if isinstance(t, torch.Tensor)}
    found |= mf.training_state(module)
    routers = (m for m in module.modules() if hasattr(m, "step_counts"))
    return found | {f"counts.{i}": router.step_counts for i, router in enumerate(routers)}


def assert_trains_as_one(pipeline, alone, want, what):
    losses = pipeline.train()
    if pipeline.is_last:
        require_same(torch.stack(losses), torch.stack(want), what)
    for i, module in zip(pipeline.numbers, pipeline.modules):
        # A deep copy has the same outside state, so a stage's names are equal to the pipeline's.
        want_states, got = states_of(alone[i]), states_of(module)
        assert got.keys() == want_states.keys(), what
        for name, value in got.items():
            require_same(value, want_states[name], f"{what}: stage {i}: {name}")


# ScheduleZBVZeroBubble sends to its own rank, which gloo does not.
SCHEDULES = {
    "1F1B": (Schedule1F1B, ([0], [1]), (3, 1)),
    "GPipe": (ScheduleGPipe, ([0], [1]), (1, 2)),
    "interleaved": (ScheduleInterleaved1F1B, ([0, 2], [1, 3]), (1, 2, 1, 1)),
    "zero bubble": (ScheduleInterleavedZeroBubble, ([0, 2], [1, 3]), (1, 2, 1, 1)),
}


CASES = [(name, False) for name in SCHEDULES] + [("1F1B", True), ("interleaved", True)]


def check_schedules(rank):
    own = [dist.new_group([i]) for i in range(2)][rank]
    cases = [("fp8_delayed", name, has_experts) for name, has_experts in CASES]
    cases += [("nvfp4", "1F1B", True), ("nvfp4", "zero bubble", False), ("mxfp8", "1F1B", True)]
    cases += [("*: fp8_delayed; 1.*: bf16", name, False) for name in ("1F1B", "zero bubble")]
    for recipe, name, has_experts in cases:
        schedule, numbers, sizes = SCHEDULES[name]
        alone = built(recipe, sizes, has_experts)
        pipeline = Pipeline(schedule, alone, numbers)
        want = train_alone(alone, own)
        what = f"{recipe}, {name}, experts: {has_experts}"
        assert_trains_as_one(pipeline, alone, want, what)


def test_every_schedule_trains_as_one_process():
    run_world(2, check_schedules)
