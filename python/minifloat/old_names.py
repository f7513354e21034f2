"""Modules under the names that checkpoints written earlier refer to.

A pickle names a class by its module. Pickled modules (torch.save(model)) and quantized weights
name the ones on the left; sys.modules has them as aliases. What torch.load(weights_only=True) may
build is registered under its former name too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .distributed.fsdp import plan
from .distributed.zero import flat_buffer
from .nn import convert, delayed_scaling, fast_paths, linear, operand_cache, random_state, selection
from .tensor import quantized, quantized_tensor

MODULES: dict[str, ModuleType] = {
    "convert": convert,
    "fast_paths": fast_paths,
    "gather": plan,
    "linear": linear,
    "quantized": quantized,
    "random_state": random_state,
    "reuse": operand_cache,
    "selection": selection,
    "state": delayed_scaling,
    "wire_layout": flat_buffer,
}
SAFE_GLOBALS: dict[str, Callable[..., Any]] = {
    "quantized._rebuild": quantized._rebuild,
    "tensor._rebuild_tensor": quantized_tensor._rebuild_tensor,
}

for _name, _module in MODULES.items():
    sys.modules[f"{__package__}.{_name}"] = _module
    if not hasattr(sys.modules[str(__package__)], _name):  # mf.linear is the function
        setattr(sys.modules[str(__package__)], _name, _module)
torch.serialization.add_safe_globals(
    [(function, f"{__package__}.{name}") for name, function in SAFE_GLOBALS.items()]
)
