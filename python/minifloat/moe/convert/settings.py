"""The settings that a converted module's own forward would read, compared before each forward.

A conversion that replaces code stands for it under the settings that it had: its sizes, factors,
activation, config and the code itself. A later change of one of them raises an error. Compiled code
has guards on them, and compares again where one has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ...nn.convert.foreign_code import (
    MISSING,
    Settings,
    code_of,
    first_change,
    settings_of,
    text_of,
)
from .same_forward import foreign_implementation

SETTINGS = "_settings"  # attribute of a converted module
IMPLEMENTATION = ("config", "_experts_implementation")  # of transformers


def read_settings(
    module: nn.Module, own: tuple[str, ...], *replaced: Callable[..., object]
) -> Settings:
    """Returns the settings that functions of a module's class read.

    Args:
        module: the module.
        own: the path from the module to the class that has the functions.
        replaced: the functions.
    """
    cls: Any = module
    for name in own:
        cls = getattr(cls, name)
    settings = settings_of(module, code_of(cls, *replaced), own)
    chosen = getattr(getattr(module, IMPLEMENTATION[0], None), IMPLEMENTATION[1], MISSING)
    return settings if chosen is MISSING else (*settings, (IMPLEMENTATION, chosen))


def require_settings(module: nn.Module) -> None:
    """Raises RuntimeError where a setting is not what it was at the module's conversion."""
    change = first_change(module, module._settings)  # type: ignore[arg-type]
    if change is None:
        return
    name, value, found = change
    if name == ".".join(IMPLEMENTATION) and foreign_implementation(found) is None:
        return
    kind, values = type(module).__name__, "another value"
    if not torch.compiler.is_compiling():  # in which a value may have no text
        values = f"{text_of(found)} instead of {text_of(value)}"
    raise RuntimeError(
        f"{kind}: expected {name} as at its conversion, got {values}; call mf.restore_ before such "
        "a change, and mf.quantize_ after it"
    )
