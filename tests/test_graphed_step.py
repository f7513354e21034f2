"""mf.GraphedStep on a CPU, where each call runs the step."""

from collections import UserDict
from itertools import count

import minifloat as mf
import pytest
import torch
from torch import nn

from tests.support.same_bits import require_same
from tests.support.sharded_models import batch, built, sharded
from tests.support.worlds import run_world

CALLS = 4


class Job:
    def __init__(self, recipe):
        self.model = built(recipe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, capturable=True)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)

    def step(self, *micro_batches):
        for x in micro_batches:
            loss = self.model(x).square().mean()
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mf.step(self.model)
        return loss

    def losses(self, step):
        losses = []
        for i in range(CALLS):
            losses.append(step(batch(2 * i), batch(2 * i + 1)))
            self.scheduler.step()
        return torch.stack(losses)


def graphed(job, **options):
    return mf.GraphedStep(job.step, job.model, job.optimizer, **options)


def constant(result):
    """Returns a GraphedStep of a step that returns this."""
    model = nn.Linear(4, 4)
    return mf.GraphedStep(lambda *_: result, model, torch.optim.SGD(model.parameters()))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "nvfp4"])
def test_each_call_is_the_next_step(recipe):
    plain, job = Job(recipe), Job(recipe)
    want, got = plain.losses(plain.step), job.losses(graphed(job, warm_ups=1))
    require_same(got, want.detach(), "losses")
    assert not got.requires_grad
    for name, state in mf.training_state(plain.model).items():
        require_same(mf.training_state(job.model)[name], state, name)


def test_results_are_copies_in_the_structure_that_the_step_returns():
    result = {"loss": torch.ones(()), "rest": [torch.zeros(2), None]}
    got = constant(result)()
    assert got["rest"][1] is None
    require_same(got["rest"][0], result["rest"][0], "rest")
    got["loss"].zero_()
    assert result["loss"] == 1


def test_a_step_may_return_nothing_and_take_nested_arguments():
    """A transposed tensor and a contiguous one are alike; modules are equal to themselves."""
    model = nn.Linear(4, 4)
    seen = []

    def step(batch, *, rest):
        seen.append(batch["x"][0] * rest[0])

    run = mf.GraphedStep(step, model, torch.optim.SGD(model.parameters()))
    for x in (torch.arange(8.0).view(2, 4).t(), torch.arange(8.0).view(4, 2)):
        assert run({"x": [x, None]}, rest=(2, model)) is None
        require_same(seen[-1], 2 * x, "x")


def test_a_call_that_raises_changes_nothing_of_the_next():
    plain, job = Job("fp8_delayed"), Job("fp8_delayed")
    calls = count()

    def step(*micro_batches):
        if next(calls) == 0:
            raise KeyError("a batch")
        return job.step(*micro_batches)

    run = mf.GraphedStep(step, job.model, job.optimizer)
    with pytest.raises(KeyError, match="a batch"):
        run(batch(0), batch(1))
    require_same(job.losses(run), plain.losses(plain.step).detach(), "losses")


@pytest.mark.parametrize("result", [1.0, {"loss": torch.ones(()), "tokens": 3}])
def test_numbers_are_refused_as_results(result):
    with pytest.raises(TypeError, match="expected a step that returns tensors on cpu, got"):
        constant(result)()


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((torch.ones(3, 2), 1), {}, r"expected .*float32 \(2, 2\).*got .*float32 \(3, 2\)"),
        ((torch.ones(2, 2).double(), 1), {}, r"expected .*float32.*got .*float64"),
        ((torch.ones(2, 2), 2), {}, "expected 1 as value 1 .*got 2; pass what changes as a tensor"),
        ((torch.ones(2, 2), True), {}, "expected 1 .*got True"),
        ((torch.ones(2, 2), torch.ones(())), {}, "expected 1 .*got a tensor"),
        ((torch.ones(2, 2),), {"scale": 1}, "expected arguments of the first call's structure"),
    ],
)
def test_other_arguments_than_the_first_are_refused(args, kwargs, says):
    calls = count()
    model = nn.Linear(2, 2)

    def step(x, scale):
        next(calls)
        return x * scale

    run = mf.GraphedStep(step, model, torch.optim.SGD(model.parameters()))
    run(torch.ones(2, 2), 1)
    with pytest.raises(ValueError, match=says):
        run(*args, **kwargs)
    run(torch.zeros(2, 2), 1)
    assert next(calls) == 2, "the refused call ran the step"


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        (torch.ones(2, requires_grad=True), r"float32 \(2,\) with requires_grad; pass x\.detach"),
        (UserDict(x=torch.ones(2)), r"got \{'x': tensor.*the tensors of another container"),
        (torch.ones(2).numpy(), "got array"),
    ],
)
def test_arguments_that_a_graph_cannot_copy_are_refused(argument, says):
    with pytest.raises(TypeError, match=f"without requires_grad and hashable values.*{says}"):
        constant(None)([argument])


def test_a_scheduler_within_the_step_is_refused():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step():
        optimizer.step()
        scheduler.step()

    with pytest.raises(ValueError, match=r"call scheduler\.step\(\) between calls"):
        mf.GraphedStep(step, model, optimizer)()


def test_gradients_that_stay_are_refused():
    """The next replay would add to memory that the program may have freed."""
    job = Job("nvfp4")

    def step(x):
        job.model(x).square().mean().backward()
        job.optimizer.step()

    run = mf.GraphedStep(step, job.model, job.optimizer)
    run(batch(0))
    with pytest.raises(ValueError, match=r"call optimizer\.zero_grad\(\) at its end"):
        run(batch(1))


def test_arguments_of_the_constructor_are_checked():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    for arguments, error, says in (
        ((None, model, optimizer), TypeError, "step: expected a function, got None"),
        ((print, print, optimizer), TypeError, r"expected a torch\.nn\.Module"),
        ((print, model, model), TypeError, r"expected a torch\.optim\.Optimizer, or a list"),
        ((print, model, [optimizer, None]), TypeError, "got NoneType"),
        (
            (print, nn.Linear(4, 4, device="meta"), optimizer),
            ValueError,
            r"in memory, got \['meta'\]",
        ),
        (
            (print, nn.ModuleList([model, nn.Linear(4, 4, device="meta")]), optimizer),
            ValueError,
            r"all parameters on one device, .*got \['cpu', 'meta'\]",
        ),
    ):
        with pytest.raises(error, match=says):
            mf.GraphedStep(*arguments)
    with pytest.raises(ValueError, match="warm_ups: expected at least 1, got 0"):
        mf.GraphedStep(print, model, optimizer, warm_ups=0)


def check_ranks(rank):
    job = Job("nvfp4")
    sharded(job.model)
    with pytest.raises(ValueError, match=r"warm_ups: expected at least 1, got 0 \(ranks \[1\]\)"):
        graphed(job, warm_ups=1 - rank)
    graphed(job)  # on all ranks


def test_an_error_of_one_rank_is_one_of_all():
    run_world(2, check_ranks)
