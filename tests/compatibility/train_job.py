"""The tiny job of `minifloat train` that an earlier commit began and today's code resumes."""

import json
import shutil
from pathlib import Path

import torch
from minifloat import cli
from minifloat.train.metrics import read_records
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.support.killed_job import killed_after

RUN = "mixed"
RECIPE = "*: nvfp4; *.w2: fp8_delayed"
STOPPED, STEPS = 6, 8
OPTIONS = f"""--model 16,1,1,1,16 --vocab 260 --seq 32 --batch 2 --steps {STEPS} --eval-every 4
    --eval-batches 1 --checkpoint-every 3 --threads 1 --lr 0.01 --device cpu""".split()


def train(folder, *more):
    """Runs the job whose text and token ids are in `folder`; returns the exit code."""
    places = ("--data", folder / "text", "--cache", folder / "cache", "--out", folder / "out")
    return cli.main(["train", *map(str, places), *OPTIONS, *more])


def train_and_stop(folder):
    """Runs the job until the checkpoint of step STOPPED is complete."""
    with killed_after(STOPPED):
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
