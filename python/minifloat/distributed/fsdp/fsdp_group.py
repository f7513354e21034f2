"""What this library reads of FSDP2's state, which has no public names: a weight's parameter group.

accumulate_gradients also writes to it. FSDP2 keeps the gradient of a gathered parameter in that
parameter's .grad until it is reduced. The first .grad of a bfloat16 parameter would be bfloat16.
`grad_dtype` makes it float32, so that no micro-batch's gradient is rounded to bfloat16. FSDP2
reduces the gradients of a group together, in one dtype, so all parameters of the group get this
dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


class UnknownFsdpError(RuntimeError):
    """FSDP2 lacks a private name that this library reads."""


def require_names(owner: object, *names: str) -> None:
    """Raises UnknownFsdpError where an object of FSDP2 has none of these attributes."""
    if not any(hasattr(owner, name) for name in names):
        what = getattr(owner, "__name__", type(owner).__name__)
        raise UnknownFsdpError(
            f"FSDP2: expected {what}.{' or '.join(names)}, as torch 2.11 has it, got none in torch "
            f"{torch.__version__}"
        )


def fsdp_state_class() -> type:
    """Imports the class of the states of modules that FSDP2 shards."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
    except ImportError as error:
        raise UnknownFsdpError(
            f"FSDP2: expected FSDPState where torch 2.11 has it: {error}"
        ) from error
    return FSDPState


def groups_of_state(state: object) -> list[FSDPParamGroup]:
    """Returns the parameter groups of a module's state; none of a state that is not FSDP2's."""
    if not isinstance(state, fsdp_state_class()):
        return []
    require_names(state, "_fsdp_param_groups", "_fsdp_param_group")
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = groups or [getattr(state, "_fsdp_param_group", None)]
    return [group for group in groups if group is not None]


def find_fsdp_group(layer: nn.Module) -> FSDPParamGroup:
    """Finds FSDP2's parameter group of this module's weight.

    Raises:
        LookupError: FSDP2 has not sharded the module.
        UnknownFsdpError: FSDP2's state has other names than those that are read here.
    """
    from torch.distributed import _composable_state as states

    require_names(states, "_module_state_mapping")
    for reference in list(states._module_state_mapping.values()):
        for group in groups_of_state(reference()):
            require_names(group, "fsdp_params")
            for parameter in group.fsdp_params:
                require_names(parameter, "_module_info")
                info = parameter._module_info
                if info.module is layer or layer in info.shared_modules:
                    return group
    raise LookupError("no parameter group of FSDP2 has the layer")


def recomputes_compiled(group: FSDPParamGroup | None) -> bool:
    """Tells whether compiled code of a group's modules recomputes a forward in backward.

    Such code reads weights rowwise then, and cannot ask for them. Compiled are modules whose
    .compile() was called, and what torch.compile returned.
    """
    modules = () if group is None else group.modules
    inner = [m for module in modules for m in module.modules()]
    is_compiled = any(
        m._compiled_call_impl is not None or type(m).__name__ == "OptimizedModule" for m in inner
    )
    return is_compiled and any("CheckpointWrapper" in type(m).__name__ for m in inner)


def accumulate_gradients(layer: nn.Module, parameter: Tensor) -> None:
    """Makes .grad float32 of all parameters that FSDP2 gathers together with the layer's weight.

    Args:
        layer: mf.Linear under accumulate="grad".
        parameter: (N, K), to be set as the layer's weight. Nothing is done for a sharded one, or
            where its dtype or grad_dtype is float32.

    Raises:
        ValueError: FSDP2 reduces gradients in another dtype than float32.
        UnknownFsdpError: this torch's FSDP2 has other private names than those that are read here.
    """
    is_gathered = isinstance(parameter, nn.Parameter) and not hasattr(parameter, "device_mesh")
    if not is_gathered or torch.float32 in (parameter.dtype, parameter.grad_dtype):
        return
    try:
        group = find_fsdp_group(layer)
    except LookupError:  # not a parameter of FSDP2: require_float32_grad checks it in the forward
        return
    require_names(group, "mp_policy")
    reduce_dtype = group.mp_policy.reduce_dtype
    if reduce_dtype != torch.float32:
        raise ValueError(
            "accumulate='grad': expected fully_shard with MixedPrecisionPolicy("
            f"reduce_dtype=torch.float32) around {parameter.dtype} weights, got {reduce_dtype}"
        )
    # A parameter that was not gathered yet has no unsharded one.
    gathered = [getattr(sharded, "_unsharded_param", None) for sharded in group.fsdp_params]
    if not any(whole is parameter for whole in gathered):
        raise UnknownFsdpError(
            "accumulate='grad': expected the gathered weight as _unsharded_param of one of FSDP2's "
            f"parameters, as torch 2.11 has it, got another tensor in torch {torch.__version__}"
        )
    for whole in gathered:
        if whole is not None and whole.requires_grad and whole.grad is None:
            whole.grad_dtype = torch.float32
