"""`minifloat inspect` on a tiny job: a new model, a run's checkpoint, and what it refuses."""

import json

import pytest
from minifloat import cli
from minifloat.recipe import RecipeMap
from minifloat.train.job.checkpoint import read_records

from tests.support.tiny_job import options, run
from tests.support.tiny_text import write_text

pytestmark = pytest.mark.usefixtures("torch_as_it_was")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    write_text(folder / "text")
    return folder


def inspect(folder, *more):
    where = ["--out", str(folder / "out"), "--cache", str(folder / "cache"), "--device", "cpu"]
    return cli.main(["inspect", *where, *map(str, more)])


def read(folder):
    return json.loads((folder / "out/inspect.json").read_text())


def test_a_new_model_and_a_trained_one(folder, capsys):
    tiny = options(folder / "text", folder / "cache")
    new = ("--data", folder / "text", "--model", "32,2,2,1,64")
    assert inspect(folder, *new, "--sequences", 1) == 0
    out = capsys.readouterr().out
    names = [f"layers.{i}.{part}" for i in (0, 1) for part in ("attention.wq", "feed_forward.w2")]
    assert all(f"| {name} " in out for name in names)
    assert read(folder)["tokens"] == 256
    for name in ("inspect.md", "inspect.png", "recipe_map.txt"):
        assert (folder / "out" / name).stat().st_size > 0
    assert {row["recipe"] for row in read(folder)["rows"]} == {"fp8_rowwise", "mxfp8", "nvfp4"}
    job = folder / "job"
    assert run(tiny, job, "--recipes", "bf16,mxfp8") == 0
    for name in ("bf16", "mxfp8"):
        trained = inspect(folder, job / "runs" / name, "--recipes", "mxfp8,nvfp4", "--share", 0.5)
        assert trained == 0
        first = next(r for r in read_records(job / "metrics.jsonl") if r["run"] == name)
        assert read(folder)["loss"] < first["loss"] - 1
        assert read(folder)["tokens"] == 2 * 32
    # The map is one that `minifloat train` takes.
    text = (folder / "out/recipe_map.txt").read_text()
    assert RecipeMap(text).find("layers.0.attention.wk") is not None
    assert ": bf16" in text
    assert run(tiny, folder / "mapped", "--recipe", f"mapped={text}", "--steps", "2") == 0


def test_refusals(folder, capsys):
    for more, message in (
        (("--recipes", "mxfp9"), "--recipes: 'mxfp9', position 0"),
        (("--rest", "mxfp4"), "--rest: expected bf16 or one of fp8_rowwise, mxfp8, nvfp4"),
        ((folder / "text",), "expected the folder of a run of `minifloat train`"),
        (("--share", "2"), "--share: expected at most 1, got 2"),
        (("--sequences", "0"), "--sequences: expected at least 1, got 0"),
        ((folder, "--model", "1,2"), "--model: expected none beside RUN"),
    ):
        assert inspect(folder, *more) == 1
        assert message in capsys.readouterr().err
