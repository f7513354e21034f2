"""The runs of a job: names, recipe maps and seeds, from the command line.

    --recipes bf16,nvfp4,"fprop=e4m3/tensor*e4m3/tensor,fast dgrad=... wgrad=..."
    --recipe  nvfp4_all="*: nvfp4; output: bf16"
    entry   = [ NAME "=" ] TEXT [ "@" SEED ]

TEXT is a preset (`nvfp4`), a recipe written out (`fprop=... dgrad=... wgrad=...`) or a map of
module names (`*: nvfp4; output: bf16`). `@SEED` starts the same recipe from other initial weights
and draws other batches: the difference of the two runs is the noise of the comparison.

The policy that converts a text to a recipe map:
    bf16            no layer
    FP4 preset      every linear except the head (`output`) and the last block, as in published runs
    other preset    every linear except the head
    written out     every linear except the head
    map             the layers that the map names
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from ..recipe import Recipe, presets
from .fields import SEED, TEXT, TrainError, require, require_fields, shown

POLICY = (
    "The head (`output`) stays bf16 under every recipe; FP4 presets given by name keep the last "
    "block in bf16 too, as published runs do. A recipe map is taken as it is written."
)

# A comma separates entries unless it belongs to a product: `...*e4m3/tensor,fast dgrad=...`.
SEPARATOR = re.compile(r",(?!\s*fast(?![\w=]))")
NAME = re.compile(r"\s*([A-Za-z_][\w.+-]*)\s*=(.*)", re.DOTALL)
PRODUCTS = ("fprop", "dgrad", "wgrad")
LONGEST_FOLDER = 255  # bytes that file systems take
# Presets that have changed, as they were when job.json did not have the formats of its runs.
FORMER_PRESETS = {
    "nvfp4_pow2": "fprop=nvfp4+pow2*nvfp4/16x16+pow2 dgrad=nvfp4+pow2+sr*nvfp4/16x16+pow2 "
    "wgrad=nvfp4+pow2+sr+rht*nvfp4+pow2+rht"
}


def present_formats(text: str) -> str:
    """Returns a preset written out; another text as it is."""
    if text not in presets() or text == "bf16":
        return text
    recipe = Recipe(text)
    return " ".join(f"{name}={getattr(recipe, name)}" for name in PRODUCTS)


def former_formats(text: str) -> str:
    """Returns what a text of a job.json without formats stands for."""
    return FORMER_PRESETS.get(text) or present_formats(text)


def written_out(recipe_map: str, formats_of: Callable[[str], str] = present_formats) -> str:
    """Returns a recipe map with formats in the place of presets' names."""
    entries = (entry.rpartition(":") for entry in recipe_map.split(";"))
    return "; ".join(
        f"{glob.strip()}{colon} {formats_of(text.strip())}".strip() for glob, colon, text in entries
    )


@dataclass(frozen=True)
class RunSpec:
    """One run of the job: its name in every table and file, its recipe map, its seed."""

    name: str
    recipe: str  # "bf16", or a map: "*: nvfp4; output: bf16; layers.3.*: bf16"
    seed: int
    formats: str = ""  # the recipe written out, as it was when the job began; "": as it is now

    def __post_init__(self) -> None:
        if not self.formats:
            object.__setattr__(self, "formats", written_out(self.recipe))
        require(f"--recipes: the seed of {shown(self.name)}", SEED, self.seed)
        if self.folder in ("", ".", "..") or len(self.folder.encode()) > LONGEST_FOLDER:
            raise TrainError(
                f"--recipes: expected a name of 1 to {LONGEST_FOLDER} bytes that a folder can "
                f"have, got {shown(self.name)}; write NAME=TEXT to choose one"
            )

    @classmethod
    def from_json(cls, where: str, values: Any) -> RunSpec:
        """Returns the run that job.json describes; TrainError starts with `where`."""
        require_fields(where, {"name": TEXT, "recipe": TEXT, "seed": SEED}, values)
        formats = values.get("formats") or written_out(values["recipe"], former_formats)
        require(f"{where}: formats", TEXT, formats)
        try:
            return cls(values["name"], values["recipe"], values["seed"], formats)
        except TrainError as error:
            raise TrainError(f"{where}: {error}") from error

    @property
    def converts(self) -> bool:
        return self.recipe != "bf16"

    @property
    def trained_recipe(self) -> str:
        """The recipe map to train under: written out where a preset has changed since."""
        return self.recipe if self.formats == written_out(self.recipe) else self.formats

    @property
    def folder(self) -> str:
        """The name as a folder: bf16 (seed 2) becomes bf16_seed_2."""
        return re.sub(r"[^\w.+-]+", "_", self.name).strip("_")


def default_map(text: str, layers: int) -> str:
    """Returns the recipe map of a text, by the policy above."""
    if text == "bf16" or ":" in text:
        return text
    is_preset = "=" not in text
    recipe_map = f"*: {text}; output: bf16"
    if is_preset and "fp4" in text:
        recipe_map += f"; layers.{layers - 1}.*: bf16"
    return recipe_map


def parse_entry(entry: str, layers: int, seed: int) -> RunSpec:
    """Parses `[NAME=]TEXT[@SEED]`; without @SEED the run has the job's seed."""
    text, name, run_seed = re.sub(r"\s+", " ", entry).strip(), "", seed
    if not text.isprintable():
        raise TrainError(f"--recipes: expected printable text, got {shown(text)}")
    if (match := NAME.fullmatch(text)) and match[1] not in PRODUCTS:
        name, text = match[1], match[2].strip()
    if "@" in text:
        text, _, after = text.rpartition("@")
        number = SEED.parse(after.strip())
        require(f"--recipes: {shown(entry)}: after @", SEED, after if number is None else number)
        run_seed = int(number or 0)
        text = text.strip()
    if not text:
        raise TrainError(f"--recipes: expected [NAME=]TEXT[@SEED], got {entry!r}")
    name = name or text
    if run_seed != seed:
        name += f" (seed {run_seed})"
    return RunSpec(name, default_map(text, layers), run_seed)


def parse_recipes(
    lists: Iterable[str], entries: Iterable[str], layers: int, seed: int
) -> tuple[RunSpec, ...]:
    """Parses the runs of `--recipes` (comma-separated) and of `--recipe` (an entry each)."""
    texts = [text for joined in lists for text in SEPARATOR.split(joined)]
    runs = tuple(parse_entry(text, layers, seed) for text in [*texts, *entries])
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
