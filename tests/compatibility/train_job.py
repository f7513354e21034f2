"""The tiny job of `minifloat train` that an earlier commit began and today's code resumes."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from minifloat import cli
from minifloat.train import checkpoint
from minifloat.train.metrics import read_records
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

RUN = "mixed"
RECIPE = "*: nvfp4; *.w2: fp8_delayed"
STOPPED, STEPS = 6, 8
OPTIONS = f"""--model 16,1,1,1,16 --vocab 260 --seq 32 --batch 2 --steps {STEPS} --eval-every 4
    --eval-batches 1 --checkpoint-every 3 --threads 1 --lr 0.01 --device cpu""".split()


class Stopped(BaseException):
    """An exception that ends the job as kill -9 would: the program does not catch it."""


def train(folder, *more):
    """Runs the job whose text and token ids are in `folder`; returns the exit code."""
    places = ("--data", folder / "text", "--cache", folder / "cache", "--out", folder / "out")
    return cli.main(["train", *map(str, places), *OPTIONS, *more])


def train_and_stop(folder):
    """Runs the job until the checkpoint of step STOPPED is complete."""
    save = checkpoint.save

    def save_and_stop(path, step, state, meta):
        save(path, step, state, meta)
        if step == STOPPED:
            raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", save_and_stop)
        with pytest.raises(Stopped):
            train(folder, "--recipe", f"{RUN}={RECIPE}")


def checkpoint_at(folder, step):
    """Returns the folder of a checkpoint."""
    return Path(folder) / "out" / "runs" / RUN / "checkpoints" / f"step_{step:08d}"


def read_checkpoint(path, scratch):
    """Reads a checkpoint with torch alone: {"model": …, "optimizer": …, …}."""
    file = Path(scratch) / f"{path.name}.pt"
    dcp_to_torch_save(path, file)
    return torch.load(file, weights_only=False)


def losses_after_the_stop(folder):
    """Returns the training losses of the steps after STOPPED."""
    records = read_records(Path(folder) / "out" / "metrics.jsonl")
    return [r["loss"] for r in records if r["kind"] == "train" and r["step"] > STOPPED]


def keep_what_resuming_reads(folder):
    """Removes what a resumed job writes anew, older checkpoints, and the path of this machine."""
    out = Path(folder) / "out"
    for path in (out / "tensorboard", checkpoint_at(folder, STOPPED - 3)):
        shutil.rmtree(path)
    for path in out.rglob("*lock*"):
        path.unlink()
    job = json.loads((out / "job.json").read_text())
    job["config"]["data"] = ["text"]
    (out / "job.json").write_text(json.dumps(job, indent=1) + "\n")
