"""Shards the experts of an mf.MoE along their hidden width I over the ranks of one mesh dimension.

    w1, w3 (E, I, D), their biases (E, I)       Shard(1)
    w2 (E, D, I)                                Shard(2)
    fused w13 (E, 2I, D), its bias (E, 2I)      (E, 2, I, D) and (E, 2, I), Shard(2): each rank has
                                                its part of gate and of up
    bias of w2 (E, D)                           Replicate()

To shard (E, 2I, D) itself, a placement would have to give each rank two parts of one dimension.
torch 2.11 has none whose checkpoints hold the whole parameter.

moe/ranks/width.py computes the forward of such experts.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from ...nn.registry import is_distributed
from ...tensor.quantized_tensor import QuantizedTensor

FUSED = ("w13", "b13")
WHY_NO_FUSED_CODES = (
    "expected w1 and w3 apart for primary weights that ranks cut along I, got fused w13: codes are "
    "those of 3D weights, and its cut has four dimensions"
)


def placement_of(name: str) -> Any:
    """Returns how ranks cut the parameter `name` of experts along I."""
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
    if not hasattr(experts, "weight_names"):
        raise TypeError(
            f"cut_along_width: expected the experts of an mf.MoE, got {type(experts).__name__}"
        )
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"cut_along_width: expected a DeviceMesh, got {type(mesh).__name__}")
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
