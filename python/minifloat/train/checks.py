"""What the user is told; checks of values from outside: options, and fields of saved files.

Examples:
    require("--steps", Number(int, 1, 10**9), 0)
        TrainError: --steps: expected at least 1, got 0
    load_json(path, {"step": COUNT, "torch": TEXT})
        TrainError: .../state.json: step: expected an integer, got 'abc'
"""

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

# int() and float() also take underscores and digits of any script.
WRITTEN = {
    int: re.compile(r"[+-]?[0-9]{1,4000}"),
    float: re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
}

S = TypeVar("S", bound="Settings")
Json = dict[str, Any]  # an object of a JSON file
Check = Callable[[object], str]  # what was expected; an empty text if the value is accepted


class TrainError(Exception):
    """An expected failure of the job: the message is for the user, no traceback needed."""


def say(text: str) -> None:
    """Prints a line for the user, beside the progress bars."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Number:
    """The check of finite numbers from `least` to `most`; `above`: `least` itself is left out."""

    kind: type[int] | type[float]
    least: float
    most: float
    above: bool = False

    @property
    def name(self) -> str:
        return "an integer" if self.kind is int else "a number"

    def __call__(self, value: object) -> str:
        if not isinstance(value, int | self.kind) or isinstance(value, bool):
            return self.name
        if isinstance(value, float) and not math.isfinite(value):
            return "a finite number"
        if value < self.least or (self.above and value == self.least):
            return f"more than {self.least:g}" if self.above else f"at least {self.least}"
        return f"at most {self.most}" if value > self.most else ""

    def read(self, text: str) -> int | float | str:
        """Returns the number that a text writes in ASCII, whatever its size, or the text."""
        return self.kind(text) if WRITTEN[self.kind].fullmatch(text) else text


def kind(name: str, accepts: Callable[[Any], bool]) -> Check:
    """Returns the check of the values that a function accepts, by their name in messages."""
    return lambda value: "" if accepts(value) else name


COUNT = Number(int, 0, 2**63 - 1)
SEED = COUNT  # an int64, as mf.quantize_ takes
ANYTHING = kind("", lambda value: True)
TEXT = kind("a text", lambda value: isinstance(value, str))
OBJECT = kind("an object", lambda value: isinstance(value, dict))
LIST = kind("a list", lambda value: isinstance(value, list))
FINITE = Number(float, -math.inf, math.inf)
MEASURED = kind("a finite number or null", lambda value: value is None or not FINITE(value))

Fields = Mapping[str, Check]


def shown(value: object) -> str:
    """Returns a value as a message shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def require(where: str, check: Check, value: object) -> None:
    """Raises TrainError that starts with `where`, unless the check accepts the value."""
    if expected := check(value):
        raise TrainError(f"{where}: expected {expected}, got {shown(value)}")


def require_fields(where: str, checks: Fields, value: Json) -> None:
    """Raises TrainError unless the value is an object whose fields the checks accept."""
    require(where, OBJECT, value)
    for name, check in checks.items():
        if name not in value:
            raise TrainError(f"{where}: expected the field {name!r}, got {shown(list(value))}")
        require(f"{where}: {name}", check, value[name])


def setting(default: Any, check: Check, text: str = "") -> Any:
    """Declares a field of Settings: its check, and the help of its option where it has one."""
    return field(default=default, metadata={"check": check, "help": text})


@dataclass(frozen=True)
class Settings:
    """A dataclass whose fields are checked, whether an option or a saved file gave them."""

    def __post_init__(self) -> None:
        for each in fields(self):
            require(self.where(each.name), each.metadata["check"], getattr(self, each.name))

    @staticmethod
    def where(name: str) -> str:
        """Returns the beginning of messages about a field."""
        return name

    @classmethod
    def from_json(cls: type[S], where: str, values: Json) -> S:
        """Returns the settings that a JSON object holds.

        Raises:
            TrainError: a value is missing or not as expected; the message starts with `where`.
        """
        names = [each.name for each in fields(cls)]
        require_fields(where, dict.fromkeys(names, ANYTHING), values)
        try:
            return cls(**{name: values[name] for name in names})
        except TrainError as error:
            raise TrainError(f"{where}: {error}") from error


def parse_json(where: str, text: str, checks: Fields) -> Json:
    """Returns the object that a JSON text holds; TrainError unless it has all these fields."""
    try:
        value: Json = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TrainError(f"{where}: expected JSON, got {shown(text)} ({error})") from error
    require_fields(where, checks, value)
    return value


def read_text(path: Path) -> str:
    """Returns the text of a job's file; TrainError where it cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except OSError as error:
        raise TrainError(f"{path}: expected a readable file, got: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise TrainError(f"{path}: expected UTF-8, got other bytes at {error.start}") from error


def load_json(path: Path, checks: Fields) -> Json:
    """Returns the object in a job's JSON file; TrainError names the file and what is wrong."""
    return parse_json(str(path), read_text(path), checks)
