"""metrics.jsonl and TensorBoard's event files: a record for each step and evaluation.

    {"run": "nvfp4", "kind": "train", "step": 7, "loss": .., "lr": .., "grad_norm": .., timings}
    {"run": "nvfp4", "kind": "eval", "step": 50, "val_loss": .., timings}

Of a model with experts the training records have "expert_load" and "dropped_rows" too, and the last
steps a record of the tokens of each expert:
    {"run": "nvfp4", "kind": "experts", "step": 300, "tokens": {"layers.1.moe": [401, 398, ..], ..}}

All bytes except the timings are the same, however often the job was killed and resumed. A run that
resumes from step s drops its records after s, and an incomplete last line.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

from ..checks import (
    FINITE,
    MEASURED,
    STEP,
    TEXT,
    Fields,
    Json,
    TrainError,
    parse_json,
    read_text,
    require_fields,
)
from ..durable_files import write_text
from ..model.measure import TOKENS

FILE = "metrics.jsonl"
TIMINGS = ("tokens_per_s", "speed_of_light", "step_ms", "seconds")
RECORD: Fields = {"run": TEXT, "kind": TEXT, "step": STEP}
RECORDS: dict[str, Fields] = {  # fields of each kind that the report reads
    "train": {"loss": MEASURED, **{name: FINITE for name in TIMINGS if name != "seconds"}},
    "eval": {"val_loss": MEASURED},
    "experts": {"tokens": TOKENS},
}


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

        self.path, self.events, self.run = out / FILE, out / "tensorboard", run
        records = [r for r in read_records(self.path) if r["run"] != run or r["step"] <= step]
        write_text(self.path, "".join(json.dumps(record) + "\n" for record in records))
        self.file = self.path.open("a")
        self.board = SummaryWriter(str(self.events / folder), purge_step=step + 1)

    def write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Writes a record. Values that are not finite become null, since JSON has no NaN."""
        self.append(kind, step, {k: v if math.isfinite(v) else None for k, v in values.items()})
        try:
            for key, value in values.items():
                self.board.add_scalar(f"{kind}/{key}", value, step)
        except OSError as error:
            raise TrainError(f"cannot write {self.events}: {error.strerror or error}") from error

    def append(self, kind: str, step: int, fields: Json) -> None:
        """Writes a record to metrics.jsonl alone."""
        try:
            record = {"run": self.run, "kind": kind, "step": step, **fields}
            self.file.write(json.dumps(record) + "\n")
            self.file.flush()
        except OSError as error:
            raise TrainError(f"cannot write {self.path}: {error.strerror or error}") from error

    def sync(self) -> None:
        """Makes the written records survive a power cut. A checkpoint relies on them."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        for writer in (self.file, self.board):
            with contextlib.suppress(OSError):  # a full disk: write() has said so
                writer.close()
