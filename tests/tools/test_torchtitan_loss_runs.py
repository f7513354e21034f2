"""The trial of 3,000 steps in torchtitan's trainer: its data, its runs on a CPU, its records."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import gpu_torchtitan_loss as trial
trial.TINY["eval_every"] = int(sys.argv.pop(1))
sys.exit(trial.main())
"""


@pytest.fixture
def titan(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_torchtitan_loss")


def output_of(*arguments, **environment):
    """Runs a command whose models are not compiled, and returns what it prints."""
    command = [sys.executable, *map(str, arguments)]
    everything = {**os.environ, "TORCHDYNAMO_DISABLE": "1", **environment}
    found = subprocess.run(command, capture_output=True, text=True, env=everything)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def test_documents_are_the_windows_of_the_parity_trial(titan):
    trial = replace(titan.Trial(), seq=16, batch=3, device="cpu")
    ids = numpy.random.default_rng(0).integers(0, 16384, 16 * 10 + 5)
    cut = titan.Windows(ids, trial)
    order = next(cut.orders(seed=7))
    documents = titan.windows_of(ids, trial, order).documents
    inputs, targets = cut.gather(order)
    assert torch.equal(torch.tensor(numpy.stack(documents)[:, :-1]), inputs)
    assert torch.equal(torch.tensor(numpy.stack(documents)[:, 1:]), targets)


def test_models_have_trials_of_their_own(titan):
    dense, moe = (titan.MODELS[model][0] for model in ("dense", "moe"))
    assert dense == importlib.import_module("gpu_parity").Trial()
    assert moe.model != dense.model


@pytest.mark.slow
def test_a_tiny_command_leaves_records_and_prints_their_tables(titan, tmp_path):
    command = [BENCHMARKS / "gpu_torchtitan_loss.py", "--tiny", "--seeds", "1", "--out", tmp_path]
    first = output_of(*command, "--recipes", "bf16,nvfp4 keep=nvfp4_paper")
    names = ["bf16", "nvfp4 keep=nvfp4_paper"]
    for model in titan.MODELS:
        records = titan.records_in([tmp_path / model])
        assert [record["name"] for record in records] == names
        for record in records:
            assert len(record["loss"]) == len(record["norm"]) == 4
            assert record["evaluations"].keys() == {"2", "4"}
            assert record["val"] == record["evaluations"]["4"]
        assert records[0]["loss"] != records[1]["loss"]
        assert f"\n{model}: " in first
    again = output_of(*command, "--recipes", "bf16", "--limit", "0")
    assert again == first[first.index("\ndense: ") :]


@pytest.mark.slow
def test_validation_does_not_change_training(titan, tmp_path):
    """Experts are balanced by counts of tokens, which torchtitan's model adds up in validation."""
    losses = []
    for every in (1, 4):
        out = tmp_path / str(every)
        run = ["--tiny", "--models", "moe", "--entry", "bf16", "--seed", "1", "--out", out]
        output_of("-c", RUN, BENCHMARKS, every, *run, **titan.ALONE)
        (record,) = titan.records_in([out / "moe"])
        assert len(record["evaluations"]) == 4 // every
        losses.append(record["loss"])
    assert losses[0] == losses[1]
