"""Checks of values from outside: options, and fields of saved files.

Examples:
    require("--steps", integers(1, 10**9), 0)
        TrainError: --steps: expected at least 1, got 0
    load_json(path, {"step": COUNT, "torch": TEXT})
        TrainError: .../state.json: step: expected an integer, got 'abc'
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")  # int() also takes underscores and digits of any script
NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
SHOWN = 60  # characters of a value in a message


class TrainError(Exception):
    """An expected failure of the job: the message is for the user, no traceback needed."""


@dataclass(frozen=True)
class Kind:
    """The values that a field accepts, and their name in messages."""

    name: str
    accepts: Callable[[Any], bool]

    def refusal(self, value: Any) -> str:
        """Returns what was expected, or an empty text if the value is accepted."""
        return "" if self.accepts(value) else self.name


@dataclass(frozen=True)
class Number:
    """Finite numbers from `least` to `most`; `above`: `least` itself is left out."""

    integer: bool
    least: float
    most: float
    above: bool = False

    def refusal(self, value: Any) -> str:
        """Returns what was expected, or an empty text if the value is accepted."""
        if self.integer and (not isinstance(value, int) or isinstance(value, bool)):
            return "an integer"
        if not isinstance(value, int | float) or isinstance(value, bool):
            return "a number"
        if isinstance(value, float) and not math.isfinite(value):
            return "a finite number"
        if value < self.least or (self.above and value == self.least):
            return f"more than {self.least:g}" if self.above else f"at least {self.least}"
        return f"at most {self.most}" if value > self.most else ""

    def parse(self, text: str) -> int | float | None:
        """Returns the number that a text writes in ASCII, whatever its size, or None."""
        if self.integer:
            return int(text) if INTEGER.fullmatch(text) else None
        return float(text) if NUMBER.fullmatch(text) else None


def integers(least: int, most: int) -> Number:
    """Returns the integers from `least` to `most`."""
    return Number(integer=True, least=least, most=most)


def numbers(least: float, most: float, *, above: bool = False) -> Number:
    """Returns the finite numbers from `least`, or above it, to `most`."""
    return Number(integer=False, least=least, most=most, above=above)


COUNT = integers(0, 2**63 - 1)
SEED = COUNT  # an int64, as mf.quantize_ takes
STEP = integers(1, 2**63 - 1)
TEXT = Kind("a text", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
LIST = Kind("a list", lambda value: isinstance(value, list))
TEXTS = Kind("a list of texts", lambda value: LIST.accepts(value) and all(map(TEXT.accepts, value)))
FINITE = numbers(-math.inf, math.inf)
MEASURED = Kind("a finite number or null", lambda value: value is None or not FINITE.refusal(value))

Fields = Mapping[str, Kind | Number]


def shown(value: Any) -> str:
    """Returns a value as a message shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def require(where: str, kind: Kind | Number, value: Any) -> None:
    """Raises TrainError that starts with `where`, unless the value is of its kind."""
    if expected := kind.refusal(value):
        raise TrainError(f"{where}: expected {expected}, got {shown(value)}")


def require_fields(where: str, fields: Fields, value: Any) -> None:
    """Raises TrainError unless the value is an object with all these fields, each of its kind."""
    require(where, OBJECT, value)
    for name, kind in fields.items():
        if name not in value:
            raise TrainError(f"{where}: expected the field {name!r}, got {shown(list(value))}")
        require(f"{where}: {name}", kind, value[name])


def parse_json(where: str, text: str, fields: Fields) -> dict[str, Any]:
    """Returns the object that a JSON text holds; TrainError unless it has all these fields."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrainError(f"{where}: expected JSON, got {shown(text)} ({error})") from error
    require_fields(where, fields, value)
    return value


def is_json(text: str) -> bool:
    """Tells whether a text is whole JSON."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def read_text(path: Path) -> str:
    """Returns the text of a job's file; TrainError where it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise TrainError(f"{path}: expected a readable file, got: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TrainError(f"{path}: expected UTF-8, got other bytes at {error.start}") from error


def load_json(path: Path, fields: Fields) -> dict[str, Any]:
    """Returns the object in a job's JSON file; TrainError names the file and what is wrong."""
    return parse_json(str(path), read_text(path), fields)
