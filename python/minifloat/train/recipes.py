"""The runs of a job: names, recipes, policies and seeds, from the command line.

    --recipes bf16,mxfp8,"nvfp4 keep=nvfp4_paper"
    --recipe  "nvfp4_mlp=layers.*.feed_forward.*: nvfp4; layers.*.attention.*: mxfp8"
    entry   = [ NAME "=" ] TEXT [ " keep=" POLICY ] [ "@" SEED ]

TEXT is a preset (`nvfp4`), a recipe written out (`fprop=... dgrad=... wgrad=...`) or a map of
module names (`*: nvfp4; layers.0.*: bf16`). POLICY says what stays in high precision; without it
that is mf.quantize_'s default (nn/convert/filters.py). `@SEED` starts the same recipe from other
initial weights and draws other batches: the difference of the two runs is the noise of the
comparison.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from ..nn.convert.filters import DEFAULT_KEEP, KEEPS, Keep
from .checks import SEED, TEXT, Settings, TrainError, kind, require, setting, shown

# A comma separates entries unless it belongs to a product: `...*e4m3/tensor,fast dgrad=...`.
SEPARATOR = re.compile(r",(?!\s*fast(?![\w=]))")
NAME = re.compile(r"\s*([A-Za-z_][\w.+-]*)\s*=(.*)", re.DOTALL)
POLICY = re.compile(r"(.*\S) keep=(\S*)")
PRODUCTS = ("fprop", "dgrad", "wgrad")
POLICIES = kind(f"one of {', '.join(KEEPS)}", lambda value: value in KEEPS)
LONGEST_FOLDER = 255  # bytes that file systems take


@dataclass(frozen=True)
class RunSpec(Settings):
    """One run of the job: its name in every table and file, its recipe, its seed, its policy."""

    name: str = setting("", TEXT)
    recipe: str = setting("", TEXT)  # or a map: "*: nvfp4; layers.3.*: bf16"
    seed: int = setting(0, SEED)
    keep: Keep = setting(DEFAULT_KEEP, POLICIES)  # noqa: RUF009, a text

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.folder in ("", ".", "..") or len(self.folder.encode()) > LONGEST_FOLDER:
            raise TrainError(
                f"--recipes: expected a name of 1 to {LONGEST_FOLDER} bytes that a folder can "
                f"have, got {shown(self.name)}; write NAME=TEXT to choose one"
            )

    @property
    def converts(self) -> bool:
        return self.recipe != "bf16"

    @property
    def folder(self) -> str:
        """The name as a folder: bf16 (seed 2) becomes bf16_seed_2."""
        return re.sub(r"[^\w.+-]+", "_", self.name).strip("_")


def parse_entry(entry: str, seed: int) -> RunSpec:
    """Parses `[NAME=]TEXT[ keep=POLICY][@SEED]`; without @SEED the run has the job's seed."""
    text, name, run_seed = re.sub(r"\s+", " ", entry).strip(), "", seed
    if not text.isprintable():
        raise TrainError(f"--recipes: expected printable text, got {shown(text)}")
    if (match := NAME.fullmatch(text)) and match[1] not in PRODUCTS:
        name, text = match[1], match[2].strip()
    if "@" in text:
        text, _, after = text.rpartition("@")
        found = SEED.read(after.strip())
        require(f"--recipes: {shown(entry)}: after @", SEED, found)
        run_seed, text = int(found), text.strip()
    keep = DEFAULT_KEEP
    if match := POLICY.fullmatch(text):
        text, keep = match[1], cast(Keep, match[2])
        require(f"--recipes: {shown(entry)}: after keep=", POLICIES, keep)
    if not text:
        raise TrainError(f"--recipes: expected [NAME=]TEXT[ keep=POLICY][@SEED], got {entry!r}")
    if not name:
        name = text if keep == DEFAULT_KEEP else f"{text} (keep {keep})"
    if run_seed != seed:
        name += f" (seed {run_seed})"
    return RunSpec(name, text, run_seed, keep)


def parse_recipes(lists: Iterable[str], entries: Iterable[str], seed: int) -> tuple[RunSpec, ...]:
    """Parses the runs of `--recipes` (comma-separated) and of `--recipe` (an entry each)."""
    texts = [text for joined in lists for text in SEPARATOR.split(joined)]
    runs = tuple(parse_entry(text, seed) for text in [*texts, *entries])
    if not runs:
        raise TrainError("--recipes: expected at least one recipe, got none")
    seen: dict[str, RunSpec] = {}
    for run in runs:
        other = seen.setdefault(run.folder, run)
        if other is not run:
            raise TrainError(
                f"--recipes: expected different names, got {other.name!r} twice; "
                "write NAME=TEXT to tell them apart"
            )
    return runs
