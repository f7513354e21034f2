"""A guard among other hooks, optimizers and loops than a plain one."""

import copy
import math

import pytest
import torch
from minifloat.inspector import StepGuard
from torch import nn

from tests.support.guard_warnings import said_by
from tests.support.same_bits import require_all_same


class Fault(Exception):
    """What a hook of others raises."""


def raise_after(guarded):
    """Raises Fault in the optimizer's next step, after the guard's hook."""

    def fail(*_):
        handle.remove()
        raise Fault

    handle = guarded.register_step_pre_hook(fail)
    with pytest.raises(Fault):
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
