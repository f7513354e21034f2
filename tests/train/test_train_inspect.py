"""`minifloat train --inspect-every`, and what it says of a step that is not finite."""

import json

import pytest
import torch
from minifloat import cli
from minifloat.train.config import TrainConfig
from minifloat.train.job.checkpoint import read_records
from minifloat.train.model import measure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support import train_command
from tests.support.same_bits import require_same_results
from tests.support.tiny_job import digest, run, run_and_kill

pytestmark = pytest.mark.usefixtures("torch_as_it_was", "fresh_compiler")
MIXED = "both=*: nvfp4; layers.1.*: mxfp8"
LOOKS = ("--recipe", MIXED, "--inspect-every", "6")
NAMES = [f"layers.{i}.{p}" for i in (0, 1) for p in ("attention.wq", "feed_forward.w2")]


def looks_in(out, name="both"):
    records = read_records(out / "metrics.jsonl")
    return {r["step"]: r for r in records if r["kind"] == "inspect" and r["run"] == name}


def results_in(out):
    """Returns the final weights, and the records but for those of looks."""
    weights = torch.load(out / "runs/both/weights.pt")["model"]
    return weights, [r for r in digest(out, "both")[1] if r["kind"] != "inspect"]


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """A job with looks that was never stopped, of FP4 and FP8 layers."""
    out = tmp_path_factory.mktemp("looks") / "out"
    assert run(tiny, out, *LOOKS) == 0
    return out


def test_fp4_and_fp8_layers_are_in_one_log(whole):
    found = looks_in(whole)
    assert list(found) == [6, 12, 18, 24]
    for record in found.values():
        db = [record[f"snr_db/x.fprop/{name}"] for name in NAMES]
        assert 15 < min(db[:2]) <= max(db[:2]) < 26 < min(db[2:]) <= max(db[2:]) < 40
        for name in NAMES:
            assert 0 < record[f"y_error/{name}"] < 0.3
            assert record[f"loss_second/{name}"] > 0
            assert record[f"nonfinite/g.wgrad/{name}"] == 0
    board = EventAccumulator(str(whole / "tensorboard/both"))
    board.Reload()
    tags = set(board.Tags()["scalars"])
    for metric in ("snr_db", "saturated", "flushed", "zero_scales", "outlier_channels"):
        assert {f"inspect/{metric}/g.dgrad/{name}" for name in NAMES} <= tags
    events = board.Scalars(f"inspect/snr_db/x.fprop/{NAMES[0]}")
    assert [event.step for event in events] == [6, 12, 18, 24]
    folder = whole / "runs/both/inspect"
    assert json.loads((folder / "inspect.json").read_text())["loss"] > 0
    assert (folder / "inspect.png").stat().st_size > 0
    assert (folder / "inspect.md").read_text().count("| layers.0.attention.wq ") == 1 + 6
    assert "the inspector took " in (whole / "report.md").read_text()


def test_looks_change_no_byte(tiny, whole, tmp_path):
    assert run(tiny, tmp_path / "out", "--recipe", MIXED) == 0
    (weights, records), want = results_in(tmp_path / "out"), results_in(whole)
    require_same_results(weights, want[0])
    assert records == want[1]


def test_a_resumed_job_goes_on_looking(tiny, whole, tmp_path):
    """It was killed between two looks; the folder has the option."""
    out = tmp_path / "out"
    run_and_kill(tiny, out, 8, *LOOKS)
    assert run(tiny, out, "--resume") == 0
    assert digest(out, "both") == digest(whole, "both")


def test_a_resumed_job_may_look_more_often():
    base = TrainConfig(inspect_every=6, threads=1)
    assert cli.asked_config({}, base).inspect_every == 6
    assert base.identity() == TrainConfig(threads=1).identity()


def test_runs_without_a_recipe_are_not_inspected(tiny, tmp_path):
    out = tmp_path / "out"
    assert run(tiny, out, "--recipes", "bf16", "--steps", "2", "--inspect-every", "1") == 0
    assert not looks_in(out, "bf16")
    assert "inspector" not in (out / "report.md").read_text()


