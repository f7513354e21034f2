"""`minifloat train` loses a rank: the others report it, and any number of ranks resumes.

Ranks are forked, and join the world as torchrun would have them; rank 0 or 1 dies by SIGKILL.
"""

import io
import os
import re
import shutil
import signal
import socket
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from minifloat import cli
from minifloat.train.job import checkpoint
from minifloat.train.job import run as training
from minifloat.train.job.checkpoint import Metrics, read_records

from tests.support.tiny_job import without_timings
from tests.support.tiny_text import write_text
from tests.support.worlds import KILLED, THREADS, last_words

STEPS, EVERY = 10, 4  # a checkpoint at steps 4 and 8


# ---- one rank ------------------------------------------------------------------------------------


def before_call(monkeypatch, owner, name, number, act):
    """Runs act before the call of that number, from 1."""
    calls, function = [], getattr(owner, name)

    def called(*args, **kwargs):
        calls.append(name)
        if len(calls) == number:
            act()
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, called)


def kill(number):
    return lambda: os.kill(os.getpid(), number)


FAULTS = {
    "none": (None, ()),
    "stopped at step 4": (0, (Metrics, "write", EVERY, kill(signal.SIGTERM))),
    "in step 7": (1, (torch.nn.utils, "get_total_norm", 7, kill(signal.SIGKILL))),
    "gathering step 8": (1, (training.dcp, "get_state_dict", 2, kill(signal.SIGKILL))),
    "writing step 8": (0, (checkpoint, "write_json", 2, kill(signal.SIGKILL))),
}


def train_as_torchrun(rank, world, port, arguments, fault):
    """Runs the command; fails with its output unless it ends normally."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    said, (where, call) = io.StringIO(), FAULTS[fault]
    with pytest.MonkeyPatch.context() as monkeypatch:
        if rank == where:
            before_call(monkeypatch, *call)
        with redirect_stderr(said), redirect_stdout(said):
            code = cli.main(arguments)
    assert code == 0, f"exit code {code}: {said.getvalue()}"


def train(folder, out, world, fault="none", *more):
    """Returns how each rank ended."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    arguments = f"""train --data {folder}/text --cache {folder}/cache --vocab 300 --recipes nvfp4
        --model 64,2,2,1,96 --seq 32 --batch 12 --steps {STEPS} --eval-every {EVERY}
        --eval-batches 1 --checkpoint-every {EVERY} --threads {THREADS} --device cpu""".split()
    arguments += ["--out", str(out), *more]
    return last_words(world, train_as_torchrun, world, port, arguments, fault, seconds=None)


# ---- the job -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    write_text(folder / "text")
    return folder


@pytest.fixture(scope="module")
def stopped(folder):
    """Runs an undisturbed job of two processes, stopped at its first checkpoint."""
    texts = train(folder, folder / "stopped", 2, "stopped at step 4")
    assert "exit code 130" in texts[0], texts
    assert newest(folder / "stopped") == "step_00000004"
    return folder / "stopped"


def checkpoints(out):
    return out / "runs" / "nvfp4" / "checkpoints"


def newest(out):
    return checkpoint.checkpoints_in(checkpoints(out))[0].name


def resumed(folder, out, world):
    """Resumes the job on a number of processes, and returns its records."""
    assert train(folder, out, world, "none", "--resume") == [None] * world
    records = without_timings(read_records(out / "metrics.jsonl"))
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(1, STEPS + 1))
    return records


@pytest.fixture(scope="module")
def undisturbed(folder, stopped):
    """Returns the records of that job after one process, or three, resumed it."""
    found = {}
    for world in (1, 3):
        out = folder / f"stopped, {world}"
        shutil.copytree(stopped, out)
        found[world] = resumed(folder, out, world)
    return found


@pytest.mark.parametrize(
    ("fault", "said", "world"),
    [
        ("in step 7", r"`(.*get_total_norm|torch.autograd.backward)", 1),
        ("gathering step 8", r"`(return dcp.get_state_dict|dist.all_reduce)", 1),
        ("writing step 8", "`", 3),
    ],
    ids=lambda value: value if value in FAULTS else "",
)
def test_a_lost_rank_is_named_and_the_job_goes_on(folder, undisturbed, fault, said, world):
    out = folder / fault
    texts = train(folder, out, 2, fault)
    lost = FAULTS[fault][0]
    assert texts[lost] == KILLED
    expected = rf"error: rank {1 - lost} of 2: \w+ in {said}.*has failed, another rank has ended"
    assert re.search(expected, texts[1 - lost]), texts[1 - lost]
    assert newest(out) == "step_00000004"
    assert resumed(folder, out, world) == undisturbed[world]


def test_all_ranks_pass_over_a_damaged_checkpoint(folder, stopped, undisturbed):
    """Damages the bytes of the newest checkpoint."""
    out = folder / "damaged"
    shutil.copytree(stopped, out)
    shutil.copytree(checkpoints(out) / "step_00000004", checkpoints(out) / "step_00000008")
    payload = checkpoints(out) / "step_00000008" / "state.pt"
    payload.write_bytes(payload.read_bytes()[::-1])
    assert resumed(folder, out, 3) == undisturbed[3]


def test_all_ranks_say_that_no_checkpoint_is_intact(folder, stopped):
    out = folder / "lost"
    shutil.copytree(stopped, out)
    (checkpoints(out) / "step_00000004" / "state.pt").write_bytes(b"")
    before = (out / "job.json").read_bytes(), (out / "metrics.jsonl").read_bytes()
    for texts in train(folder, out, 2, "none", "--resume"):
        assert re.search(r"exit code 1: .*step_00000004/state.pt: expected", texts, re.DOTALL)
    assert ((out / "job.json").read_bytes(), (out / "metrics.jsonl").read_bytes()) == before
