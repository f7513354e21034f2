"""`minifloat train` from the command line to its files: kills, resumes, stops, and refusals.

Every job here is tiny, see tiny_job.py, which says what "the same bytes" means.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from minifloat.train.durable_files import lock
from minifloat.train.job import checkpoint
from minifloat.train.job.checkpoint import read_records
from minifloat.train.job.run import Run
from minifloat.train.model import measure

from tests.support.killed_job import Killed
from tests.support.tiny_job import STEPS, digest, run, run_and_kill

pytestmark = pytest.mark.usefixtures("torch_as_it_was")


@pytest.fixture
def reference(tiny, tmp_path):
    """Computes the digest of an uninterrupted bf16 job."""
    assert run(tiny, tmp_path / "reference", "--recipes", "bf16") == 0
    return digest(tmp_path / "reference")


def test_a_job_writes_all_it_promises(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(tiny, out, "--recipes", "bf16,bf16@2") == 0
    shown = capsys.readouterr()
    assert "| bf16 (seed 2) |" in shown.out
    assert "of speed of light" in shown.err
    assert (out / "report.md").read_text().count("| bf16") == 2
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((out / "tensorboard" / "bf16").glob("events.out.tfevents.*"))
    rows = json.loads((out / "report.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["finished", "finished"]
    assert rows[0]["gap_percent"] == 0
    assert rows[1]["gap_percent"] != 0
    assert rows[0]["saved_bytes_per_token"] > rows[0]["saved_bytes_per_token_linears"] > 0
    records = [r for r in read_records(out / "metrics.jsonl") if r["run"] == "bf16"]
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, STEPS + 1))
    assert [r["step"] for r in records if r["kind"] == "eval"] == [6, 12, 18, 24]
    losses = [r["val_loss"] for r in records if r["kind"] == "eval"]
    assert losses[-1] < losses[0]


def test_two_jobs_give_the_same_bytes(tiny, tmp_path, reference):
    assert run(tiny, tmp_path / "again", "--recipes", "bf16") == 0
    assert digest(tmp_path / "again") == reference


def test_an_earlier_jobs_results_are_moved_aside(tiny, tmp_path, reference):
    assert run(tiny, tmp_path / "reference", "--recipes", "bf16") == 0
    assert digest(tmp_path / "reference.1") == digest(tmp_path / "reference") == reference


def kill_at(tiny, out, steps_done, delay):
    """Starts or resumes the job in another process; kill -9 some time after so many records."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "minifloat.cli", *tiny, "--recipes", "bf16"]
    command += ["--out", str(out), "--resume"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE)
    try:
        while process.poll() is None and len(read_records(out / "metrics.jsonl")) < steps_done:
            time.sleep(0.002)
        time.sleep(delay)
    finally:
        process.kill()
        errors = process.communicate()[1].decode()
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode


def kill_and_resume(tiny, out, kills, seed):
    draw = random.Random(seed)
    for number in range(kills):
        at = STEPS * (number + draw.random()) / kills
        kill_at(tiny, out, at, 0.03 * draw.random())
    assert run(tiny, out, "--recipes", "bf16", "--resume") == 0


def test_killed_and_resumed_ends_with_the_same_bytes(tiny, tmp_path, reference):
    kill_and_resume(tiny, tmp_path / "out", kills=2, seed=random.randrange(10**6))
    assert digest(tmp_path / "out") == reference


@pytest.mark.slow
def test_killed_many_times_ends_with_the_same_bytes(tiny, tmp_path, reference):
    for seed in range(2):
        kill_and_resume(tiny, tmp_path / f"out{seed}", kills=5, seed=seed)
        assert digest(tmp_path / f"out{seed}") == reference


