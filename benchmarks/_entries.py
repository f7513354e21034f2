"""Entries of --recipes: `[NAME=]TEXT[ keep=POLICY][ then=RECIPE]`.

TEXT is a preset, a recipe written out, or a map of module names; RECIPE that of the last steps.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, replace

from minifloat.nn.convert.filters import DEFAULT_KEEP, KEEPS, POLICY, Keep
from minifloat.recipe import RecipeMap

NAME = re.compile(r"\s*([A-Za-z_][\w.+-]*)\s*=(.*)", re.DOTALL)
THEN = " then="
PRODUCTS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class RunSpec:
    """A run: its name in every table and file, its recipe, seed and policy.

    then: the recipe of the last steps; "": the same in all.
    """

    name: str
    recipe: str
    seed: int
    keep: Keep = DEFAULT_KEEP
    then: str = ""

    @property
    def parts(self) -> tuple[RunSpec, ...]:
        """The run under each of its recipes, in their order: `then` is empty in a part."""
        first = replace(self, then="")
        return (first, replace(first, recipe=self.then)) if self.then else (first,)

    @property
    def converts(self) -> bool:
        """Whether layers are converted in any step."""
        return any(part.recipe != "bf16" for part in self.parts)

    @property
    def folder(self) -> str:
        """The name as a folder: nvfp4 keep=nothing becomes nvfp4_keep_nothing."""
        return re.sub(r"[^\w.+-]+", "_", self.name).strip("_")


def split_name(entry: str) -> tuple[str, str]:
    """Returns the name that an entry gives, "" where it gives none, and the rest."""
    text = " ".join(entry.split())
    if (match := NAME.fullmatch(text)) and match[1] not in PRODUCTS:
        return match[1], match[2].strip()
    return "", text


def parse_entry(entry: str, seed: int) -> RunSpec:
    """Parses an entry; ends the program where it cannot."""
    name, text = split_name(entry)
    text, found, then = (part.strip() for part in text.partition(THEN))
    keep: str = DEFAULT_KEEP
    if match := POLICY.fullmatch(text):
        text, keep = match[1], match[2]
    is_last = bool(then) and not re.search(r" (keep|then)=", f" {then}")
    if not text or keep not in KEEPS or bool(found) != is_last:
        expected = "[NAME=]TEXT[ keep=POLICY][ then=RECIPE]"
        sys.exit(f"--recipes: expected {expected}, POLICY of {', '.join(KEEPS)}, got {entry!r}")
    if not name:
        name = text if keep == DEFAULT_KEEP else f"{text} keep={keep}"
        name += f"{THEN}{then}" if then else ""
    spec = RunSpec(name, text, seed, keep, then)  # type: ignore[arg-type]
    try:
        for part in spec.parts:
            RecipeMap(part.recipe)
    except ValueError as error:
        sys.exit(f"--recipes: {entry!r}: {error}")
    return spec
