"""Checkpoints, which stay complete after a kill at any moment or on a full disk.

FOLDER/.writing/        a checkpoint that is being written: never read
FOLDER/step_00000100/   state.pt (torch.save), state.json, SHA256SUMS (durable_files.py)

1. write everything into .writing, each file synced, the checksums last
2. rename .writing to step_N, sync the folder
3. only now remove older checkpoints

`choose` finds the checkpoint that a job resumes from. It verifies all bytes before they are loaded.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from ..checks import COUNT, OBJECT, TEXT, Fields, Json, TrainError, load_json, say
from ..durable_files import (
    sync_folder,
    verify_checksums,
    write_atomically,
    write_checksums,
    write_json,
)
from .processes import is_of_a_collective
from .sharding import whole

KEEP = 2  # complete checkpoints, the newest among them
STEP = re.compile(r"step_([0-9]{8,18})")
STATE: Fields = {"step": COUNT, "identity": OBJECT, "peak_bytes": COUNT, "torch": TEXT}


def step_of(checkpoint: Path) -> int:
    """Returns the step in a checkpoint's name, -1 for another name."""
    match = STEP.fullmatch(checkpoint.name)
    return int(match[1]) if match else -1


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns a run's checkpoints, the newest first. Each is complete, but may be damaged."""
    found = (path for path in folder.glob("step_*") if step_of(path) >= 0)
    return sorted(found, key=step_of, reverse=True)


def read_meta(checkpoint: Path) -> Json:
    """Returns state.json: step, identity and measurements of the run."""
    meta = load_json(checkpoint / "state.json", STATE)
    if meta["step"] != step_of(checkpoint):
        raise TrainError(
            f"{checkpoint / 'state.json'}: expected the step of its folder's name, "
            f"got {meta['step']}"
        )
    return meta


def choose(folder: Path, trained: int, every: int) -> Path | None:
    """Returns the newest intact checkpoint of a run, None if the run has none yet.

    Prints a line about each checkpoint that is passed over, and why.

    Args:
        folder: of the run's checkpoints.
        trained: last step of the run that metrics.jsonl records.
        every: steps between checkpoints.
    Raises:
        TrainError: all checkpoints are damaged, or are lost.
    """
    checkpoints, damage = checkpoints_in(folder), []
    if not checkpoints and trained > every:
        raise TrainError(
            f"{folder}: expected a checkpoint, as metrics.jsonl records {trained} steps and "
            f"one is written every {every}; got none. Choose another --out to start afresh"
        )
    for checkpoint in checkpoints:
        try:
            verify_checksums(checkpoint)
            read_meta(checkpoint)
        except TrainError as error:
            damage.append(str(error))
            continue
        for line in damage:
            say(f"damaged checkpoint: {line}")
        if damage:
            say(f"goes on from {checkpoint}")
        return checkpoint
    if damage:
        raise TrainError(
            "expected an intact checkpoint, got damaged ones only:\n  "
            + "\n  ".join(damage)
            + "\nchoose another --out to start afresh"
        )
    if trained:
        say(f"{folder}: no checkpoint yet, the run starts again from step 0")
    return None


def save(folder: Path, step: int, state: Json, meta: Json) -> None:
    """Writes the checkpoint of one step (see the file's head); on failure nothing is lost."""
    fresh, final = folder / ".writing", folder / f"step_{step:08d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        write_atomically(fresh / "state.pt", lambda file: torch.save(state, file))
        write_json(fresh / "state.json", {"step": step, **meta})
        write_checksums(fresh)
        if final.exists():  # passed over as damaged
            shutil.rmtree(final)
        fresh.rename(final)
        sync_folder(folder)
    except (OSError, RuntimeError, TrainError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        before = next((path for path in checkpoints_in(folder) if step_of(path) < step), None)
        previous = f"{before} is intact" if before else "there is no earlier one"
        raise TrainError(
            f"cannot write the checkpoint of step {step} in {folder}: {reason(error)}; {previous}. "
            "With that mended, --resume goes on"
        ) from error
    prune(folder, step, KEEP)


def load(checkpoint: Path, set_state: Callable[[Json], None]) -> None:
    """Calls `set_state` with the state of a verified checkpoint, on the CPU.

    Raises:
        TrainError: the state cannot be loaded or set. torch's loaders raise any type.
    """
    try:
        set_state(torch.load(checkpoint / "state.pt", map_location="cpu", weights_only=True))
    except Exception as error:
        if is_of_a_collective(error):
            raise
        raise TrainError(f"{checkpoint}: cannot load it: {reason(error)}") from error


def prune(folder: Path, step: int, keep: int) -> None:
    """Removes all but the `keep` newest checkpoints up to `step`.

    A later one was passed over as damaged: it goes too.
    """
    checkpoints = checkpoints_in(folder)
    kept = [path for path in checkpoints if step_of(path) <= step][:keep]
    for path in checkpoints:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def save_weights(path: Path, model: torch.nn.Module, meta: Json) -> None:
    """Writes the trained weights {"model": state dict, ...}; equal values have equal bytes."""
    content = {"model": {k: whole(v).cpu() for k, v in model.state_dict().items()}, **meta}
    write_atomically(path, lambda file: torch.save(content, file))


def reason(error: BaseException) -> str:
    """Returns the system's message (No space left on device), also of a wrapped error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:300] or type(error).__name__