MOMENTS = {
    "before anything is written": (checkpoint.torch, "save"),
    "before its description is written": (checkpoint, "write_json"),
    "before its checksums are written": (checkpoint, "write_checksums"),
    "before it has its name": (Path, "rename"),
    "before its name is on disk": (checkpoint, "sync_folder"),
    "before old ones are removed": (checkpoint, "prune"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_while_a_checkpoint_is_written(tiny, tmp_path, reference, monkeypatch, moment):
    save = checkpoint.save

    owner, name = MOMENTS[moment]
    call = getattr(owner, name)

    def die(*arguments, **named):
        if owner is Path and arguments[0].name != ".writing":
            return call(*arguments, **named)
        raise Killed

    def save_and_die(folder, step, state, meta):
        if step < 12:
            return save(folder, step, state, meta)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, die)
            return save(folder, step, state, meta)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save_and_die)
        with pytest.raises(Killed):
            run(tiny, tmp_path / "out", "--recipes", "bf16")
    last, *_ = checkpoint.checkpoints_in(tmp_path / "out" / "runs" / "bf16" / "checkpoints")
    assert checkpoint.step_of(last) == (12 if "on disk" in moment or "old ones" in moment else 8)
    assert run(tiny, tmp_path / "out", "--resume") == 0
    assert digest(tmp_path / "out") == reference


def test_a_full_disk_stops_cleanly_and_leaves_the_previous_checkpoint(
    tiny, tmp_path, reference, monkeypatch, capsys
):
    save = checkpoint.save

    def save_to_a_full_disk(folder, step, state, meta):
        if step < 12:
            return save(folder, step, state, meta)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
        try:
            return save(folder, step, state, meta)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save_to_a_full_disk)
        assert run(tiny, tmp_path / "out", "--recipes", "bf16") == 1
    errors = capsys.readouterr().err
    assert "cannot write the checkpoint of step 12" in errors
    assert "File too large" in errors
    assert "step_00000008 is intact" in errors
    folder = tmp_path / "out" / "runs" / "bf16" / "checkpoints"
    assert not (folder / ".writing").exists()
    assert not (folder / "step_00000012").exists()
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert rows[0]["status"] == "unfinished"
    assert run(tiny, tmp_path / "out", "--resume") == 0
    assert digest(tmp_path / "out") == reference


def test_ctrl_c_ends_with_a_report_and_a_checkpoint(tiny, tmp_path, reference, monkeypatch):
    train_step = Run.train_step

    def interrupted(self):
        if self.step == 9:
            signal.raise_signal(signal.SIGINT)
        return train_step(self)

    out = tmp_path / "out"
    handler = signal.getsignal(signal.SIGINT)  # a shell in the background has it ignored
    with monkeypatch.context() as patch:
        patch.setattr(Run, "train_step", interrupted)
        assert run(tiny, out, "--recipes", "bf16,bf16@2") == 130
    assert signal.getsignal(signal.SIGINT) is handler
    rows = json.loads((out / "report.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["stopped at step 10", "not started"]
    assert rows[0]["validation_step"] == 6
    assert (out / "loss.png").exists()
    last, *_ = checkpoint.checkpoints_in(out / "runs" / "bf16" / "checkpoints")
    assert checkpoint.read_meta(last)["step"] == 10
    assert run(tiny, out, "--resume") == 0
    assert digest(out) == reference


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_a_quantized_run_resumes_with_the_same_bytes(tiny, tmp_path, recipe):
    """Resumes a quantized run: its random counter and amax histories are in the checkpoint."""
    assert run(tiny, tmp_path / "whole", "--recipes", recipe) == 0
    run_and_kill(tiny, tmp_path / "out", 8, "--recipes", recipe)
    assert run(tiny, tmp_path / "out", "--resume") == 0
    assert digest(tmp_path / "out", recipe) == digest(tmp_path / "whole", recipe)


def test_a_recipe_saves_fewer_bytes_from_the_same_start(tiny, tmp_path):
    recipes = "bf16,mxfp8,nvfp4"
    assert run(tiny, tmp_path / "out", "--recipes", recipes) == 0
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert [row["converted"] for row in rows] == [0, 14, 14]
    linears = [row["saved_bytes_per_token_linears"] for row in rows]
    assert linears[0] > linears[2]
    first = [r["loss"] for r in read_records(tmp_path / "out" / "metrics.jsonl") if r["step"] == 1]
    assert first == pytest.approx([first[0]] * 3, rel=0.01)  # the same weights and batch
    assert len(set(first)) == 3


def test_resume_takes_a_new_recipe_along(tiny, tmp_path, reference):
    assert run(tiny, tmp_path / "reference", "--recipes", "bf16@2", "--resume") == 0
    assert digest(tmp_path / "reference") == reference
    rows = json.loads((tmp_path / "reference" / "report.json").read_text())["rows"]
    assert [row["run"] for row in rows] == ["bf16", "bf16 (seed 2)"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "64,2,2,1,64"], "model.dim: 32 there, 64 asked for"),
        (["--lr", "0.5"], "lr: 0.002 there, 0.5 asked for"),
        (["--recipe", "bf16=*: mxfp8"], "bf16.recipe: 'bf16' there, '*: mxfp8' asked for"),
    ],
)
def test_resuming_another_job_is_refused(tiny, tmp_path, reference, capsys, change, message):
    before = digest(tmp_path / "reference")
    assert run(tiny, tmp_path / "reference", "--resume", *change) == 1
    assert message in capsys.readouterr().err
    assert digest(tmp_path / "reference") == before


