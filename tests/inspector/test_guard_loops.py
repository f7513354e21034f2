"""A guard among other hooks, optimizers and loops than a plain one."""

import copy
import math
import weakref

import minifloat as mf
import pytest
import torch
from minifloat.inspector import StepGuard
from minifloat.nn.state.guarded_steps import guard_of
from torch import nn

from tests.support.guard_warnings import said_by
from tests.support.same_bits import require_all_same
from tests.support.sharded_models import batch, built


def raise_after(guarded):
    """Raises KeyError in the optimizer's next step, after the guard's hook."""

    def fail(*_):
        handle.remove()
        raise KeyError("of another hook")

    handle = guarded.register_step_pre_hook(fail)
    with pytest.raises(KeyError, match="of another hook"):
        said_by(guarded.step)


def test_a_flag_of_a_step_that_raised():
    """Other gradients have another flag, and the former is not taken for a GradScaler's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = copy.deepcopy(model.state_dict())
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    model[0](torch.ones(2, 4)).sum().backward()  # two of four gradients
    raise_after(optimizer)
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    guard.check()
    optimizer.step()
    require_all_same(model.state_dict(), before)


def test_gradients_after_a_step_that_raised():
    """Those of a step that was left out do not come back in the place of finite ones."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = model.weight.detach().clone()
    StepGuard(model, optimizer, on_nonfinite="skip")
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    raise_after(optimizer)
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    assert not said_by(optimizer.step)
    assert torch.equal(model.weight, before - 2)


def two_layers():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    return model, [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in model]


@pytest.mark.parametrize("checks", [False, True])
def test_clipping_between_looks_and_steps(checks):
    """It makes no other step, whether all are clipped at once, or each optimizer's alone."""
    model, optimizers = two_layers()
    guard = StepGuard(model, optimizers, on_nonfinite="skip")

    def step():
        (model(torch.ones(2, 4)).sum() * math.inf).backward()
        if checks:
            guard.check()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for layer, optimizer in zip(model, optimizers):
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()

    assert len(said_by(step)) == guard.steps == 1


def test_new_gradients_in_the_memory_of_old_ones():
    """A tensor is another, though it has the number of one that was freed."""
    for _ in range(20):
        model, (first, second) = two_layers()
        before = model[1].weight.detach().clone()
        StepGuard(model, [first, second], on_nonfinite="skip")
        model(torch.ones(2, 4)).sum().backward()
        first.step()
        second.zero_grad()
        (model(torch.ones(2, 4)).sum() * math.inf).backward()
        said_by(second.step)
        assert torch.equal(model[1].weight, before)


def test_rows_of_a_sparse_gradient_whose_sum_overflows():
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    before = model.weight.detach().clone()
    StepGuard(model, optimizer, on_nonfinite="skip")
    (model(torch.tensor([1, 1])) * 3e38).sum().backward()
    assert not model.weight.grad.is_coalesced()
    said_by(optimizer.step)
    assert torch.equal(model.weight, before)


def test_momentum_keeps_negative_zeros():
    """A first step of SGD keeps the gradient itself, and a weight of -0 minus -0 is +0."""
    steps = []
    for is_guarded in (False, True):
        model = nn.ParameterList([nn.Parameter(torch.full((8,), -0.0))])
        optimizer = torch.optim.SGD(model, lr=0.1, momentum=0.9, fused=True)
        if is_guarded:
            StepGuard(model, optimizer, on_nonfinite="raise")
        model[0].grad = torch.full((8,), -0.0)
        optimizer.step()
        momentum = optimizer.state[model[0]]["momentum_buffer"]
        steps.append((model[0].signbit().tolist(), momentum.signbit().tolist()))
    assert steps[0] == steps[1] == ([False] * 8, [True] * 8)


def test_a_check_of_a_step_that_was_given_up():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(model.state_dict())
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    model(torch.ones(2, 4)).sum().backward()
    guard.check()
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    said_by(optimizer.step)
    require_all_same(model.state_dict(), before)


def test_an_optimizer_that_is_listed_twice():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    guard = StepGuard(model, [optimizer, optimizer], on_nonfinite="skip")
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    assert len(said_by(optimizer.step)) == guard.steps == 1


def test_a_guard_that_is_removed_twice():
    """It leaves the one that came after it alone."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    first = StepGuard(model, optimizer, on_nonfinite="skip")
    first.remove()
    second = StepGuard(model, optimizer, on_nonfinite="skip")
    first.remove()
    assert guard_of(model) is second


def test_mf_step_of_a_module_around_the_guarded_one():
    model = built("fp8_delayed")
    outer = nn.ModuleDict({"first": nn.Linear(4, 4), "model": model})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(mf.training_state(outer))
    StepGuard(model, optimizer, on_nonfinite="skip")
    x = batch(0)
    x[0, 0] = math.inf
    model(x).sum().backward()
    said_by(optimizer.step)
    mf.step(outer)
    found = mf.training_state(outer)
    histories = [name for name in found if name.endswith("amax_history")]
    require_all_same({n: found[n] for n in histories}, {n: before[n] for n in histories})
    with pytest.raises(ValueError, match="expected a model without a guard"):
        StepGuard(outer, optimizer, on_nonfinite="skip")


@pytest.mark.parametrize("fused", [False, True])
def test_batches_are_kept_until_the_report(fused):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    guard = StepGuard(model, optimizer, on_nonfinite="skip", loss=lambda m, x: m(x).sum())
    x = torch.ones(2, 4)
    kept = weakref.ref(x)
    model(x).sum().backward()
    guard.check(x)
    optimizer.step()
    del x
    assert (kept() is not None) == fused
    guard.remove()
    assert kept() is None
