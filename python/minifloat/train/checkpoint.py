"""Checkpoints, which stay complete after a kill at any moment or on a full disk.

FOLDER/.writing/        a checkpoint that is being written: never read
FOLDER/step_00000100/   torch.distributed.checkpoint's files, state.json, SHA256SUMS (manifest.py)
FOLDER/latest           the name of the newest complete one

1. write everything into .writing, each file synced, the checksums last
2. rename .writing to step_N, sync the folder
3. replace `latest`
4. only now remove older checkpoints

`choose` finds the checkpoint that a job resumes from. It verifies all bytes before they are loaded:
torch.distributed.checkpoint unpickles `.metadata`, and its payload has no checksum.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from . import manifest
from .config import bound, differences
from .fields import COUNT, OBJECT, TEXT, Fields, TrainError, load_json
from .files import sync_folder, write_atomically, write_json, write_text
from .world import is_of_a_collective, whole

KEEP = 2  # complete checkpoints, the newest among them
STEP = re.compile(r"step_([0-9]{8,18})")
STATE: Fields = {"step": COUNT, "identity": OBJECT, "peak_bytes": COUNT, "torch": TEXT}


class CheckpointError(TrainError):
    """A checkpoint that cannot be written, read, or used for this job."""


def step_of(checkpoint: Path) -> int:
    """Returns the step in a checkpoint's name, -1 for another name."""
    match = STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def latest(folder: Path) -> Path | None:
    """Returns the checkpoint that `latest` names, None if it names none."""
    try:
        name = (folder / "latest").read_bytes().decode("ascii", "replace").removesuffix("\n")
    except FileNotFoundError:
        return None
    is_complete = STEP.fullmatch(name) and (folder / name / "state.json").exists()
    return folder / name if is_complete else None


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """Returns state.json: step, identity and measurements of the run."""
    meta = load_json(checkpoint / "state.json", STATE)
    if meta["step"] != step_of(checkpoint):
        raise CheckpointError(
            f"{checkpoint / 'state.json'}: expected the step of its folder's name, "
            f"got {meta['step']}"
        )
    return meta


def verify(checkpoint: Path) -> None:
    """Raises TrainError, which names the file, if the checkpoint is damaged."""
    manifest.verify(checkpoint)
    read_meta(checkpoint)


def choose(folder: Path, trained: int, every: int, say: Callable[[str], None]) -> Path | None:
    """Returns the newest intact checkpoint of a run, None if the run has none yet.

    Args:
        folder: of the run's checkpoints.
        trained: last step of the run that metrics.jsonl records.
        every: steps between checkpoints.
        say: takes one line about each checkpoint that is passed over, and why.
    Raises:
        TrainError: all checkpoints are damaged, or are lost.
    """
    named = latest(folder)
    others = [path for path in folder.glob("step_*") if step_of(path) >= 0 and path != named]
    others.sort(key=step_of, reverse=True)
    if not named and not others:
        if trained > every or (folder / "latest").exists():
            raise CheckpointError(
                f"{folder}: expected a checkpoint, as metrics.jsonl records {trained} steps and "
                f"one is written every {every}; got none. Choose another --out to start afresh"
            )
        if trained:
            say(f"{folder}: no checkpoint yet, the run starts again from step 0")
        return None
    if not named:
        say(f"{folder / 'latest'}: expected the name of a checkpoint, got none: looks for one")
    damage = []
    for checkpoint in filter(None, (named, *others)):
        try:
            verify(checkpoint)
        except TrainError as error:
            damage.append(str(error))
            continue
        for line in damage:
            say(f"damaged checkpoint: {line}")
        if damage or not named:
            say(f"goes on from {checkpoint}")
        return checkpoint
    raise CheckpointError(
        "expected an intact checkpoint, got damaged ones only:\n  "
        + "\n  ".join(damage)
        + "\nchoose another --out to start afresh"
    )


