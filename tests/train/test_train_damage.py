"""`minifloat train --resume` of a damaged job: damage is found, named and survived."""

import json
import random
import re
import shutil

import pytest
import torch
from minifloat.train.checks import TrainError
from minifloat.train.durable_files import CHECKSUMS, write_checksums
from minifloat.train.job import checkpoint

from tests.support.tiny_job import EVERY, STEPS, digest, run, run_and_kill

BEFORE, NEWEST = "step_00000008", "step_00000012"
FILES = ["state.json", "state.pt", CHECKSUMS]
POSITIONS = 100  # flipped bits a file


@pytest.fixture(scope="module", autouse=True)
def _leave_torch_as_it_was():
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference(tiny, tmp_path_factory):
    """Computes the digest of an undisturbed job."""
    out = tmp_path_factory.mktemp("reference") / "out"
    assert run(tiny, out, "--recipes", "bf16") == 0
    return digest(out)


@pytest.fixture(scope="module")
def killed(tiny, tmp_path_factory):
    """Runs a job that is killed at step 12: checkpoints of steps 8 and 12."""
    out = tmp_path_factory.mktemp("killed") / "out"
    run_and_kill(tiny, out, 12, "--recipes", "bf16")
    return out


@pytest.fixture
def out(killed, tmp_path):
    """Copies the killed job, to be damaged."""
    shutil.copytree(killed, tmp_path / "out")
    return tmp_path / "out"


def checkpoints(out):
    return out / "runs" / "bf16" / "checkpoints"


@pytest.fixture
def choose(capsys):
    """Returns the function (folder of a job) -> (checkpoint that a resume loads, messages)."""

    def call(out):
        found = checkpoint.choose(checkpoints(out), 12, EVERY)
        return found.name, capsys.readouterr().err

    return call


