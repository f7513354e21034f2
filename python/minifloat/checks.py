"""Checks of arguments, with errors that have the expected and the actual value."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import SupportsIndex, cast

from torch import nn

LEAST, LARGEST = -(2**63), 2**63 - 1


def require_int(
    name: str, value: object, least: int = LEAST, most: int = LARGEST, unit: str = ""
) -> int:
    """Returns `value` as an int where it is an integer from `least` to `most`.

    Raises:
        TypeError: `value` is no integer, or a bool.
        ValueError: `value` is out of the range.
    """
    # isinstance of a protocol takes 4 us.
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        raise TypeError(f"{name}: expected an int, got {value!r} ({type(value).__name__})")
    number = operator.index(cast(SupportsIndex, value))
    if not least <= number <= most:
        lower = "an int from -2^63" if least == LEAST else f"{least}"
        upper = "2^63 - 1" if most == LARGEST else f"{most}"
        has_one_end = most == LARGEST and number < least
        bounds = f"at least {least}" if has_one_end and least != LEAST else f"{lower} to {upper}"
        raise ValueError(f"{name}: expected {bounds}{unit and ' ' + unit}, got {number}")
    return number


def require_number(name: str, value: object) -> float:
    """Returns `value` as a float; TypeError where it is no number, ValueError where negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {value!r} ({type(value).__name__})")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value}")
    return float(value)


def require_bool(name: str, value: object) -> bool:
    """Returns `value`; TypeError where it is no bool."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return value


def require_one_of(name: str, value: object, choices: Collection[object]) -> None:
    """Raises ValueError where `value` is none of the choices."""
    if not any(value == choice for choice in choices):
        expected = ", ".join(str(choice) for choice in choices)
        raise ValueError(f"{name}: expected one of {expected}, got {value!r}")


def require_text(name: str, text: object) -> str:
    """Returns `text`; TypeError where it is no str, ValueError where it is not valid Unicode."""
    if not isinstance(text, str):
        raise TypeError(f"{name}: expected its text as str, got {type(text).__name__}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name}: expected valid Unicode, got a lone surrogate at position {error.start}"
            ) from None
    return text


def require_module(function: str, model: object) -> nn.Module:
    """Returns `model`; TypeError where it is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: expected a torch.nn.Module, got {type(model).__name__}")
    return model
