"""The figures behind the tables and pictures of these pages: where each is read from.

    research/results/           the JSON that a benchmark wrote by --out, a file a run:
                                gpu_blocks_weights.json is a run of benchmarks/gpu_blocks.py, whose
                                options are in it
    research/parity/            the records of gpu_parity.py: losses, and the speed of that model
    research/parity/llama8b/    those of gpu_llama8b.py
    mf.engines                  what multiplies a recipe's products on a GPU

A speed is bf16's time over the recipe's, in the same run.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

RESEARCH = Path(__file__).resolve().parents[1]
ROOT = RESEARCH.parent
DOCS = ROOT / "docs"
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "benchmarks")]

import _parity_records as parity  # noqa: E402
import minifloat as mf  # noqa: E402

Row = dict[str, Any]
BF16 = "bf16"
HOPPER = (9, 0)
STEPS = ("gpu_blocks_fuse_weights", "gpu_blocks_weights")  # the first run that has a recipe counts


# ---- Runs ----------------------------------------------------------------------------------------
@cache
def read_run(name: str) -> dict[str, Any]:
    """Reads a run of research/results."""
    return json.loads((RESEARCH / "results" / f"{name}.json").read_text(encoding="utf-8"))


def rows_of(run: str, key: str = "rows", /, **where: Any) -> list[Row]:
    """Returns the rows of a run that have these values."""
    rows = read_run(run)[key]
    return [row for row in rows if all(row[field] == value for field, value in where.items())]


def name_of(row: Row) -> str:
    """Returns the recipe or peer of a row. torch's bf16 is bf16."""
    name = next(row[key] for key in ("name", "layer", "recipe") if key in row)
    return BF16 if name == "torch bf16" else name


def by_name(rows: list[Row], field: str = "speed") -> dict[str, float]:
    """Returns a field of each row by the name of its recipe."""
    return {name_of(row): row[field] for row in rows}


def steps_in(run: str) -> list[Row]:
    """Returns the rows of a run of gpu_blocks.py: bf16, which runs first and last, once."""
    rows = rows_of(run)
    base = [row for row in rows if row["name"].startswith(BF16)]
    others = [row for row in rows if row not in base]
    return [base[0] | {"ms": statistics.mean(row["ms"] for row in base), "speed": 1.0}, *others]


def step_of(name: str) -> Row:
    """Returns the row of a recipe or peer in the runs of a training step, or an empty one."""
    found = (row for run in STEPS for row in steps_in(run) if row["name"] == name)
    return next(found, {})


# ---- Loss ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Gap:
    """How far the validation loss is above a base's, in percent."""

    mean: float
    error: float | None  # the standard error of the mean; None of one seed
    seeds: int

    def __str__(self) -> str:
        text = f"{self.mean:+.2f}" + (f" ± {self.error:.2f}" if self.error is not None else "")
        few = {1: " (one seed)", 2: " (two seeds)"}.get(self.seeds, "")
        return f"{text}%{few}"


@cache
def records() -> list[parity.Record]:
    return parity.records_in([parity.RESULTS])


@cache
def gaps(base: str = BF16) -> dict[str, Gap]:
    """Returns the gap of each record's recipe to a base of the same seeds, after 3,000 steps."""
    found = parity.gaps_of(parity.losses_of(records(), "val"), base)
    return {
        name: Gap(statistics.mean(each), parity.standard_error(each), len(each))
        for name, each in found.items()
        if each
    }


@cache
def speeds_of_records() -> dict[str, float]:
    """Returns the speeds of the parity trial's runs, those on bf16's kind of GPU."""
    pairs = parity.runs_on_one_gpu(records())
    return {name: 1 / parity.relative_seconds(runs) for name, runs in pairs.items()}


@cache
def runs_of_llama8b() -> dict[str, Row]:
    """Returns a whole Llama3-8B's samples at bf16's largest batch, on the GPU of its record."""
    found = [parity.read_record(p) for p in sorted((parity.RESULTS / "llama8b").glob("*.xz"))]
    base = next(record for record in found if record["name"] == BF16)
    largest = max(base["samples"], key=lambda sample: sample["batch"])
    samples = {}
    for record in found:
        for sample in record["samples"]:
            keys = ("batch", "is_checkpointed")
            if record["device"] == base["device"] and all(sample[k] == largest[k] for k in keys):
                samples[record["name"]] = sample
    return samples


def speeds_of_llama8b() -> dict[str, float]:
    base = runs_of_llama8b()[BF16]["tokens_per_s"]
    return {name: run["tokens_per_s"] / base for name, run in runs_of_llama8b().items()}


# ---- Engines -------------------------------------------------------------------------------------
CPU = (0, 0)
GPUS = ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))


@cache
def is_native(recipe: str, capability: tuple[int, int]) -> bool:
    """Tells whether a GPU has GEMMs of a recipe's codes, for each product that has some."""
    engines = [e for e in mf.engines(recipe, capability) if e.specs != "bf16*bf16"]
    return all(engine.native for engine in engines)
