"""mf.step and mf.training_state in stages of a pipeline, against one process."""

import copy

import minifloat as mf
import pytest
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
    mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0)
    return model


def batch(step, copy=0, copies=1):
    """Returns a step's batch, or the rows of one of several data-parallel copies."""
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(step))
    return x.chunk(copies)[copy], x.flip(1).chunk(copies)[copy]


def train_alone(model, group, lr=0.05):
    losses, optimizer = [], torch.optim.SGD(model.parameters(), lr=lr)
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
    copies: data-parallel copies of the pipeline, of two ranks each.
    group: the ranks of this copy; None: all.
    """

    def __init__(self, schedule, model, numbers, lr=0.05, copies=1, group=None):
        rank, count = dist.get_rank(group), len(model)
        self.rows = dist.get_rank() // 2, copies
        micro = MICRO // copies
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
        self.schedule = schedule(stages if is_multi else stages[0], micro, loss_fn=mse_loss)
        self.optimizer = torch.optim.SGD(self.modules.parameters(), lr=lr)
        self.is_first, self.is_last = 0 in self.numbers, count - 1 in self.numbers

    def train(self, steps=range(STEPS)):
        losses = []
        for step in steps:
            x, y = batch(step, *self.rows)
            of_micro = []
            inputs = (x,) if self.is_first else ()
            self.schedule.step(
                *inputs, **({"target": y, "losses": of_micro} if self.is_last else {})
            )
            self.optimizer.step()
            self.optimizer.zero_grad()
            modules = list(self.modules)
            mf.step(nn.ModuleList(modules) if len(modules) > 1 else modules[0])
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
    assert_same_states(pipeline, alone, what)


def assert_same_states(pipeline, alone, what):
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


def check_copies(rank):
    """Two copies of a pipeline, each with half of the rows.

    Without changes of the weights their amaxes and counts are one process's to the bit.
    """
    own = [dist.new_group([i]) for i in range(4)][rank]
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    for sizes, has_experts in (((2, 1), False), ((1, 1), True)):
        alone = built("fp8_delayed", sizes, has_experts)
        pipeline = Pipeline(
            Schedule1F1B, alone, ([0], [1]), lr=0.0, copies=2, group=pipes[rank // 2]
        )
        train_alone(alone, own, lr=0.0)
        pipeline.train()
        assert_same_states(pipeline, alone, f"{sizes}")


def test_copies_of_a_stage_reduce_among_themselves():
    run_world(4, check_copies)


# ---- checkpoints ---------------------------------------------------------------------------------


def check_resumes(rank):
    for recipe in ("nvfp4", "mxfp4", "fp8_delayed"):
        first = Pipeline(Schedule1F1B, built(recipe, (1, 2), False), ([0], [1]))
        first.train(range(2))
        weights = copy.deepcopy(first.modules.state_dict())
        (stage,) = first.modules
        state = mf.training_state(stage)
        first.train(range(2, 4))
        resumed = Pipeline(Schedule1F1B, built(recipe, (1, 2), False), ([0], [1]))
        resumed.modules.load_state_dict(weights)
        (again,) = resumed.modules
        for name in state:  # an incomplete state is refused
            less = {key: t for key, t in state.items() if key != name}
            with pytest.raises(ValueError, match=f"missing .*{name}"):
                mf.load_training_state(again, less)
        mf.load_training_state(again, state)
        resumed.train(range(2, 4))
        for name, value in states_of(again).items():
            require_same(value, states_of(stage)[name], f"{recipe}: {name}")


def test_a_pipeline_resumes_from_the_states_of_its_stages():
    run_world(2, check_resumes)


def test_a_part_of_a_model_has_its_random_state():
    model = built("nvfp4", (1, 1), False)
    other = built("nvfp4", (1, 1), False)
    model(torch.ones(2, D))
    assert mf.training_state(model[1])["rng"].tolist() == [0, 1]
    both = nn.ModuleList([model[1], other[1]])  # of two conversions
    assert list(mf.training_state(both)) == ["0.0.0.rng", "1.0.0.rng"]
    mf.load_training_state(other[0], mf.training_state(model[0]))
    assert mf.training_state(other)["rng"].tolist() == [0, 1]


# ---- lists that are no stages --------------------------------------------------------------------


def check_refused(rank):
    kept = []
    own = [dist.new_group([i]) for i in range(2)][rank]
    # Stages that were converted one by one have equal names.
    apart = built("fp8_delayed", (1,), False)[0]
    kept.append(PipelineStage(apart, rank, 2, torch.device("cpu")))
    with pytest.raises(ValueError, match=r"'0.0.0' is of stage \[0\] on rank 0 and of stage \[1\]"):
        mf.step(apart)
    mf.step(apart, own)
    # Stages that share layers.
    model = built("fp8_delayed", (1, 1, 1), False)
    with pytest.raises(ValueError, match=r"layer 0 is '0.0.0: fp8.* and '1.0.0: fp8"):
        mf.step(nn.ModuleList([model[rank], model[rank + 1]]))
    # Disjoint stages where the caller says that all ranks have the same layers.
    with pytest.raises(ValueError, match=r"layer 0 is '0.0.0: fp8"):
        mf.step(model[rank], dist.group.WORLD)
    mf.step(model[rank])  # of one conversion


def test_lists_that_are_no_stages_are_refused():
    run_world(2, check_refused)
