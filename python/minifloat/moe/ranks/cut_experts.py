"""Tensor parallelism of experts over the hidden width I: w1, w3 (E, I, D) and w2 (E, D, I).

The parameters are DTensors over one mesh dimension, w1, w3 and their biases with Shard(1), w2 with
Shard(2). A fused w13 is (E, 2, I, D), and its bias (E, 2, I), with Shard(2): a rank has its part of
gate and of up. torch 2.11 has no placement for that of (E, 2I, D) which its checkpoints save whole.
The bias of w2 is not cut. cut_along_width makes them so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from ...nn.hooks import is_distributed
from ...tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

FUSED = ("w13", "b13")
EXPECTED = (
    "expected w1, w3 and their biases as DTensors with Shard(1), w2 with Shard(2), a fused w13 "
    "(E, 2, I, D) and its bias (E, 2, I) with Shard(2), over one mesh dimension"
)
WHY_NO_FUSED_CODES = (
    "expected w1 and w3 apart for primary weights that ranks cut along I, got fused w13: codes are "
    "those of 3D weights, and its cut has four dimensions"
)


def cut_dim(weight: Any) -> int:
    """Returns the dimension within matrices that ranks cut a weight along; 0: none."""
    if not is_distributed(weight):
        return 0
    dims = {getattr(placement, "dim", 0) for placement in weight.placements} - {0}
    return 0 if not dims else max(dims)


def are_cut(module: Any) -> bool:
    """Tells whether ranks cut a weight of experts along I."""
    return any(cut_dim(getattr(module, name)) > 0 for name in module.weight_names)


def placement_of(name: str) -> Any:
    """Returns how ranks cut the parameter `name` of experts along I."""
    from torch.distributed.tensor import Replicate, Shard

    if name == "b2":
        return Replicate()
    return Shard(2 if name in ("w2", *FUSED) else 1)


def cut_along_width(experts: Any, mesh: DeviceMesh) -> None:
    """Cuts the experts of an mf.MoE along their hidden width I over the ranks of a mesh, in place.

    Rank 0's values are sent to the others. Each parameter becomes a DTensor; a fused w13 becomes
    (E, 2, I, D), its bias (E, 2, I). Call it before or after mf.quantize_, and before fully_shard
    and before an optimizer is built.

    Args:
        experts: the `experts` of an mf.MoE, whole on each rank.
        mesh: of one dimension.

    Raises:
        TypeError: `experts` is no experts module.
        ValueError: I is no multiple of the ranks, the experts are divided or cut already, w13 is
            fused and codes, or a block of codes lies on several ranks.

    Nothing has been changed where an error is raised.

    Source: docs/distributed.md, "Experts sharded along their width".
    """
    from torch.distributed.tensor import distribute_tensor

    if not hasattr(experts, "weight_names"):
        raise TypeError(
            f"cut_along_width: expected the experts of an mf.MoE, got {type(experts).__name__}"
        )
    parameters = {name: p for name, p in experts._parameters.items() if p is not None}
    ranks = mesh.size()
    if mesh.ndim != 1 or experts.hidden % ranks:
        raise ValueError(
            f"cut_along_width: expected a mesh of one dimension whose ranks divide I = "
            f"{experts.hidden}, got {mesh}"
        )
    for name, parameter in parameters.items():
        if is_distributed(parameter) or experts.parallel is not None:
            raise ValueError(f"cut_along_width: expected whole experts, got a part of {name}")
        if name in FUSED and isinstance(parameter, QuantizedTensor):
            raise ValueError(f"cut_along_width: {name}: {WHY_NO_FUSED_CODES}")
    found = {}
    for name, parameter in parameters.items():
        whole = parameter.detach()
        if name in FUSED:
            whole = whole.unflatten(1, (2, experts.hidden))
        part = distribute_tensor(whole, mesh, [placement_of(name)])
        found[name] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    for name, made in found.items():
        experts.register_parameter(name, made)


def require_cut(module: Any, name: str, title: str) -> Any:
    """Returns a parameter of experts; raises ValueError where ranks do not cut it as they should.

    Args:
        module: the experts.
        name: of the parameter.
        title: of the parameter, for errors.
    """
    parameter = getattr(module, name)
    if parameter is None or (name == "b2" and not is_distributed(parameter)):
        return parameter
    placement = placement_of(name)
    is_one_dim = is_distributed(parameter) and parameter.device_mesh.ndim == 1
    dims = {"w13": 4, "b13": 3, "b1": 2, "b3": 2, "b2": 2}.get(name, 3)
    is_right = is_one_dim and tuple(parameter.placements) == (placement,)
    if not is_right or parameter.dim() != dims:
        got = getattr(parameter, "placements", "no mesh")
        raise ValueError(f"{title}: {EXPECTED}, got {name} {tuple(parameter.shape)} with {got}")
    dim, ranks = getattr(placement, "dim", None), parameter.device_mesh.size()
    if dim is not None and parameter.shape[dim] % ranks:
        raise ValueError(
            f"{title}: expected I as a multiple of the ranks, got {parameter.shape[dim]} over "
            f"{ranks} ranks"
        )
    return parameter
