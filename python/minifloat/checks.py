"""Checks of arguments: each says what was expected and what came."""

from __future__ import annotations

from typing import Any

from torch import nn

LARGEST = 2**63 - 1


def require_int(name: str, value: Any, least: int, most: int = LARGEST, unit: str = "") -> int:
    """Returns `value` where it is an integer from `least` to `most`.

    Raises:
        TypeError: it is no int; a bool is none.
        ValueError: it is out of the range.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r} ({type(value).__name__})")
    if not least <= value <= most:
        bounds = f"at least {least}" if most == LARGEST else f"{least} to {most}"
        raise ValueError(f"{name}: expected {bounds}{unit and ' ' + unit}, got {value}")
    return value


def require_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected True or False, got {value!r}")
    return value


def require_text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name}: expected a str, got {value!r}")
    return value


def require_module(function: str, model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{function}: expected a torch.nn.Module, got {type(model).__name__}")
    return model
