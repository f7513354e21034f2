"""Files of an earlier job in its folder. Each file is checked before its first use.

    job = read_job(out)          job.json, metrics.jsonl, runs/*/result.json
    starts = find_starts(...)    runs/*/checkpoints: the one that each run resumes from

A damaged file raises one TrainError with the file, the expected and the actual content.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..checks import COUNT, LIST, MEASURED, OBJECT, TEXT, Fields, Json, TrainError, load_json, say
from ..config import TrainConfig, differences, refuse
from ..recipes import RunSpec
from . import checkpoint
from .metrics import FILE, read_records
from .run import folder_of

JOB: Fields = {"config": OBJECT, "runs": LIST, "tokens": TEXT}
RESULT: Fields = {
    "status": TEXT,
    "step": COUNT,
    "converted": COUNT,
    "saved_total": MEASURED,
    "saved_linears": MEASURED,
    "peak": COUNT,
}


@dataclass(frozen=True)
class SavedJob:
    """An earlier job: its settings, and the records of its runs."""

    config: TrainConfig
    runs: tuple[RunSpec, ...]
    tokens: str  # fingerprint of the token ids
    results: dict[str, Json]  # result.json of the runs that have ended, by name
    trained: dict[str, set[int]]  # steps that metrics.jsonl records, by the run's name


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
    """Refuses to resume a job that differs; returns its runs with any new ones after them.

    A run goes on in the formats with which it began, also where a preset has changed since.
    """
    found = differences(saved.config.identity(), config.identity())
    there = {run.name: run for run in saved.runs}
    for run in runs:
        before = there.get(run.name, run)
        asked = asdict(run) | {"formats": before.formats}
        found += [f"{run.name}.{line}" for line in differences(asdict(before), asked)]
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
        found = checkpoint.choose(folder, max(trained, default=0), every)
        if found is None:
            continue
        there = checkpoint.read_meta(found)["identity"]
        refuse(f"{found} is a checkpoint of another job", differences(there, identities[run.name]))
        starts[run.name] = found
        step = checkpoint.step_of(found)
        lost = step - sum(s <= step for s in trained)
        if lost:
            say(
                f"{out / FILE}: expected all steps of {run.name} before its checkpoint, "
                f"got none of {lost}: the report goes without them"
            )
    return starts
