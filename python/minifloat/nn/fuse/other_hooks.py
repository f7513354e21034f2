"""Hooks of modules that this package has not registered, and that could see a deferred result."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as torch_module

from ..convert.fast_paths import prevent_fast_path
from ..state.random_state import AdvanceRng

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_ALL_MODULES = tuple("_global" + name for name in HOOKS)  # attributes of torch's module


def has_other_hooks(module: nn.Module) -> bool:
    """Tells whether hooks of others than this package see the module's input or output.

    So do hooks of all modules, as torch.nn.modules.module.register_module_forward_hook has them.
    """
    if any(getattr(torch_module, name) for name in OF_ALL_MODULES):
        return True
    for name in HOOKS:
        for hook in getattr(module, name).values():
            owner = getattr(hook, "__self__", hook)
            if hook is not prevent_fast_path and not isinstance(owner, AdvanceRng):
                return True
    return False
