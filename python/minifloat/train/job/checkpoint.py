"""Checkpoints and metrics.jsonl, and what else --resume reads in a job's folder.

OUT/job.json, metrics.jsonl, runs/RUN/result.json    read_job
OUT/tensorboard/RUN/                                 event files of the metrics
OUT/runs/RUN/checkpoints/                            find_starts
    .writing/        a checkpoint that is being written: never read
    step_00000100/   state.pt (torch.save), state.json, SHA256SUMS (durable_files.py)

A checkpoint stays complete after a kill at any moment or on a full disk:

1. write everything into .writing, each file synced, the checksums last
2. rename .writing to step_N, sync the folder
3. only now remove older checkpoints

All bytes of a checkpoint are verified before they are loaded. A damaged file of the job raises one
TrainError with the file, the expected and the actual content.

metrics.jsonl has a record for each step and evaluation:
    {"run": "nvfp4", "kind": "train", "step": 7, "loss": .., "lr": .., "grad_norm": .., timings}
    {"run": "nvfp4", "kind": "eval", "step": 50, "val_loss": .., timings}
Of a model with experts the training records have "expert_load" and "dropped_rows" too, and the last
steps a record of the tokens of each expert:
    {"run": "nvfp4", "kind": "experts", "step": 300, "tokens": {"layers.1.moe": [401, 398, ..], ..}}
With --inspect-every a record of each look has the inspector's numbers, by metric and layer:
    {"run": "nvfp4", "kind": "inspect", "step": 100, "snr_db/x.fprop/output": 20.4, ..}
All bytes except the timings are the same, however often the job was killed and resumed.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .. import checks
from ..checks import Fields, Json, TrainError, load_json, parse_json, read_text, require_fields, say
from ..config import RunSpec, TrainConfig, differences, refuse
from ..durable_files import (
    sync_folder,
    verify_checksums,
    write_atomically,
    write_checksums,
    write_json,
    write_text,
)
from ..model.measure import TOKENS

KEEP = 2  # complete checkpoints, the newest among them
STATE: Fields = {
    "step": checks.COUNT,
    "identity": checks.OBJECT,
    "peak_bytes": checks.COUNT,
    "torch": checks.TEXT,
}
JOB: Fields = {"config": checks.OBJECT, "runs": checks.LIST, "tokens": checks.TEXT}
RESULT: Fields = {
    "status": checks.TEXT,
    **dict.fromkeys(("step", "converted", "peak"), checks.COUNT),
    **dict.fromkeys(("saved_total", "saved_linears"), checks.MEASURED),
}
FILE = "metrics.jsonl"
TIMINGS = ("tokens_per_s", "speed_of_light", "step_ms", "seconds")
RECORD: Fields = {"run": checks.TEXT, "kind": checks.TEXT, "step": checks.COUNT}
RECORDS: dict[str, Fields] = {  # fields of each kind that the report reads
    "train": {
        "loss": checks.MEASURED,
        **{name: checks.FINITE for name in TIMINGS if name != "seconds"},
    },
    "eval": {"val_loss": checks.MEASURED},
    "experts": {"tokens": TOKENS},
    "inspect": {"seconds": checks.FINITE},
}


def step_of(checkpoint: Path) -> int:
    """Returns the step in a checkpoint's name."""
    return int(checkpoint.name.removeprefix("step_"))


def checkpoints_in(folder: Path) -> list[Path]:
    """Returns a run's checkpoints, the newest first. Each is complete, but may be damaged."""
    found = (path for path in folder.glob("step_*") if path.name[5:].isdecimal())
    return sorted(found, key=step_of, reverse=True)


def read_meta(checkpoint: Path) -> Json:
    """Returns state.json: step, identity and measurements of the run."""
    return load_json(checkpoint / "state.json", STATE)


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
    damage = []
    for checkpoint in checkpoints_in(folder):
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
    if damage or trained > every:
        raise TrainError(
            f"{folder}: expected a checkpoint, as metrics.jsonl records {trained} steps and one is "
            f"written every {every}; got {'damaged ones only' if damage else 'none'}\n  "
            + "\n  ".join([*damage, "choose another --out to start afresh"])
        )
    if trained:
        say(f"{folder}: no checkpoint yet, the run starts again from step 0")
    return None


def save(folder: Path, step: int, state: Json, meta: Json) -> None:
    """Writes the checkpoint of one step (see the file's head); on failure nothing is lost."""
    fresh, final = folder / ".writing", folder / f"step_{step:08d}"
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        write_atomically(fresh / "state.pt", lambda file: torch.save(state, file))
        write_json(fresh / "state.json", {"step": step, **meta})
        write_checksums(fresh)
        shutil.rmtree(final, ignore_errors=True)  # passed over as damaged
        fresh.rename(final)
        sync_folder(folder)
    except (OSError, RuntimeError, TrainError) as error:
        shutil.rmtree(fresh, ignore_errors=True)
        before = [path for path in checkpoints_in(folder) if step_of(path) < step]
        previous = f"{before[0]} is intact" if before else "there is no earlier one"
        raise TrainError(
            f"cannot write the checkpoint of step {step} in {folder}: {reason(error)}; {previous}. "
            "With that mended, --resume goes on"
        ) from error
    prune(folder, step, KEEP)


