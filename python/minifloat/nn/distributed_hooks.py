"""Functions of `distributed` that layers call. `nn` does not import `distributed`.

`minifloat/__init__.py` registers them once, when the package is imported. A function may import
its package at its first call, when the first DTensor is passed to a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from torch import Tensor, nn

from ..recipe import Recipe
from .registration import Registration

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

QUANTIZED, COMPUTE_DTYPE = "quantized", "compute_dtype"  # how FSDP2 gathers a weight


class WeightGather(Protocol):
    """The gathers of one layer's sharded weight, which distributed/fsdp attaches to the layer."""

    def has_assigned(self, parameter: Any) -> bool:
        """Tells whether FSDP2 has assigned this parameter before, or gathers into it."""

    def complete(self, whole: Tensor, reads_columnwise: bool) -> None:
        """Fetches the parts that a forward reads and no gather has brought."""


@dataclass(frozen=True)
class DistributedHooks:
    """The functions that layers call for several processes.

    plan_gather         recipe -> (plan of the weight's gather or None, sentence for the report)
    adopt_weight        (layer, parameter): before the parameter becomes the layer's weight
    plan_experts        plan_gather of a 3D weight of experts
    adopt_experts       (module, product, parameter until now, parameter): before the 3D parameter
                        becomes the module's
    require_no_shard    (module, name, weight): raises where FSDP2 has sharded a weight that is to
                        be gathered as codes
    precompute_scales   model: exchanges the maxima of all sharded weights, after a step
    reduce_amaxes       (amaxes, group) -> the largest of all ranks
    accumulate_gradients
                        (layer, parameter): before the parameter, which FSDP2 has gathered, becomes
                        the weight of a layer whose gradients are added to .grad in float32
    linear              mf.linear of a weight that is a DTensor
    forward             (layer, x) -> y of a layer whose weight is a DTensor
    """

    plan_gather: Callable[[Recipe], tuple[Any, str]]
    adopt_weight: Callable[[nn.Module, Any], None]
    plan_experts: Callable[[Recipe], tuple[Any, str]]
    adopt_experts: Callable[[nn.Module, Any, Any, Any], None]
    require_no_shard: Callable[[nn.Module, str, Tensor], None]
    precompute_scales: Callable[[nn.Module], None]
    reduce_amaxes: Callable[[Tensor, dist.ProcessGroup | None], Tensor]
    accumulate_gradients: Callable[[nn.Module, Any], None]
    linear: Callable[..., Tensor]
    forward: Callable[[Any, Tensor], Tensor]


_REGISTRATION: Registration[DistributedHooks] = Registration("distributed hooks")
register = _REGISTRATION.register


def hooks() -> DistributedHooks:
    """Returns the registered functions."""
    return _REGISTRATION.functions()


def is_distributed(weight: Tensor) -> TypeGuard[DTensor]:
    """Tells whether a weight is a DTensor, without importing torch.distributed.tensor."""
    return type(weight) not in (Tensor, nn.Parameter) and hasattr(weight, "device_mesh")
