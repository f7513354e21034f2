"""Checkpoints, and what else --resume reads in a job's folder. Each file is checked first.

OUT/job.json, metrics.jsonl, runs/RUN/result.json    read_job
OUT/runs/RUN/checkpoints/                            find_starts
    .writing/        a checkpoint that is being written: never read
    step_00000100/   state.pt (torch.save), state.json, SHA256SUMS (durable_files.py)

A checkpoint stays complete after a kill at any moment or on a full disk:

1. write everything into .writing, each file synced, the checksums last
2. rename .writing to step_N, sync the folder
3. only now remove older checkpoints

All bytes of a checkpoint are verified before they are loaded. A damaged file of the job raises one
TrainError with the file, the expected and the actual content.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..checks import COUNT, LIST, MEASURED, OBJECT, TEXT, Fields, Json, TrainError, load_json, say
from ..config import TrainConfig, differences, refuse
from ..durable_files import (
    sync_folder,
    verify_checksums,
    write_atomically,
    write_checksums,
    write_json,
)
from ..recipes import RunSpec
from .metrics import FILE, read_records
from .processes import is_of_a_collective, whole

KEEP = 2  # complete checkpoints, the newest among them
STEP = re.compile(r"step_([0-9]{8,18})")
STATE: Fields = {"step": COUNT, "identity": OBJECT, "peak_bytes": COUNT, "torch": TEXT}
JOB: Fields = {"config": OBJECT, "runs": LIST, "tokens": TEXT}
RESULT: Fields = {
    "status": TEXT,
    "step": COUNT,
    "converted": COUNT,
    "saved_total": MEASURED,
    "saved_linears": MEASURED,
    "peak": COUNT,
}


# ---- Checkpoints ---------------------------------------------------------------------------------


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


# ---- The job -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedJob:
    """An earlier job: its settings, and the records of its runs."""

    config: TrainConfig
    runs: tuple[RunSpec, ...]
    tokens: str  # fingerprint of the token ids
    results: dict[str, Json]  # result.json of the runs that have ended, by name
    trained: dict[str, set[int]]  # steps that metrics.jsonl records, by the run's name


def folder_of(out: Path, run: RunSpec) -> Path:
    """Returns the folder of a run's files, checkpoints among them."""
    return out / "runs" / run.folder


def results_in(out: Path) -> Path | None:
    """Returns a file or folder that a job has left in `out`, None if there is none."""
    found = (out / "job.json", out / FILE, *out.glob("runs/*/*"))
    return next((path for path in found if path.exists()), None)


def read_job(out: Path) -> SavedJob | None:
    """Returns the job that `out` holds, None if it holds none.

    Raises:
        TrainError: a file is damaged, or job.json is lost.
    """
    path = out / "job.json"
    if not path.exists():
        if found := results_in(out):
            raise TrainError(f"{path}: expected the job of {found}, got no such file")
        return None
    saved = load_json(path, JOB)
    config = TrainConfig.from_json(f"{path}: config", saved["config"])
    runs = tuple(RunSpec.from_json(f"{path}: runs", run) for run in saved["runs"])
    files = {run.name: folder_of(out, run) / "result.json" for run in runs}
    results = {name: load_json(file, RESULT) for name, file in files.items() if file.exists()}
    trained: dict[str, set[int]] = {run.name: set() for run in runs}
    for record in read_records(out / FILE):
        if record["kind"] == "train":
            trained.setdefault(record["run"], set()).add(record["step"])
    return SavedJob(config, runs, saved["tokens"], results, trained)


def require_same_job(
    out: Path, saved: SavedJob, config: TrainConfig, runs: Sequence[RunSpec]
) -> tuple[RunSpec, ...]:
    """Refuses to resume a job that differs; returns its runs with any new ones after them."""
    found = differences(saved.config.identity(), config.identity())
    there = {run.name: run for run in saved.runs}
    for run in runs:
        before = there.get(run.name, run)
        found += differences(asdict(before), asdict(run), f"{run.name}.")
    refuse(f"{out} holds another job", found)
    return (*saved.runs, *(run for run in runs if run.name not in there))


def require_same_tokens(out: Path, saved: SavedJob, tokens: str) -> None:
    """Refuses to resume a job on other text."""
    if saved.tokens != tokens:
        raise TrainError(
            f"{out}: the text has changed: expected tokens {saved.tokens[:16]}..., "
            f"got {tokens[:16]}...; choose another --out to start afresh"
        )


def find_starts(out: Path, saved: SavedJob, identities: dict[str, Json]) -> dict[str, Path]:
    """Returns the verified checkpoint that each run goes on from, by the run's name.

    Args:
        out: the job's folder.
        saved: what `read_job` found there.
        identities: by the name of each run, what its checkpoint must have in common with the job.
    Raises:
        TrainError: all checkpoints of a run are damaged, or one is another job's.
    """
    starts = {}
    for run in saved.runs:
        if run.name in saved.results:
            continue
        trained = saved.trained[run.name]
        folder, every = folder_of(out, run) / "checkpoints", saved.config.checkpoint_every
        found = choose(folder, max(trained, default=0), every)
        if found is None:
            continue
        there = read_meta(found)["identity"]
        refuse(f"{found} is a checkpoint of another job", differences(there, identities[run.name]))
        starts[run.name] = found
        step = step_of(found)
        lost = step - sum(s <= step for s in trained)
        if lost:
            say(
                f"{out / FILE}: expected all steps of {run.name} before its checkpoint, "
                f"got none of {lost}: the report goes without them"
            )
    return starts
