"""Checkpoints that a kill at any moment, or a full disk, leaves whole.

FOLDER/.writing/        what is being written: never read
FOLDER/step_00000100/   torch.distributed.checkpoint's files and state.json
FOLDER/latest           the name of the newest complete one

1. write everything into .writing, each file synced
2. rename .writing to step_N, sync the folder
3. replace `latest`
4. only now remove older checkpoints
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from .config import TrainError, bound, differences
from .files import sync_folder, write_json, write_text
from .world import whole

KEEP = 2  # complete checkpoints, the newest among them


class CheckpointError(TrainError):
    """A checkpoint that cannot be written, read, or used for this job."""


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint, or None."""
    try:
        name = (folder / "latest").read_text().strip()
    except FileNotFoundError:
        return None
    return folder / name if name and (folder / name / "state.json").exists() else None


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """state.json: step, identity, and what the run had measured."""
    try:
        return json.loads((checkpoint / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}: cannot read state.json: {error}") from error


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
        if final.exists():  # written by a killed run that did not get to step 3
            shutil.rmtree(final)
        fresh.rename(final)
        sync_folder(folder)
        write_text(folder / "latest", final.name + "\n")
    except (OSError, RuntimeError, CheckpointException) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        before = latest(folder)
        kept = f"{before} is intact" if before else "there is no earlier one"
        raise CheckpointError(
            f"cannot write the checkpoint of step {step} in {folder}: {reason(error)}; {kept}. "
            "With that mended, --resume goes on"
        ) from error
    prune(folder, KEEP)


def load(checkpoint: Path, state: dict[str, Any]) -> None:
    """Fills `state`, a template with the right keys and shapes, in place."""
    try:
        with quiet_dcp():
            dcp.load(state, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    except (OSError, RuntimeError, ValueError, CheckpointException) as error:
        raise CheckpointError(f"{checkpoint}: cannot load it: {reason(error)}") from error


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` complete checkpoints; never the one `latest` names."""
    newest = latest(folder)
    steps = sorted(path for path in folder.glob("step_*") if path != newest)
    for path in steps[: max(len(steps) - (keep - 1), 0)]:
        shutil.rmtree(path, ignore_errors=True)


def save_weights(path: Path, model: torch.nn.Module, meta: dict[str, Any]) -> None:
    """The trained weights: {"model": state dict, ...}, the same bytes for the same values."""
    from .files import write_atomically

    content = {"model": {k: whole(v).cpu() for k, v in model.state_dict().items()}, **meta}
    write_atomically(path, lambda file: torch.save(content, file))


def reason(error: BaseException) -> str:
    """The system's own words (No space left on device), however deep they are wrapped."""
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
    """Keeps torch's planner from warning that it works without a process group, as it is meant."""

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
