"""Amax histories and random counts of two ranks under DistributedDataParallel.

It replaces buffers by rank 0's before each forward.
"""

import minifloat as mf
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.support.worlds import run_world

WIDTH, ROWS, STEPS = 32, 16, 3


def batch(step, part, rank=0):
    """Returns an input whose amax grows with the rank."""
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(ROWS, WIDTH, generator=generator) * (1 + 2 * rank)


def build(recipe, parts=2):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(parts)]
    model = nn.Sequential(*stages)
    mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0, verbose=False)
    return model


def kept(model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return state | mf.training_state(model)


def require_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# ---- DistributedDataParallel ---------------------------------------------------------------------


def train_two_forwards(model, run, rank, together):
    """Trains with two forwards a step, then two backward passes, or one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(STEPS):
        losses = []
        for part in range(2):
            losses.append(run(batch(step, part, rank)).square().mean())
            if not together:
                losses[-1].backward()
        if together:
            sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
    return kept(model)


def check_broadcast(rank, recipe, together):
    found = []
    for broadcast in (False, True):
        model = build(recipe)
        ddp = DistributedDataParallel(model, broadcast_buffers=broadcast)
        found.append(train_two_forwards(model, ddp, rank, together))
    require_same(*found)
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), build(recipe), nn.BatchNorm1d(WIDTH))
    ddp = DistributedDataParallel(part)  # what holds the model has buffers of its own
    state = {n: t + 0.5 * rank for n, t in mf.training_state(part).items() if "amax" in n}
    mf.load_training_state(part, mf.training_state(part) | state)
    ddp(batch(0, 0, rank))
    histories = {n: t for n, t in mf.training_state(part).items() if "amax" in n}
    for name, history in histories.items():
        assert torch.equal(history[:, 2:], state[name][:, 2:]), name


def check_ranks(rank):
    for together in (False, True):
        for recipe in ("fp8_delayed", "0.*: fp8_delayed; 1.*: nvfp4"):
            check_broadcast(rank, recipe, together)


def test_state_of_two_ranks():
    run_world(2, check_ranks)