def contents(out):
    """Reads every file of a job."""
    return {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def edit_json(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


# ---- the bytes of a checkpoint -------------------------------------------------------------------


def test_an_undamaged_job_goes_on_from_its_newest_checkpoint(out, choose):
    assert choose(out) == (NEWEST, "")
    assert sorted(path.name for path in (checkpoints(out) / NEWEST).iterdir()) == sorted(FILES)


@pytest.mark.parametrize("file", FILES)
def test_every_flipped_bit_is_found(out, choose, file):
    path = checkpoints(out) / NEWEST / file
    draw, data = random.Random(21), path.read_bytes()
    positions = [0, len(data) - 1, *(draw.randrange(len(data)) for _ in range(POSITIONS - 2))]
    for position in positions:
        flipped = bytearray(data)
        flipped[position] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        found, said = choose(out)
        assert found == BEFORE, position
        assert re.search(rf"damaged checkpoint: \S+{NEWEST}/{re.escape(file)}: expected", said)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("left", [None, 0, 0.5, -1], ids=["lost", "empty", "half", "all but one"])
def test_every_lost_byte_is_found(out, choose, file, left):
    path = checkpoints(out) / NEWEST / file
    data = path.read_bytes()
    path.unlink()
    if left is not None:
        path.write_bytes(data[: int(left * len(data)) if left >= 0 else -1])
    found, said = choose(out)
    assert found == BEFORE
    assert f"{NEWEST}/{file}: expected" in said


def test_the_checkpoint_before_gives_the_same_bytes(tiny, out, reference, capsys):
    path = checkpoints(out) / NEWEST / "state.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert run(tiny, out, "--resume") == 0
    assert f"goes on from {checkpoints(out) / BEFORE}" in capsys.readouterr().err
    assert digest(out) == reference


def test_without_an_intact_checkpoint_nothing_is_written(tiny, out, capsys):
    for name in (BEFORE, NEWEST):
        (checkpoints(out) / name / "state.pt").write_bytes(b"")
    before = contents(out)
    assert run(tiny, out, "--resume") == 1
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    for name in (BEFORE, NEWEST):
        assert f"{name}/state.pt: expected the bytes with sha256" in said
    assert contents(out) == before


def test_a_state_that_cannot_be_set_is_one_error(tiny, out, capsys):
    """Resumes from a state that is another program's, under checksums of its own."""
    torch.save({"model": {}}, checkpoints(out) / NEWEST / "state.pt")
    write_checksums(checkpoints(out) / NEWEST)
    assert run(tiny, out, "--resume") == 1
    said = capsys.readouterr().err
    assert f"error: {checkpoints(out) / NEWEST}: cannot load it" in said


@pytest.mark.parametrize("field", ["identity", "step", "torch", "peak_bytes"])
def test_a_state_without_a_field_is_passed_over(out, choose, field):
    edit_json(checkpoints(out) / NEWEST / "state.json", lambda state: state.pop(field))
    write_checksums(checkpoints(out) / NEWEST)
    found, said = choose(out)
    assert found == BEFORE
    assert f"{NEWEST}/state.json: expected the field '{field}'" in said


def test_sha256sum_reads_the_checksums(out):
    lines = (checkpoints(out) / NEWEST / CHECKSUMS).read_text().splitlines()
    assert [line[64:] for line in lines[:-1]] == [f"  {name}" for name in sorted(FILES[:-1])]
    assert lines[-1].startswith("# ")


def test_two_checkpoints_stay_and_passed_over_ones_go(tmp_path):
    for step in (4, 8, 12, 16):
        (tmp_path / f"step_{step:08d}").mkdir()
    (tmp_path / "step_by_hand").mkdir()
    checkpoint.prune(tmp_path, 12, keep=2)
    left = sorted(path.name for path in tmp_path.glob("step_*"))
    assert left == ["step_00000008", "step_00000012", "step_by_hand"]


def test_lost_checkpoints_are_an_error(tiny, out, capsys):
    shutil.rmtree(checkpoints(out))
    before = contents(out)
    assert run(tiny, out, "--resume") == 1
    assert "expected a checkpoint, as metrics.jsonl records 12 steps" in capsys.readouterr().err
    assert contents(out) == before


def test_a_start_from_step_0_is_said(tmp_path, capsys):
    assert checkpoint.choose(tmp_path, EVERY, EVERY) is None
    assert "starts again from step 0" in capsys.readouterr().err


# ---- job.json, result.json, metrics.jsonl --------------------------------------------------------

DAMAGES = {
    "job.json": [
        (b"", "expected JSON, got ''"),
        (b'{"config": \xff}', "expected UTF-8, got other bytes at 11"),
        (b"[" * 100_000, "expected JSON"),
        (b"[]", "expected an object, got []"),
        (lambda job: job.pop("tokens"), "expected the field 'tokens'"),
        (lambda job: job.update(tokens=5), "tokens: expected a text, got 5"),
        (lambda job: job.update(runs=[3]), "runs: expected an object, got 3"),
        (lambda job: job["runs"][0].pop("seed"), "expected the field 'seed'"),
        (lambda job: job["runs"][0].update(name=".."), "expected a name of 1 to 255 bytes"),
        (lambda job: job["config"].pop("model"), "expected the field 'model'"),
        (lambda job: job["config"]["model"].update(dim="a"), "dim: expected an integer, got 'a'"),
        (lambda job: job["config"].update(steps="5"), "steps: expected an integer, got '5'"),
        (lambda job: job["config"].update(lr=float("nan")), "lr: expected a finite number"),
        (lambda job: job["config"].update(seed=True), "seed: expected an integer, got True"),
        (lambda job: job["config"].update(device="abacus"), "expected 'cpu' or 'cuda'"),
    ],
    "runs/bf16/result.json": [
        (b"{", "expected JSON, got '{'"),
        (b"null", "expected an object, got None"),
        (b'{"status": 1}', "status: expected a text, got 1"),
        (b'{"status": "finished"}', "expected the field 'step'"),
    ],
    "metrics.jsonl": [
        (b"{}\n", "line 1: expected the field 'run'"),
        (b'{"run": "bf16"}\n', "line 1: expected the field 'kind'"),
        (b'\n{"run": "bf16"}\n', "line 1: expected JSON, got ''"),
        (b'{"run": 1, "kind": "train", "step": 1}\n', "line 1: run: expected a text, got 1"),
        (b'{"run": "b", "kind": "train", "step": 1}\n', "line 1: expected the field 'loss'"),
        (b'{"run": "b", "kind": "eval", "step": "x"}\n', "line 1: step: expected an integer"),
        (b"\xff\n", "expected UTF-8, got other bytes at 0"),
    ],
}


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [(file, *case) for file, cases in DAMAGES.items() for case in cases],
)
def test_a_damaged_file_is_one_error_with_its_name(tiny, out, capsys, file, damage, message):
    path = out / file
    if callable(damage):
        edit_json(path, damage)
    else:
        path.write_bytes(damage)
    before = contents(out)
    assert run(tiny, out, "--resume") == 1
    said = capsys.readouterr().err
    assert said.startswith(f"minifloat train: error: {path}")
    assert message in said
    assert said.count("\n") == 1
    assert contents(out) == before


def test_no_flipped_bit_gives_a_traceback(out):
    result = {"status": "finished", "step": 1, "converted": 0, "peak": 0}
    result |= {"saved_total": 1.5, "saved_linears": None}
    (out / "runs" / "bf16" / "result.json").write_text(json.dumps(result))
    draw, errors = random.Random(20), 0
    for file in DAMAGES:
        path = out / file
        data = path.read_bytes()
        for _ in range(POSITIONS):
            flipped = bytearray(data)
            flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            path.write_bytes(flipped)
            try:
                checkpoint.read_job(out)
            except TrainError as error:
                assert str(path) in str(error)  # noqa: PT017
                errors += 1
        path.write_bytes(data)
    assert errors > POSITIONS


def test_a_lost_job_is_an_error(tiny, out, capsys):
    (out / "job.json").unlink()
    assert run(tiny, out, "--resume") == 1
    assert "job.json: expected the job of" in capsys.readouterr().err


def test_results_without_a_job_are_moved_aside(tiny, out, reference, capsys):
    """Runs without --resume: files of an earlier job are neither read nor overwritten."""
    (out / "job.json").unlink()
    before = {path.name: data for path, data in contents(out / "runs").items()}
    assert run(tiny, out, "--recipes", "bf16") == 0
    assert "moved from" in capsys.readouterr().err
    moved = contents(out.with_name("out.1") / "runs")
    assert {path.name: data for path, data in moved.items()} == before
    assert digest(out) == reference


def test_a_torn_last_line_is_dropped_and_written_again(tiny, out, reference):
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"run": "bf16", "kind": "tra')
    assert run(tiny, out, "--resume") == 0
    assert digest(out) == reference


def test_lost_records_are_said(tiny, out, capsys):
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(lines[:5]))
    assert run(tiny, out, "--resume") == 0
    assert "expected all steps of bf16 before its checkpoint" in capsys.readouterr().err
    steps = [r["step"] for r in digest(out)[1] if r["kind"] == "train"]
    assert steps == [1, 2, 3, 4, 5, *range(13, STEPS + 1)]