def prune(folder: Path, step: int, keep: int) -> None:
    """Removes all but the `keep` newest checkpoints up to `step`.

    A later one was passed over as damaged: it goes too.
    """
    checkpoints = checkpoints_in(folder)
    kept = [path for path in checkpoints if step_of(path) <= step][:keep]
    for path in set(checkpoints) - set(kept):
        shutil.rmtree(path, ignore_errors=True)


def reason(error: BaseException) -> str:
    """Returns the system's message (No space left on device), also of a wrapped error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno)
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(error).split())[:300] or type(error).__name__


# ---- metrics.jsonl -------------------------------------------------------------------------------


def read_records(path: Path) -> list[Json]:
    """Returns the records of a metrics file; TrainError names the file and the line that is none.

    A kill or a full disk may leave an incomplete last line. It is left out, and a resumed run
    writes its step again.
    """
    if not path.exists():
        return []
    records = []
    *lines, _ = read_text(path).split("\n")  # without what follows the last newline
    for number, line in enumerate(lines, 1):
        record = parse_json(f"{path}, line {number}", line, RECORD)
        require_fields(f"{path}, line {number}", RECORDS.get(record["kind"], {}), record)
        records.append(record)
    return records


class Metrics:
    """The writer of one run's records. It drops those of the run that are later than `step`.

    Args:
        out: the job's folder.
        run: the run's name.
        folder: of the run's event files.
        step: that the run goes on from.
    """

    def __init__(self, out: Path, run: str, folder: str, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path, self.run = out / FILE, run
        records = [r for r in read_records(self.path) if r["run"] != run or r["step"] <= step]
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in records))
        self.file = self.path.open("a")
        self.board: Any = SummaryWriter(str(out / "tensorboard" / folder), purge_step=step + 1)

    def write(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Writes a record, and TensorBoard's events of the numbers in it.

        Numbers that are not finite become null, since JSON has no NaN.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {k: v for k, v in values.items() if isinstance(v, float)}
        finite = {k: v if math.isfinite(v) else None for k, v in numbers.items()}
        record = {"run": self.run, "kind": kind, "step": step, **values, **finite}
        try:
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
            # One event for all: add_scalar takes 40 µs for each of a look's thousands.
            named = [{"tag": f"{kind}/{key}", "simple_value": n} for key, n in numbers.items()]
            self.board.file_writer.add_summary(Summary(value=named), step)
        except OSError as error:
            raise TrainError(
                f"cannot write {self.path} and tensorboard beside it: {error.strerror or error}"
            ) from error

    def sync(self) -> None:
        """Makes the written records survive a power cut. A checkpoint relies on them."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        for writer in (self.file, self.board):
            with contextlib.suppress(OSError):  # a full disk: write() has said so
                writer.close()


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
    records = [r for r in read_records(out / FILE) if r["kind"] == "train"]
    trained = {run.name: {r["step"] for r in records if r["run"] == run.name} for run in runs}
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


def identity_of(run: RunSpec, config: TrainConfig, tokens: str) -> Json:
    """Returns the fields that a checkpoint and the job that resumes from it must share."""
    own = {"recipe": run.recipe, "then": run.then, "seed": run.seed}
    return {**config.identity(), **own, "tokens": tokens}


def find_starts(out: Path, saved: SavedJob, config: TrainConfig, tokens: str) -> dict[str, Path]:
    """Returns the verified checkpoint that each run goes on from, by the run's name.

    Args:
        out: the job's folder.
        saved: what `read_job` found there.
        config: of the job that resumes.
        tokens: the fingerprint of its token ids.
    Raises:
        TrainError: the text has changed, all checkpoints of a run are damaged, or one is another
            job's.
    """
    if saved.tokens != tokens:
        raise TrainError(
            f"{out}: the text has changed: expected tokens {saved.tokens[:16]}..., "
            f"got {tokens[:16]}...; choose another --out to start afresh"
        )
    starts = {}
    for run in saved.runs:
        trained, folder = saved.trained[run.name], folder_of(out, run) / "checkpoints"
        if run.name in saved.results or not (
            found := choose(folder, max(trained, default=0), config.checkpoint_every)
        ):
            continue
        there, here = read_meta(found)["identity"], identity_of(run, config, tokens)
        refuse(f"{found} is a checkpoint of another job", differences(there, here))
        starts[run.name] = found
        step = step_of(found)
        if lost := step - sum(s <= step for s in trained):
            say(
                f"{out / FILE}: expected all steps of {run.name} before its checkpoint, "
                f"got none of {lost}: the report goes without them"
            )
    return starts