@pytest.mark.slow
def test_compiled_layers_and_experts(tiny, tmp_path):
    options = ("--recipes", "mxfp8", "--steps", "6", "--inspect-every", "3")
    experts = ("--model", "moe:32,2,2,1,32,4,2,1")
    for name, more in (("compiled", ("--compile",)), ("eager", ()), ("experts", experts)):
        assert run(tiny, tmp_path / name, *options, *more) == 0
    compiled, eager = (looks_in(tmp_path / name, "mxfp8") for name in ("compiled", "eager"))
    assert list(compiled) == list(eager) == [3, 6]
    for step, name in ((3, "seconds"), (6, "seconds")):
        assert compiled[step].keys() == eager[step].keys()
        assert compiled[step][name] > 0
    key = "snr_db/w.fprop/layers.0.attention.wq"
    assert compiled[3][key] == pytest.approx(eager[3][key], abs=0.5)
    found = looks_in(tmp_path / "experts", "mxfp8")[6]
    assert found["snr_db/x.wgrad/layers.1.moe.experts.w2"] > 26


@pytest.mark.slow
def test_two_processes_log_the_same_layers(text_folder, tmp_path):
    """Each rank inspects its own sequences, with the whole weights, and rank 0 writes."""
    found = []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        more = ("--recipe", f"{MIXED} keep=nothing", "--steps=6", "--inspect-every=2")
        more = (*more, "--eval-every=1")  # which leaves the weights of FSDP2's root gathered
        sizes = {"model": "64,2,2,1,96", "seq": 32, "batch": 4}
        job = train_command.start(text_folder, out, processes, *more, **sizes)
        _, errors = job.communicate(timeout=180)
        assert job.returncode == 0, errors
        found.append(looks_in(out))
    alone, sharded = found
    assert list(alone) == list(sharded) == [2, 4, 6]
    for step in alone:
        assert alone[step].keys() == sharded[step].keys()
        for name in (*NAMES, "output"):  # of whole weights that have taken nearly the same steps
            key = f"snr_db/w.fprop/{name}"
            assert sharded[step][key] == pytest.approx(alone[step][key], abs=0.3)
            assert sharded[step][f"snr_db/g.dgrad/{name}"] > 10


@pytest.mark.slow
def test_two_processes_agree_on_what_is_not_finite(text_folder, tmp_path):
    """A learning rate that makes weights overflow."""
    more = ("--recipes", "nvfp4", "--steps=8", "--lr=1e9", "--clip=1e30", "--warmup=0")
    sizes = {"model": "64,2,2,1,96", "seq": 32, "batch": 4}
    job = train_command.start(text_folder, tmp_path / "out", 2, *more, **sizes)
    _, errors = job.communicate(timeout=180)
    assert job.returncode == 0, errors
    (line,) = (line for line in errors.splitlines() if "nvfp4: not finite at step" in line)
    assert ": first in " in line
    assert "(rank " in line


# ---- values that are not finite ------------------------------------------------------------------


def fault_of(out, name):
    return json.loads((out / "runs" / name / "result.json").read_text())["not_finite"]


def test_the_first_layer_operand_and_step_are_named(tiny, tmp_path, monkeypatch, capsys):
    """The 5th step's weights make the hidden layer of one feed-forward overflow."""
    loss, count = measure.loss_in_product_dtype, [0]

    def breaks_at_step_5(model, device):
        forward = loss(model, device)

        def call(inputs, targets):
            if model.training and next(model.parameters()).grad is None:
                count[0] += model.layers[1].feed_forward.w1.weight.requires_grad
                if count[0] == 6:  # one call describes the run
                    model.layers[1].feed_forward.w1.weight.data[3] = 3e38
            return forward(inputs, targets)

        return call

    monkeypatch.setattr(measure, "loss_in_product_dtype", breaks_at_step_5)
    out = tmp_path / "out"
    assert run(tiny, out, "--recipes", "nvfp4") == 0
    said = capsys.readouterr().err
    (line,) = (line for line in said.splitlines() if "not finite at step" in line)
    assert "layers.1.feed_forward.w1, y of fprop" in line
    assert line.count("values") == 1
    assert fault_of(out, "nvfp4") in (out / "report.md").read_text()
    rows = json.loads((out / "report.json").read_text())["rows"]
    assert rows[0]["status"] in line.replace("not finite", "diverged")


def test_a_loss_that_is_not_finite(tiny, tmp_path, monkeypatch, capsys):
    loss = measure.loss_in_product_dtype

    def breaks(model, device):
        forward = loss(model, device)
        return lambda x, y: forward(x, y) * float("nan") if model.training else forward(x, y)

    monkeypatch.setattr(measure, "loss_in_product_dtype", breaks)
    assert run(tiny, tmp_path / "out", "--recipes", "mxfp8") == 0
    said = capsys.readouterr().err
    assert "mxfp8: not finite at step 1: all values of its batch are finite when" in said
