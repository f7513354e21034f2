"""examples/pretrain: its options, text and table, and `make train`, killed and resumed."""

import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import minifloat
import numpy as np
import pytest
import torch

from tests.support.tiny_text import write_text

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "pretrain"


@pytest.fixture(scope="module")
def module():
    """Returns a function that imports a module of the example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
        yield importlib.import_module


# ---- Runs ----------------------------------------------------------------------------------------

FAST = "fprop=e4m3/tensor*e4m3/tensor,fast dgrad=e5m2/tensor*e4m3/tensor wgrad=bf16*bf16"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("bf16", [("bf16", "bf16", 1)]),
        ("bf16, mxfp8", [("bf16", "bf16", 1), ("mxfp8", "mxfp8", 1)]),
        (
            "nvfp4 keep=nvfp4_paper,bf16@2",
            [
                ("nvfp4 keep=nvfp4_paper", "nvfp4 keep=nvfp4_paper", 1),
                ("bf16 (seed 2)", "bf16", 2),
            ],
        ),
        ("a=nvfp4 keep=nothing@7", [("a", "nvfp4 keep=nothing", 7)]),
        ("m=*: nvfp4; lm_head: mxfp8", [("m", "*: nvfp4; lm_head: mxfp8", 1)]),
        (f"bf16,{FAST}", [("bf16", "bf16", 1), (FAST, FAST, 1)]),
    ],
)
def test_entries(module, text, want):
    runs = module("runs").parse_runs(text)
    assert [(run.name, run.text, run.seed) for run in runs] == want


@pytest.mark.parametrize("text", ["", "bf16,", "=", "bf16@", "bf16@x", "bf16,bf16"])
def test_bad_entries_are_refused(module, text):
    with pytest.raises(ValueError, match=r"^--recipes: expected .*, got"):
        module("runs").parse_runs(text)


# ---- The text ------------------------------------------------------------------------------------


def test_a_file_keeps_its_side_whatever_is_beside_it(module, tmp_path):
    text = module("text")
    names = [f"{i}.txt" for i in range(200)]
    train, validation = sides = text.split(names, names)[0]
    assert 1 <= len(validation) <= 25
    assert sorted(train + validation) == sorted(names)
    fewer = text.split(names[:100], names[:100])[0]
    assert [*fewer] == [[n for n in side if n in names[:100]] for side in sides]
    assert text.split(["a"], ["x" * 95 + "y" * 5])[0] == [("x" * 95,), ("y" * 5,)]


def test_what_is_read(module, tmp_path, monkeypatch):
    text = module("text")
    (tmp_path / "a").mkdir()
    (tmp_path / "a/one.txt").write_text("é" * 10)
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "latin").write_bytes(b"\xe9")
    (tmp_path / ".hidden").write_text("hidden")
    about, names, texts = text.read_documents([tmp_path])
    assert (names, texts) == (["a/one.txt"], ["é" * 10])
    assert "1 files" in about
    assert "2 left out that are not UTF-8" in about
    monkeypatch.setattr(text, "LIMIT", 7)  # within a character
    assert text.read_documents([tmp_path / "a/one.txt"])[2] == ["é" * 3]
    for paths, message in (
        ([tmp_path / "none"], "--data: expected a file or a folder, got .*none: no such path"),
        ([tmp_path / "binary"], "--data: expected files of UTF-8 text in .*binary, found none"),
    ):
        with pytest.raises(ValueError, match=message):
            text.read_documents(paths)
    library = text.read_documents([])
    assert "standard library" in library[0]
    assert all(name.endswith(".py") for name in library[1])


def test_windows_cover_the_text_once(module):
    windows = module("text").Windows(np.arange(103, dtype=np.uint32), 10)
    assert len(windows) == 10
    seen = [i for window in windows_of(windows) for i in window["input_ids"].tolist()]
    assert seen == list(range(100))
    few = module("text").Windows(np.arange(103, dtype=np.uint32), 10, count=3)
    assert [int(w["labels"][0]) for w in windows_of(few)] == [0, 40, 90]


def windows_of(windows):
    return [windows[i] for i in range(len(windows))]


# ---- The table -----------------------------------------------------------------------------------


def history(losses, seconds, last=()):
    train = [
        {"step": 10 * i, "loss": x, "step_seconds": s}
        for i, (x, s) in enumerate(zip(losses, seconds), start=1)
    ]
    return [*train, *({"step": 20 * i, "eval_loss": x} for i, x in enumerate(last, start=1))]


def test_the_table(module, tmp_path):
    report, runs = module("report"), module("runs").parse_runs("nvfp4,bf16,bf16@2,mxfp8")
    assert report.baseline_of(runs) is runs[1]
    assert report.baseline_of(runs[:1]) is None
    logs = [
        history([5, 4], [4, 8], [4.2]),  # stopped before its second evaluation
        history([5, 4], [2, 2], [4.0, 2.0]),
        history([5, 4], [1, 2], [4.0, 3.0]),
        [],
    ]
    results = {
        run: {"state": "finished", "saved_bytes": 100.0, "log_history": log}
        for run, log in zip(runs, logs)
    }
    rows = report.table_rows(results, runs[1], tokens_per_step=60)
    assert [row["loss"] for row in rows] == [4.2, 2.0, 3.0, None]
    assert [row["gap"] for row in rows] == [pytest.approx(5.0), 0.0, 50.0, None]
    assert [row["tokens_per_s"] for row in rows] == [10, 30, 40, None]
    assert [row["speed"] for row in rows] == [pytest.approx(1 / 3), 1, pytest.approx(4 / 3), None]
    lines = report.write_report(tmp_path, ["title"], results, runs[1], 60).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split("|")[1:5] == [" nvfp4         ", "          4.2000 ", "      +5.00% ",
                                        "       10 "]  # fmt: skip
    assert lines[5].count("- |") == 4
    assert "against `bf16` at the same step" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    report.write_report(tmp_path, ["title"], dict([*results.items()][3:]), None, 60)


# ---- The command ---------------------------------------------------------------------------------

TINY = """--vocab 300 --seq 32 --per_device_train_batch_size 2 --per_device_eval_batch_size 2
    --save_steps 4 --eval_steps 4 --logging_steps 2 --use_cpu --disable_tqdm true"""
MODEL, STEPS = "32,2,2,1,64", 12


def make_train(**variables):
    """Starts what `make train` runs after the build, with variables as a user gives them."""
    given = [f"{name}={value}" for name, value in variables.items()]
    command = ["make", "-n", "train", f"VENV={Path(sys.executable).parents[1]}", *given]
    # Without what the make that runs the tests hands on: its variables, and its messages.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    said = ran.stdout
    words = shlex.split(said.replace("\\\n", " ").splitlines()[-1])
    assert words[1] == "examples/pretrain/pretrain.py"
    package = Path(minifloat.__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, *words[1:]],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(package)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    """Waits for a normal end; returns what the process printed."""
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    return said


def result_of(out, name):
    """Returns the bytes of a run's weights, and its log without what depends on time."""
    folder = out / "runs" / name
    log = json.loads((folder / "result.json").read_text())["log_history"]
    timed = ("seconds", "runtime", "per_second", "total_flos")
    entries = [{k: v for k, v in e.items() if not k.endswith(timed)} for e in log]
    return (folder / "model.safetensors").read_bytes(), entries[:-1]  # the last has the means


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns the settings of a job, its folder and what it printed."""
    folder = tmp_path_factory.mktemp("pretrain")
    write_text(folder / "text")
    settings = {"DATA": folder / "text", "MODEL": MODEL, "STEPS": STEPS}
    settings["ARGS"] = " ".join(TINY.split())
    settings["RECIPES"] = "bf16,nvfp4 keep=nvfp4_paper,both=*: mxfp8; *.q_proj: fp8_delayed"
    return settings, folder / "out", finish(make_train(**settings, OUT=folder / "out"))


def test_the_job(whole):
    _, out, said = whole
    report = (out / "report.md").read_text()
    for line in said.splitlines()[-6:-1]:
        assert line in report
    rows = said.splitlines()[-4:-1]
    assert [row.split("|")[1].strip() for row in rows] == [
        "bf16",
        "nvfp4 keep=nvfp4_paper",
        "both",
    ]
    assert all("finished" in row for row in rows)
    bf16, nvfp4 = (result_of(out, name)[1] for name in ("bf16", "nvfp4_keep_nvfp4_paper"))
    assert [e["step"] for e in bf16 if "loss" in e] == list(range(2, STEPS + 1, 2))
    first, *_, last = (e["eval_loss"] for e in bf16 if "eval_loss" in e)
    assert last < first - 0.05
    assert nvfp4[0]["loss"] == pytest.approx(bf16[0]["loss"], abs=0.02)  # weights and batches
    assert nvfp4[0]["loss"] != bf16[0]["loss"]
    saved = [float(row.split("|")[6]) for row in rows]
    assert saved[1] < saved[0]


def test_a_killed_job_resumes_with_the_same_bytes(whole, tmp_path):
    """Kills the job in its second run; the third has amax histories and starts after the kill."""
    settings, out, _ = whole
    process = make_train(**settings, OUT=tmp_path / "out")
    complete = tmp_path / "out/runs/nvfp4_keep_nvfp4_paper/checkpoint-4/complete"
    while not complete.exists() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    said, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, said
    assert not (complete.parents[1] / "result.json").exists()
    finish(make_train(OUT=tmp_path / "out", RESUME=1))
    for name in ("bf16", "nvfp4_keep_nvfp4_paper", "both"):
        assert result_of(tmp_path / "out", name) == result_of(out, name), name


def test_a_checkpoint_that_was_not_written_to_its_end_is_passed_over(module, tmp_path):
    last_checkpoint = module("pretrain").last_checkpoint
    assert last_checkpoint(tmp_path) is None
    for step in (50, 100, 150):
        (tmp_path / f"checkpoint-{step}").mkdir()
    for step in (50, 100):
        (tmp_path / f"checkpoint-{step}/complete").touch()
    assert last_checkpoint(tmp_path).name == "checkpoint-100"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--recipes mxfp9", "'mxfp9', position 0"),
        ("--recipes mxfp8,mxfp8", "--recipes: expected different names, got mxfp8, mxfp8"),
        ("--data none", "--data: expected a file or a folder, got none: no such path"),
        ("--seq 100000", "--data: expected at least 100000 tokens of train text"),
        ("--steps 0", "--steps: expected at least 1, got 0"),
        ("--vocab 256", "--vocab: expected at least 257, got 256"),
        ("--no_such 1", "expected an option of pretrain.py or of the Trainer, got --no_such"),
        ("--max-steps 5", "expected --steps, --out, or @SEED of a recipe, got --max-steps"),
        ("--model none", "--model: expected DIM,LAYERS,HEADS,KV_HEADS,FFN or the file of a"),
        ("--model 32,2,2,1", "--model: expected DIM,LAYERS,HEADS,KV_HEADS,FFN or the file of a"),
    ],
)
def test_refusals_before_anything_is_written(module, whole, tmp_path, capsys, options, message):
    out, settings = tmp_path / "out", whole[0]
    given = f"--data {settings['DATA']} --model {MODEL} --out {out} {TINY} {options}".split()
    assert module("pretrain").main(given) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_run_that_diverges_says_so_and_the_next_goes_on(module, whole, tmp_path, capsys):
    settings = whole[0]
    given = f"--data {settings['DATA']} --model {MODEL} --out {tmp_path} {TINY} --steps 8".split()
    given += ["--learning_rate", "1e30", "--warmup_steps", "0", "--recipes", "bf16,mxfp8"]
    assert module("pretrain").main(given) == 0
    rows = capsys.readouterr().out.splitlines()[-3:-1]
    assert all(" diverged by step " in row for row in rows), rows


def test_other_settings_are_refused_under_resume(module, whole, capsys):
    _, out, _ = whole
    before = (out / "job.json").read_bytes()
    given = ["--resume", "--out", str(out), "--steps", "13"]
    assert module("pretrain").main(given) == 1
    assert f"--resume: expected steps {STEPS} as in {out}/job.json" in capsys.readouterr().err
    assert (out / "job.json").read_bytes() == before


def test_the_inspector_reads_a_run_that_has_not_ended(module, whole, tmp_path):
    _, out, _ = whole
    load_run, run = module("inspect_run").load_run, tmp_path / "runs/bf16"
    for name in ("job.json", "tokens.npz"):
        shutil.copy(out / name, tmp_path)
    with pytest.raises(SystemExit, match=f"expected a run with a complete checkpoint, got {run}"):
        load_run(run)
    shutil.copytree(out / "runs/bf16", run / "checkpoint-4")
    (run / "checkpoint-4/complete").touch()
    model, _, _ = load_run(run)
    finished, _, _ = load_run(out / "runs/bf16")
    assert all(map(torch.equal, model.parameters(), finished.parameters()))


def test_the_inspector_reads_a_run(module, whole, tmp_path, capsys, monkeypatch):
    _, out, _ = whole
    words = f"x {out}/runs/bf16 --recipes mxfp8,nvfp4 --share 0.5 --out {tmp_path}".split()
    monkeypatch.setattr(sys, "argv", words)
    module("inspect_run").main()
    assert "| model.layers.1.mlp.down_proj " in capsys.readouterr().out
    chosen = minifloat.RecipeMap((tmp_path / "recipe_map.txt").read_text())
    assert chosen.find("model.layers.0.self_attn.q_proj") is not None
    assert ": bf16" in chosen.text
    assert (tmp_path / "inspect.png").read_bytes().startswith(b"\x89PNG")
