"""`minifloat train --compile`: layers compiled by torch.compile."""

from dataclasses import asdict

import pytest
from minifloat import cli
from minifloat.train.checks import TrainError
from minifloat.train.config import TrainConfig

from tests.support.tiny_job import digest, run

pytestmark = pytest.mark.usefixtures("torch_as_it_was", "fresh_compiler")
OPTIONS = ("--recipes", "bf16,nvfp4", "--steps", "8", "--eval-every", "4")


def losses(out, name):
    return [record["val_loss"] for record in digest(out, name)[1] if record["kind"] == "eval"]


@pytest.mark.slow
def test_a_compiled_job_trains_as_the_eager_one(tiny, tmp_path):
    compiled, eager = tmp_path / "compiled", tmp_path / "eager"
    assert run(tiny, compiled, *OPTIONS, "--compile") == 0
    assert run(tiny, eager, *OPTIONS) == 0
    for name in ("bf16", "nvfp4"):
        want = losses(eager, name)
        assert len(want) == 2
        assert losses(compiled, name) == pytest.approx(want, rel=0.01)
    assert ", compiled, torch" in (compiled / "report.md").read_text()
    assert "compiled" not in (eager / "report.md").read_text()


def test_a_resumed_job_keeps_its_choice_or_takes_another():
    base = TrainConfig(compile=True, threads=1)
    assert cli.asked_config({}, base).compile is True
    assert cli.asked_config({"compile": False}, base).compile is False
    assert base.identity() == TrainConfig(threads=1).identity()


def test_a_saved_choice_is_true_or_false():
    values = asdict(TrainConfig(compile=True)) | {"data": []}
    assert TrainConfig.from_json("job.json", values).compile is True
    with pytest.raises(TrainError, match=r"^job.json: --compile: expected true or false, got 1"):
        TrainConfig.from_json("job.json", values | {"compile": 1})
