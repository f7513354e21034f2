"""`minifloat train` on several processes: one process's losses, resumed at any moment."""

import signal
import time
from functools import partial

import numpy as np
import pytest
import torch
from minifloat.train.checks import TrainError
from minifloat.train.data import Batches
from minifloat.train.job.checkpoint import read_records
from minifloat.train.job.processes import World, joined

from tests.support import train_command
from tests.support.tiny_job import without_timings
from tests.support.tiny_text import write_text

start = partial(train_command.start, model="64,2,2,1,96", seq=32, batch=4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    write_text(folder)
    return folder


def train(*args):
    """Runs the command; returns (exit code, output, errors)."""
    process = start(*args)
    return process.wait(120), *process.communicate()


def test_losses_are_those_of_one_process(folder, tmp_path):
    """Compares losses.

    Each rank rounds its share of a weight's gradient to bf16, one process the whole: a relative
    2^-8 an element, so that losses agree to that. The first one comes before any gradient, but a
    product of half the rows may sum in another order, and then its bf16 results differ by one
    rounding, 2^-9 of themselves. At first the loss is log(300), to which logits of that error
    add less than 2^-9 of it."""
    for processes in (1, 2):
        out = tmp_path / str(processes)
        code, said, errors = train(folder, out, processes, "--recipes", "bf16,mxfp8", "--steps=8")
        assert code == 0, errors
        assert said.count("| bf16 ") == 1, said
    alone, sharded = (read_records(tmp_path / n / "metrics.jsonl") for n in ("1", "2"))
    assert [(r["run"], r["kind"], r["step"]) for r in alone] == [
        (r["run"], r["kind"], r["step"]) for r in sharded
    ]
    for a, b in zip(alone, sharded):
        name = "val_loss" if a["kind"] == "eval" else "loss"
        tolerance = 2.0**-9 if a["step"] == 1 else 2.0**-8
        assert abs(a[name] - b[name]) <= tolerance * a[name], (a, b)


@pytest.mark.slow
def test_a_mixture_trains_as_on_one_process(folder, tmp_path):
    """Compares a model with experts, cut unevenly over two ranks, with that of one process.

    Tolerances are those of the test above, so no recipe rounds stochastically: ranks draw bits of
    their own. The tokens of each expert are those of both ranks. Some go to other experts than on
    one process, where two scores are close, so sums are compared."""
    model = ("--model", "moe:64,2,2,1,32,5,2,1", "--recipes", "bf16,mxfp8", "--steps=6")
    for processes in (1, 2):
        code, said, errors = train(folder, tmp_path / str(processes), processes, *model)
        assert code == 0, errors
        assert said.count("idle beside bf16") == 1, said
    alone, sharded = (read_records(tmp_path / n / "metrics.jsonl") for n in ("1", "2"))
    assert len(alone) == len(sharded) == 2 * (6 + 6 + 2)
    for a, b in zip(alone, sharded):
        if a["kind"] == "experts":
            sums = [sum(record["tokens"]["layers.1.moe"]) for record in (a, b)]
            assert sums == [2 * 4 * 32] * 2
            continue
        name = "val_loss" if a["kind"] == "eval" else "loss"
        tolerance = 2.0**-9 if a["step"] == 1 else 2.0**-8
        assert abs(a[name] - b[name]) <= tolerance * a[name], (a, b)


@pytest.mark.slow
def test_stops_together_and_goes_on(folder, tmp_path):
    """Stops a job at one step on all ranks, and resumes it."""
    recipe = ("--recipes", "nvfp4", "--steps", "32")
    code, _, errors = train(folder, tmp_path / "whole", 2, *recipe)
    assert code == 0, errors
    process, metrics = start(folder, tmp_path / "parts", 2, *recipe), "parts/metrics.jsonl"
    while len(read_records(tmp_path / metrics)) < 3 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.wait(60)
    assert 3 <= len(read_records(tmp_path / metrics)) < 32
    code, _, errors = train(folder, tmp_path / "parts", 2, *recipe, "--resume")
    assert code == 0, errors
    whole, parts = (
        without_timings(read_records(tmp_path / name / "metrics.jsonl"))
        for name in ("whole", "parts")
    )
    assert whole == parts


def test_ranks_share_the_batch_of_one_process():
    """Compares batches of any number of ranks: a step's batch is a function of (seed, step)."""
    ids = np.arange(1000)
    batch = Batches(ids, ids, seq=8, batch=12).training(seed=3, step=5)
    for size in (1, 2, 3, 4, 6, 12):
        shares = [World(rank, size).share(batch) for rank in range(size)]
        for whole, parts in zip(batch, zip(*shares, strict=True), strict=True):
            assert all(len(part) == 12 // size for part in parts)
            assert torch.equal(torch.cat(parts), whole)


def test_a_batch_that_does_not_divide_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with (
        pytest.raises(TrainError, match="--batch: expected a multiple of the 3 processes, got 4"),
        joined("cpu", batch=4),
    ):
        pass
