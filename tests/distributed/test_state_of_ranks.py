"""Amax histories and random counts of two ranks: under DistributedDataParallel, and in a pipeline.

DistributedDataParallel replaces buffers by rank 0's before each forward. A pipeline calls a stage
once more than a step has micro-batches, to find the shapes of what it sends.
"""

import minifloat as mf
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from tests.support.worlds import run_world

WIDTH, ROWS, STEPS, MICRO_BATCHES = 32, 16, 3, 4


def batch(step, part, rank=0):
    """Returns an input whose amax grows with the rank."""
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(ROWS, WIDTH, generator=generator) * (1 + 2 * rank)


def build(recipe, parts=2):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(parts)]
    model = nn.Sequential(*stages)
    mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0)
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


# ---- pipelines -----------------------------------------------------------------------------------


def train_alone(recipe):
    model = build(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        x = batch(step, 0)
        for part in x.chunk(MICRO_BATCHES):
            F.mse_loss(model(part), part.flip(1)).backward()
        for p in model.parameters():
            p.grad.div_(MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model, OWN[0])
    return model


OWN = []  # the group of this rank alone


def train_stage(model, rank):
    stage = PipelineStage(model[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(model[rank].parameters(), lr=0.05)
    for step in range(STEPS):
        x = batch(step, 0)
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.flip(1))
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model[rank], OWN[0])
    return model


def check_pipeline(rank, recipe):
    groups = [dist.new_group([i]) for i in range(2)]
    OWN[:] = [groups[rank]]
    alone, model = train_alone(recipe), train_stage(build(recipe), rank)
    states = [mf.training_state(m) for m in (alone, model)]
    own = [{n: t for n, t in s.items() if n.startswith(("rng", f"{rank}."))} for s in states]
    require_same(*own)
    for (name, a), (_, b) in zip(alone[rank].named_parameters(), model[rank].named_parameters()):
        assert torch.equal(a, b), name


def check_ranks(rank):
    for together in (False, True):
        for recipe in ("fp8_delayed", "0.*: fp8_delayed; 1.*: nvfp4"):
            check_broadcast(rank, recipe, together)
    for recipe in ("nvfp4", "fp8_delayed"):
        check_pipeline(rank, recipe)


def test_state_of_two_ranks():
    run_world(2, check_ranks)
