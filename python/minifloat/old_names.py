"""Aliases of modules under the names that older checkpoints have.

A pickle names a class by its module. Older pickled modules (torch.save(model)) and quantized
weights have the names on the left, which sys.modules maps to the present modules. Functions that
torch.load(weights_only=True) may call are registered under their former names too.
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
