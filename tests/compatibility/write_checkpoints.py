"""Writes the files of a folder beside this one, with the code of the commit that names it.

    git worktree add /tmp/old a7f7ec2          # and build its libraries there
    PYTHONPATH=/tmp/old/python:. python -m tests.compatibility.write_checkpoints a7f7ec2

    expected.json.xz what the models held, and what one more training step of each made: {name: hex}
    states.pt        {recipe: {"model": state dict, "training": mf.training_state}}
    primary.pt       the same, with the codes as the parameters
    modules.pt       whole models, pickled
    dcp/, dcp_primary/    torch.distributed.checkpoint of one model each
    train/           text, token ids and a job of `minifloat train` that ended after a checkpoint;
                     expected.json: the losses of the steps after it, and the last random counter

A later commit never writes a file again: the files stand for those on users' disks.
"""

import json
import lzma
import random
import shutil
import sys
import tempfile
from pathlib import Path

import minifloat as mf
import torch
import torch.distributed.checkpoint as dcp

from . import exact_models as exact
from . import train_job

STEPS = 2
DCP = {"dcp": (exact.MIXED, {}), "dcp_primary": ("nvfp4", {"primary": True})}


def trained(model, recipe, **options):
    """Builds a converted model and trains it for two steps."""
    exact.convert(model, recipe, **options)
    for number in range(1, STEPS + 1):
        exact.train_step(model, number)
    return model


def state_of(model):
    return {"model": model.state_dict(), "training": mf.training_state(model)}


def write_text(folder):
    draw = random.Random(1)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    folder.mkdir(parents=True)
    for i in range(8):
        lines = (" ".join(draw.choices(words, k=8)) for _ in range(12))
        (folder / f"{i}.txt").write_text("\n".join(lines))


def write(folder):
    """Writes the models into `folder`, which must not exist."""
    folder.mkdir(parents=True)
    expected = {}

    def record(name, model):
        found = exact.contents(model) | {f"probe.{k}": v for k, v in exact.probe(model).items()}
        expected.update({f"{name}:{key}": exact.hex_of(t) for key, t in found.items()})

    files = {"states.pt": {}, "primary.pt": {}, "modules.pt": {}}
    models = []
    for number, recipe in enumerate(exact.RECIPES):
        model = trained(exact.sequential(number), recipe)
        files["states.pt"][recipe] = state_of(model)
        models.append((f"states.pt:{recipe}", model))
        if recipe not in exact.NOT_PRIMARY:
            model = trained(exact.sequential(number), recipe, primary=True)
            files["primary.pt"][recipe] = state_of(model)
            models.append((f"primary.pt:{recipe}", model))
    for name, model in {
        "mixed": trained(exact.sequential(50), exact.MIXED),
        "primary": trained(exact.sequential(51), "nvfp4", primary=True),
        "projections": trained(exact.projections(52), "nvfp4"),
    }.items():
        files["modules.pt"][name] = model
        models.append((f"modules.pt:{name}", model))
    for name, content in files.items():
        torch.save(content, folder / name)
    for name, (recipe, options) in DCP.items():
        model = trained(exact.sequential(60), recipe, **options)
        dcp.save(state_of(model), checkpoint_id=folder / name, no_dist=True)
        models.append((name, model))
    for name, model in models:  # only now: it writes to the models
        record(name, model)
    with lzma.open(folder / "expected.json.xz", "wt") as file:
        json.dump(expected, file)


def write_job(folder):
    """Writes a stopped job, and the measurements of its remaining steps."""
    write_text(folder / "text")
    train_job.train_and_stop(folder)
    train_job.keep_what_resuming_reads(folder)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(shutil.copytree(folder, Path(scratch) / "train"))
        train_job.train(whole, "--resume")
        last = train_job.read_checkpoint(train_job.checkpoint_at(whole, train_job.STEPS), scratch)
        rng = last["minifloat"]["rng"].tolist()
        rest = {"losses": train_job.losses_after_the_stop(whole), "rng": rng}
    (folder / "expected.json").write_text(json.dumps(rest, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(__file__).parent / sys.argv[1])
    write_job(Path(__file__).parent / sys.argv[1] / "train")
