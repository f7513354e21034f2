"""`minifloat train` whose last steps have another recipe: `nvfp4 then=mxfp8`."""

import json
import signal
import time
from collections import Counter

import pytest
import torch
from minifloat.nn.state.recipe_state import converted
from minifloat.train.config import RunSpec, steps_before_last
from minifloat.train.job.checkpoint import read_records
from minifloat.train.job.run import Run

from tests.support import train_command
from tests.support.same_bits import require_same_results
from tests.support.tiny_job import STEPS, run, run_and_kill, without_timings

pytestmark = pytest.mark.usefixtures("torch_as_it_was", "fresh_compiler")
BEFORE = 20  # of the job's 24 steps
SAME = "mxfp8 then=*: mxfp8"  # built again, under the same recipe
SIZES = {"model": "64,2,2,1,96", "seq": 32, "batch": 4}


def records_of(out, name):
    records = without_timings(read_records(out / "metrics.jsonl"))
    return [{k: v for k, v in r.items() if k != "run"} for r in records if r["run"] == name]


def weights_of(out, name):
    return torch.load(out / "runs" / RunSpec(name, "bf16").folder / "weights.pt")["model"]


def require_same_runs(out, name, other):
    require_same_results(weights_of(out, name), weights_of(out, other))
    assert records_of(out, name) == records_of(out, other)


@pytest.mark.parametrize(
    ("steps", "before"), [(3000, 2550), (24, 20), (20, 17), (3, 2), (2, 1), (1, 0)]
)
def test_the_last_steps_are_fifteen_percent_and_at_least_one(steps, before):
    assert steps_before_last(steps) == before
    run = RunSpec("a", "nvfp4", then="mxfp8")
    found = [run.part_of(step, steps).recipe for step in range(1, steps + 1)]
    assert found == before * ["nvfp4"] + (steps - before) * ["mxfp8"]


def test_the_last_steps_train_under_the_other_recipe(tiny, tmp_path, monkeypatch):
    train_step, recipes = Run.train_step, []

    def noted(self):
        found = Counter(layer.recipe.text for _, layer in converted(self.model))
        recipes.append((self.spec.name, self.step + 1, dict(found)))
        return train_step(self)

    monkeypatch.setattr(Run, "train_step", noted)
    out, name = tmp_path / "out", "bf16 then=mxfp8"
    assert run(tiny, out, "--recipes", f"{name},bf16") == 0
    assert [found for run, _, found in recipes if run == name] == [
        *BEFORE * [{}],
        *(STEPS - BEFORE) * [{"mxfp8": 14}],
    ]
    same, other = records_of(out, "bf16"), records_of(out, name)
    assert [r for r in same if r["step"] <= BEFORE] == [r for r in other if r["step"] <= BEFORE]
    for a, b in zip(same, other, strict=True):
        if a["step"] > BEFORE:
            key = "val_loss" if a["kind"] == "eval" else "loss"
            assert a[key] != b[key]
            assert a[key] == pytest.approx(b[key], rel=0.01)
    report, rows = (out / "report.md").read_text(), json.loads((out / "report.json").read_text())
    assert "`bf16`, from step 21 `mxfp8`; `keep=head`, 14 linear layers converted" in report
    assert rows["baseline"] == "bf16"
    assert [row["then"] for row in rows["rows"]] == ["mxfp8", ""]
    assert [row["converted"] for row in rows["rows"]] == [14, 0]


def test_the_policy_holds_to_the_end(tiny, tmp_path, capsys):
    name = "nvfp4 keep=nvfp4_paper then=mxfp8"
    assert run(tiny, tmp_path / "out", "--recipes", name, "--steps", "2") == 0
    said = capsys.readouterr().err
    for recipe in ("nvfp4", "mxfp8"):
        assert f"7 linear layers under '{recipe}', 8 left as they are (keep=nvfp4_paper)" in said


def test_an_unknown_recipe_of_the_last_steps_ends_the_job_before_it_starts(tiny, tmp_path, capsys):
    assert run(tiny, tmp_path / "out", "--recipes", "nvfp4 then=mxfp5") == 1
    assert "recipe nvfp4 then=mxfp5: " in capsys.readouterr().err
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "model",
    ["32,2,2,1,64", pytest.param("moe:32,2,2,1,32,4,2,1", marks=pytest.mark.slow)],
)
def test_weights_and_optimizer_are_taken_over(tiny, tmp_path, model):
    """Compares with a run under one recipe, which has no random state."""
    out = tmp_path / "out"
    assert run(tiny, out, "--model", model, "--recipes", f"mxfp8,{SAME}") == 0
    require_same_runs(out, "mxfp8", SAME)