def test_resuming_with_other_text_is_refused(tiny, text_folder, tmp_path, reference, capsys):
    other = tmp_path / "other"
    other.mkdir()
    for file in text_folder.glob("*.txt"):
        (other / file.name).write_text(file.read_text().replace("alpha", "omega"))
    assert run(tiny, tmp_path / "reference", "--resume", "--data", str(other)) == 1
    assert "the text has changed" in capsys.readouterr().err


def test_a_checkpoint_put_there_from_another_job_is_refused(tiny, tmp_path, capsys):
    for name, lr in (("a", "0.001"), ("b", "0.002")):
        assert run(tiny, tmp_path / name, "--recipes", "bf16", "--lr", lr) == 0
    run_a, run_b = (tmp_path / name / "runs" / "bf16" for name in "ab")
    (run_a / "result.json").unlink()
    (run_a / "checkpoints").rename(tmp_path / "moved")
    (run_b / "checkpoints").rename(run_a / "checkpoints")
    assert run(tiny, tmp_path / "a", "--lr", "0.001", "--resume") == 1
    errors = capsys.readouterr().err
    assert "is a checkpoint of another job" in errors
    assert "lr: 0.002 there, 0.001 asked for" in errors


def test_a_job_with_a_lost_field_is_named(tiny, tmp_path, reference, capsys):
    out = tmp_path / "reference"
    job = json.loads((out / "job.json").read_text())
    assert job["config"].pop("processes") == 1
    (out / "job.json").write_text(json.dumps(job))
    assert run(tiny, out, "--resume") == 1
    assert "config: expected the field 'processes'" in capsys.readouterr().err


def test_two_jobs_in_one_folder_are_refused(tiny, tmp_path, capsys):
    with lock(tmp_path / "out"):
        assert run(tiny, tmp_path / "out", "--recipes", "bf16") == 1
    assert "in use by another job" in capsys.readouterr().err


def test_a_run_that_diverges_says_so_and_the_next_goes_on(tiny, tmp_path, monkeypatch):
    loss = measure.loss_in_product_dtype
    runs = []

    def loss_of_first_run_breaks(model, device):
        runs.append(model)
        forward = loss(model, device)
        is_first_run = len(runs) == 3  # after the descriptions of both
        return (lambda x, y: forward(x, y) * float("nan")) if is_first_run else forward

    monkeypatch.setattr(measure, "loss_in_product_dtype", loss_of_first_run_breaks)
    assert run(tiny, tmp_path / "out", "--recipes", "bf16,bf16@2") == 0
    rows = json.loads((tmp_path / "out" / "report.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["diverged at step 1", "finished"]
