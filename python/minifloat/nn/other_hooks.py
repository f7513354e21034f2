"""Hooks of modules that this package has not registered, and that could see a deferred result."""

from __future__ import annotations

from torch import nn

from .fast_paths import prevent_fast_path
from .random_state import AdvanceRng

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_other_hooks(module: nn.Module) -> bool:
    """Tells whether hooks of others than this package see the module's input or output."""
    for name in HOOKS:
        for hook in getattr(module, name).values():
            owner = getattr(hook, "__self__", hook)
            if hook is not prevent_fast_path and not isinstance(owner, AdvanceRng):
                return True
    return False