@pytest.mark.parametrize("step", [18, 20, 22])
def test_a_job_killed_near_the_change_ends_with_the_same_bytes(tiny, tmp_path, step):
    """Random counters end at the change, amax histories begin there."""
    name, folder = "nvfp4 then=fp8_delayed", "nvfp4_then_fp8_delayed"
    options = ("--recipes", name, "--checkpoint-every", "2")
    assert run(tiny, tmp_path / "whole", *options) == 0
    run_and_kill(tiny, tmp_path / "out", step, *options)
    assert run(tiny, tmp_path / "out", *options, "--resume") == 0
    weights = [(tmp_path / job / "runs" / folder / "weights.pt") for job in ("out", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert records_of(tmp_path / "out", name) == records_of(tmp_path / "whole", name)


def test_another_last_recipe_is_another_job(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(tiny, out, "--recipe", "a=bf16 then=mxfp8", "--steps", "2") == 0
    assert run(tiny, out, "--recipe", "a=bf16 then=nvfp4", "--steps", "2", "--resume") == 1
    assert "a.then: 'mxfp8' there, 'nvfp4' asked for" in capsys.readouterr().err


def test_the_inspector_sees_the_recipe_of_the_step(tiny, tmp_path):
    out, names = tmp_path / "out", ("nvfp4 then=mxfp8", "nvfp4 then=bf16")
    assert run(tiny, out, "--recipes", ",".join(names), "--inspect-every", "7") == 0
    fp8, bf16 = (
        {r["step"]: r for r in records_of(out, name) if r["kind"] == "inspect"} for name in names
    )
    assert (list(fp8), list(bf16)) == ([7, 14, 21], [7, 14])
    found = [record["snr_db/x.fprop/layers.0.attention.wq"] for record in fp8.values()]
    assert 15 < min(found[:2]) <= max(found[:2]) < 26 < found[2] < 40
    for folder in ("nvfp4_then_mxfp8", "nvfp4_then_bf16"):
        assert (out / "runs" / folder / "inspect" / "inspect.png").stat().st_size > 0


@pytest.mark.slow
def test_a_compiled_job_changes_too(tiny, tmp_path):
    compiled, eager = tmp_path / "compiled", tmp_path / "eager"
    recipes = ("--recipes", f"mxfp8,{SAME},nvfp4 then=bf16", "--steps", "8")
    assert run(tiny, compiled, *recipes, "--compile") == 0
    assert run(tiny, eager, *recipes) == 0
    require_same_runs(compiled, "mxfp8", SAME)
    for a, b in zip(*(records_of(out, "nvfp4 then=bf16") for out in (compiled, eager))):
        key = "val_loss" if a["kind"] == "eval" else "loss"
        assert a[key] == pytest.approx(b[key], rel=0.01)


def wait_for(job):
    _, errors = job.communicate(timeout=180)
    assert job.returncode == 0, errors


@pytest.mark.slow
def test_two_processes_change_together(text_folder, tmp_path):
    """One process's losses to the tolerance of test_train_world.py; the same bytes as one recipe,
    and where the job was stopped before the change or after it."""
    names = ("mxfp8", SAME, "nvfp4 then=mxfp8")
    options = ("--recipes", ",".join(names), "--steps=32")
    for processes in (1, 2):
        out = tmp_path / str(processes)
        wait_for(train_command.start(text_folder, out, processes, *options, **SIZES))
    require_same_runs(tmp_path / "2", "mxfp8", SAME)
    for a, b in zip(*(records_of(tmp_path / n, SAME) for n in ("1", "2")), strict=True):
        key = "val_loss" if a["kind"] == "eval" else "loss"
        assert a[key] == pytest.approx(b[key], rel=2.0**-9 if a["step"] == 1 else 2.0**-8)
    for at in (3, steps_before_last(32) + 1):
        out = tmp_path / f"stopped_{at}"
        options = ("--recipes", names[2], "--steps=32")
        job = train_command.start(text_folder, out, 2, *options, **SIZES)
        while job.poll() is None and not any(
            r["step"] >= at for r in read_records(out / "metrics.jsonl")
        ):
            time.sleep(0.01)
        job.send_signal(signal.SIGTERM)
        job.wait(60)
        assert max(r["step"] for r in read_records(out / "metrics.jsonl")) < 32
        wait_for(train_command.start(text_folder, out, 2, *options, "--resume", **SIZES))
        assert records_of(out, names[2]) == records_of(tmp_path / "2", names[2])
        require_same_results(*(weights_of(o, names[2]) for o in (out, tmp_path / "2")))
