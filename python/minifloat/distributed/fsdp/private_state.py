"""Reads FSDP2's state of a module, for which torch has no public names.

    find_fsdp_group    the parameter group of a layer's weight
    groups_of          the parameter groups of one module's state
    policy_of          the mixed-precision policy of a group
    mesh_of            how the ranks of a group shard, and what reduces its gradients
    outputs_of         what a parameter is gathered into
    let_fsdp_assign    lets FSDP2 assign a parameter without a call of the module's __setattr__

Where a torch has other private names, they raise UnknownFsdpError.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

__all__ = ["FSDPParam", "FSDPParamGroup"]


class UnknownFsdpError(RuntimeError):
    """FSDP2 lacks a private name that this library reads."""

    def __init__(self, what: object) -> None:
        super().__init__(
            f"FSDP2: expected private names as in torch 2.11, got torch {torch.__version__}: {what}"
        )


def policy_of(group: FSDPParamGroup) -> MixedPrecisionPolicy:
    """Returns FSDP2's policy: of the parameter group, from torch 2.15 on of each parameter."""
    try:
        found = getattr(group, "mp_policy", None) or group.fsdp_params[0].mp_policy
    except AttributeError as error:
        raise UnknownFsdpError(error) from error
    return cast("MixedPrecisionPolicy", found)


def mesh_of(group: FSDPParamGroup) -> tuple[DeviceMesh | None, Any, bool]:
    """Returns the mesh whose ranks shard a group, None where none do; what reduces its gradients;
    and whether that is torch's own."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

        info, found = group.mesh_info, group._reduce_scatter_comm
    except (ImportError, AttributeError) as error:
        raise UnknownFsdpError(error) from error
    mesh = info.mesh if isinstance(info, FSDPMeshInfo) else None
    return mesh, found, isinstance(found, DefaultReduceScatter)


def groups_of(state: Any) -> list[FSDPParamGroup]:
    """Returns the parameter groups of one module's FSDPState."""
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12
    return list(filter(None, [state._fsdp_param_group] if groups is None else groups))


def find_fsdp_group(layer: nn.Module) -> FSDPParamGroup:
    """Finds FSDP2's parameter group of this module's weight.

    Raises:
        LookupError: FSDP2 has not sharded the module.
        UnknownFsdpError: FSDP2's state has other names than those that are read here.
    """
    try:
        from torch.distributed._composable_state import _module_state_mapping
        from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

        for reference in list(_module_state_mapping.values()):
            state = reference()
            if not isinstance(state, FSDPState):
                continue
            for group in groups_of(state):
                for parameter in group.fsdp_params:
                    info = parameter._module_info
                    if info.module is layer or layer in info.shared_modules:
                        return group
    except (ImportError, AttributeError) as error:
        raise UnknownFsdpError(error) from error
    raise LookupError("no parameter group of FSDP2 has the layer")


def outputs_of(parameter: FSDPParam) -> list[Tensor]:
    """Returns the flat tensors that FSDP2 gathers a parameter into, one for each input.

    The list is the same one until FSDP2 makes new tensors. Empty where it has another name.
    """
    return getattr(parameter, "all_gather_outputs", [])


class Assign:
    """What a module's attribute __setattr__ returns, where FSDP2 is to write to `_parameters`.

    FSDP2 does so where the __func__ of that attribute is nn.Module's. A statement that assigns does
    not read the attribute, and a call of it does what the statement does.
    """

    __func__ = staticmethod(nn.Module.__setattr__)

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)

    def __call__(self, name: str, value: object) -> None:
        setattr(self.module(), name, value)


def let_fsdp_assign(module: nn.Module) -> None:
    """Lets FSDP2 assign parameters without a call of the module's own __setattr__."""
    module.__dict__["__setattr__"] = Assign(module)
