"""Names of modules, free of the names that wrappers add."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# Names that wrappers put between a module's name and its parent's.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")

PRODUCT = "_product"  # of the name of a GroupedProduct, after its parameter's


def clean_name(fqn: str) -> str:
    """Returns the module's name without the names of torch.compile, checkpointing and FSDP."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPERS)


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the model inside torch.compile, DistributedDataParallel and Megatron's wrappers."""
    while True:
        is_megatrons = type(model).__module__.startswith("megatron.core.")
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif is_megatrons and list(model._modules) == ["module"]:
            model = model.get_submodule("module")
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def is_scripted(module: nn.Module) -> bool:
    """Tells whether a module is of torch.jit: its code is not Python's, and its parts no dicts."""
    return isinstance(module, torch.jit.ScriptModule)


def own_parameter(module: nn.Module, name: str) -> Tensor | None:
    """Returns a module's parameter; None: it has none of this name. Takes modules of torch.jit."""
    return dict(module.named_parameters(recurse=False)).get(name)


def join(*names: str) -> str:
    """Joins the names that are not empty with dots."""
    return ".".join(name for name in names if name)


def owners_of_parameters(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Finds the modules that have each parameter, by the parameter's id."""
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(module)
    return owners
