"""The benchmark of a whole Llama3-8B: which batches it tries, its step, and its records."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.llama import Llama, ModelConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def llama8b(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_llama8b")


def test_a_step_counts_every_product(llama8b):
    model = Llama(ModelConfig(32, 2, 2, 1, 64, 300), 16)
    weights = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64) + 32 * 300
    attention = 2 * 2 * 16 * 32  # a token: 2 layers, 2 products, S D operations, causal half
    assert llama8b.step_flops(model, tokens=32, seq=16) == 3 * 32 * (2 * weights + attention)


def samples_of(llama8b, fits, expected, base=None):
    """Returns the batches that were tried, in order, and the samples of those that fit.

    fits: the largest batch that fits, without and with checkpointing.
    """
    tried = []

    def take(batch, is_checkpointed):
        tried.append((batch, is_checkpointed))
        if batch > fits[is_checkpointed]:
            return None
        return llama8b.Sample(batch, is_checkpointed, 1.0, 0.0, 0.0, 0.0, 0.0)

    samples, refused = llama8b.take_samples(take, lambda _: expected, base)
    found = [(sample.batch, sample.is_checkpointed) for sample in samples]
    assert found == [at for at in tried if at not in refused]
    return tried, found


def base_of(llama8b, batch, is_checkpointed):
    return llama8b.Sample(batch, is_checkpointed, 1.0, 0.0, 0.0, 0.0, 0.0)


def test_the_largest_batch_is_tried_from_the_expected_one_down(llama8b):
    tried, found = samples_of(llama8b, (3, 9), expected=5)
    assert tried == [(1, False), (5, False), (4, False), (3, False)]
    assert found == [(1, False), (3, False)]


def test_blocks_are_checkpointed_where_no_batch_fits_without(llama8b):
    tried, _ = samples_of(llama8b, (0, 4), expected=4)
    assert tried == [(1, False), (1, True), (4, True)]


def test_a_recipe_is_also_measured_at_the_batch_of_bf16(llama8b):
    tried, _ = samples_of(llama8b, (5, 9), expected=5, base=base_of(llama8b, 3, False))
    assert tried == [(3, False), (5, False)]
    tried, _ = samples_of(llama8b, (2, 9), expected=4, base=base_of(llama8b, 3, False))
    assert tried == [(3, False), (2, False)]  # 3 did not fit: nothing above 2 is tried
    tried, found = samples_of(llama8b, (1, 9), expected=1, base=base_of(llama8b, 4, True))
    assert tried == found == [(1, False), (4, True)]
    samples = [vars(base_of(llama8b, *setting)) for setting in found]
    assert llama8b.largest({"samples": samples}).batch == 1  # without checkpointing


def test_the_expected_batch_comes_from_peak_and_kept_memory(llama8b):
    run = object.__new__(llama8b.Run)
    run.trial, run.limit = llama8b.Trial(most=6), 137 * llama8b.GIB
    sample = llama8b.Sample(1, False, 1.0, 0.0, peak_gib=75.0, kept_gib=25.0, loss=0.0)
    assert run.most_expected(sample) == 3  # 75 + 2 * 25 is 125, one more would be 150
    run.limit = 70 * llama8b.GIB
    assert run.most_expected(sample) == 1


@pytest.mark.slow
def test_a_step_has_the_gradients_of_the_whole_batch(llama8b, monkeypatch):
    """Head and loss go a sequence at a time; the model's own forward has the batch whole.

    Both round to bf16 a few times, 2^-9 each, at other places: 2^-5 of a gradient's norm.
    """
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    run = llama8b.Run("bf16", llama8b.TINY)
    monkeypatch.setattr(run.optimizer, "step", lambda: None)
    monkeypatch.setattr(run.optimizer, "zero_grad", lambda set_to_none: None)
    inputs, targets = torch.randint(512, (2, 2, 64)).unbind()
    named = dict(run.model.named_parameters())
    run.model(inputs, targets).backward()
    expected = {name: p.grad.float() for name, p in named.items()}
    for is_checkpointed in (False, True):
        run.model.zero_grad()
        loss = run.train_step(inputs, targets, is_checkpointed)
        assert abs(loss.item() - run.model(inputs, targets).item()) < 1e-2 * loss.item()
        for name, p in named.items():
            error = (p.grad.float() - expected[name]).norm() / expected[name].norm()
            assert error < 2**-5, f"{name}, {is_checkpointed=}: {error}"


@pytest.mark.slow
def test_a_tiny_command_leaves_records_and_prints_their_table(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    command = [sys.executable, str(BENCHMARKS / "gpu_llama8b.py"), "--tiny"]
    command += ["--recipes", "bf16,mxfp4", "--out", str(tmp_path)]
    first = subprocess.run(command, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout + first.stderr
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"bf16_cpu.jsonl.xz", "mxfp4_cpu.jsonl.xz"}
    tables = first.stdout[first.stdout.index("\nNVIDIA H200") :]  # the records come first
    rows = [line for line in tables.partition("\nCPU")[2].splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == ["bf16", "mxfp4"]
    again = subprocess.run([*command, "--limit", "0"], capture_output=True, text=True)
    assert again.stdout == tables
