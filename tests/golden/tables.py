"""The library's own tables: what golden cases run over, so that a new entry has none and fails."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import combinations

from minifloat.spec import Spec

MOST_FLAGS = 4  # a scale's rounding, +delayed, +sr and a transform


def _listed(text: str, before: str) -> list[str]:
    """Returns the texts that the parser lists in its error for `text`."""
    try:
        Spec.parse(text)
    except ValueError as error:
        return re.split(", | or ", str(error).partition(before)[2])
    raise AssertionError(f"{text!r} is a spec")


def bases() -> list[str]:
    """Lists the specs without flags, by their canonical texts; bf16 has no codes."""
    names = _listed("?", "expected one of ")
    return sorted({Spec.parse(name).text for name in names} - {"bf16"})


def flags() -> list[str]:
    return sorted(_listed("nvfp4+?", "is not a flag; expected "))


@lru_cache(maxsize=1)
def specs() -> list[str]:
    """Lists every spec of the grammar but bf16."""
    found = set()
    for count in range(MOST_FLAGS + 1):
        for chosen in combinations(flags(), count):
            for base in bases():
                try:
                    found.add(Spec.parse("+".join((base, *chosen))).text)
                except ValueError:
                    continue
    return sorted(found)


def plain_specs() -> list[str]:
    """Lists the specs with neither random bits nor a transform."""
    return [s for s in specs() if not Spec.parse(s).is_stochastic and not Spec.parse(s).transform]


def of_weight(spec: str) -> str:
    """Returns the spec of a weight beside an operand: nvfp4/row is for tokens and gradients."""
    return spec.replace("nvfp4/row", "nvfp4")


def few_specs() -> list[str]:
    """Lists the plain specs, and each with `+sr` and a transform, where there is such a spec."""
    found = set(plain_specs())
    for spec in specs():
        parsed = Spec.parse(spec)
        points = parsed.transform
        if parsed.draws_signs or (parsed.is_stochastic and points in (0, 16)) or points == 128:
            found.add(spec)
    return sorted(found)