def require_same(checkpoint: Path, identity: dict[str, Any]) -> None:
    """Refuses a checkpoint of another model, recipe, schedule or data, naming what differs."""
    there = bound(read_meta(checkpoint)["identity"])
    found = differences(there, json.loads(json.dumps(identity)))
    if found:
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of another job:\n  "
            + "\n  ".join(found)
            + "\nexpected the same values to go on from it; choose another --out to start afresh"
        )


def save(folder: Path, step: int, state: dict[str, Any], meta: dict[str, Any]) -> None:
    """Writes the checkpoint of one step (see the file's head); on failure nothing is lost."""
    fresh, final = folder / ".writing", folder / f"step_{step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        with quiet_dcp():
            dcp.save(state, storage_writer=FileSystemWriter(fresh), no_dist=True)
        write_json(fresh / "state.json", {"step": step, **meta})
        manifest.write(fresh)
        if final.exists():  # written by a killed run that did not get to step 3
            shutil.rmtree(final)
        fresh.rename(final)
        sync_folder(folder)
        write_text(folder / "latest", final.name + "\n")
    except (OSError, RuntimeError, CheckpointException, TrainError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        before = latest(folder)
        previous = f"{before} is intact" if before else "there is no earlier one"
        raise CheckpointError(
            f"cannot write the checkpoint of step {step} in {folder}: {reason(error)}; {previous}. "
            "With that mended, --resume goes on"
        ) from error
    prune(folder, KEEP)


def load(checkpoint: Path, state: dict[str, Any]) -> None:
    """Fills `state`, a template with the right keys and shapes, in place."""
    with quiet_dcp():
        dcp.load(state, storage_reader=FileSystemReader(checkpoint), no_dist=True)


@contextmanager
def named_in_errors(checkpoint: Path) -> Iterator[None]:
    """Turns every failure to load a checkpoint into a CheckpointError with its name.

    Unpickling and torch's loaders raise any type: a checkpoint without checksums can hold anything.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        lost_rank = isinstance(error, RuntimeError) and is_of_a_collective(error)
        if lost_rank or isinstance(error, TrainError):
            raise
        raise CheckpointError(f"{checkpoint}: cannot load it: {reason(error)}") from error


def prune(folder: Path, keep: int) -> None:
    """Removes all but the `keep` newest checkpoints, counted back from the one of `latest`.

    A later one than `latest` names was passed over as damaged: it goes too.
    """
    newest = latest(folder)
    if newest is None:
        return
    steps = sorted((p for p in folder.glob("step_*") if step_of(p) >= 0), key=step_of)
    end = steps.index(newest) + 1
    for path in (*steps[: max(end - keep, 0)], *steps[end:]):
        shutil.rmtree(path, ignore_errors=True)


def save_weights(path: Path, model: torch.nn.Module, meta: dict[str, Any]) -> None:
    """Writes the trained weights {"model": state dict, ...}; equal values have equal bytes."""
    content = {"model": {k: whole(v).cpu() for k, v in model.state_dict().items()}, **meta}
    write_atomically(path, lambda file: torch.save(content, file))


def reason(error: BaseException) -> str:
    """Returns the system's message (No space left on device), also of a wrapped error."""
    cause: BaseException | None = error
    seen: list[BaseException] = []
    while cause is not None and cause not in seen:
        if isinstance(cause, CheckpointException):
            return "; ".join(reason(failure[0]) for failure in cause.failures.values())
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
        seen.append(cause)
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:300] or type(error).__name__


class quiet_dcp:  # noqa: N801, a context manager
    """A context without the warning of torch's planner that there is no process group."""

    def __enter__(self) -> None:
        self.warnings = warnings.catch_warnings()
        self.warnings.__enter__()
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        self.logger = logging.getLogger("torch.distributed.checkpoint")
        self.level = self.logger.level
        self.logger.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self.logger.setLevel(self.level)
        self.warnings.__exit__(None, None, None)
