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


def two_layers():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    return model, [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in model]


def test_clipping_between_a_check_and_steps():
    """All are clipped at once, and each optimizer's alone."""
    model, optimizers = two_layers()
    guard = StepGuard(model, optimizers, on_nonfinite="skip")
    before = copy.deepcopy(model.state_dict())

    def step():
        (model(torch.ones(2, 4)).sum() * math.inf).backward()
        guard.check()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for layer, optimizer in zip(model, optimizers):
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()

    assert len(said_by(step)) == guard.steps == 1
    require_all_same(model.state_dict(), before)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_raise(fused):
    """The optimizer fails, and gradients of another number have other flags."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    before = copy.deepcopy(model.state_dict())
    guard = StepGuard(model, optimizer, on_nonfinite="skip")

    def fail(*_):
        raise KeyError("of a hook")

    handle = optimizer.register_step_pre_hook(fail)
    model[0](torch.ones(2, 4)).sum().backward()  # two of four gradients
    guard.check()
    with pytest.raises(KeyError):
        optimizer.step()
    handle.remove()
    for factor in (math.inf, 1):
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).sum() * factor).backward()
        said_by(guard.check)
        optimizer.step()
        assert torch.equal(model[0].weight, before["0.weight"]) == (factor == math.inf)


def test_rows_of_a_sparse_gradient_whose_sum_overflows():
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    before = model.weight.detach().clone()
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    (model(torch.tensor([1, 1])) * 3e38).sum().backward()
    assert not model.weight.grad.is_coalesced()
    said_by(guard.check)
    optimizer.step()
    assert torch.equal(model.weight, before)


def test_momentum_keeps_negative_zeros():
    """A first step of SGD keeps the gradient itself, and a weight of -0 minus -0 is +0."""
    steps = []
    for is_guarded in (False, True):
        model = nn.ParameterList([nn.Parameter(torch.full((8,), -0.0))])
        optimizer = torch.optim.SGD(model, lr=0.1, momentum=0.9, fused=True)
        model[0].grad = torch.full((8,), -0.0)
        if is_guarded:
            StepGuard(model, optimizer, on_nonfinite="raise").check()
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
    said_by(guard.check)
    optimizer.step()
    require_all_same(model.state_dict(), before)


def test_an_optimizer_that_is_listed_twice():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    guard = StepGuard(model, [optimizer, optimizer], on_nonfinite="skip")
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    assert len(said_by(guard.check)) == guard.steps == 1


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
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    x = batch(0)
    x[0, 0] = math.inf
    model(x).sum().backward()
    said_by(guard.check)
    optimizer.step()
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
