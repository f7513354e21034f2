"""mf.average_expert_gradients: means of the gradients of experts that ranks divide.

The layer adds up an expert's gradient over the tokens of the ranks that divide the experts. Data
parallelism takes means over all ranks of every other gradient:

    mesh ("dp", "ep") of 2 x 2     rank 0: experts 0, 1     rank 1: experts 2, 3
                                   rank 2: experts 0, 1     rank 3: experts 2, 3
    backward                       sums over ranks 0 and 1, and over ranks 2 and 3
    this call, given mesh["dp"]    sums of ranks 0 and 2, and of ranks 1 and 3, all divided by 4
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ...checks import require_module
from ...distributed.handshake import require_same
from ...nn.grouped_product import local_of
from ...nn.registry import is_distributed
from ..layer import Experts, divided_experts
from .parallel_experts import ExpertParallel, group_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@torch.no_grad()
def average_expert_gradients(
    model: nn.Module, mesh: DeviceMesh | dist.ProcessGroup | None = None
) -> None:
    """Averages the gradients of divided experts over the data-parallel ranks, in place.

    Call it on all ranks, once an optimizer step, after the last backward and before gradients are
    clipped. Each rank's loss is the mean over its tokens. Experts that no rank divides are left to
    DistributedDataParallel or FSDP2, as all other parameters.

    Args:
        model: one that mf.expert_parallel may have divided.
        mesh: one dimension of a DeviceMesh, or a process group: the ranks that hold the same
            experts. Its gradients are added up first, one all-reduce a parameter; a missing one
            counts as zeros. None: no other rank holds them, or FSDP2 has averaged over those ranks.

    Raises:
        TypeError: `model` is no module, or `mesh` is neither of the two.
        ValueError: the ranks of `mesh` hold different experts, one is missing, or FSDP2 has sharded
            the experts and averages their gradients itself; on every rank of `mesh`. Nothing has
            been changed then.

    Source: docs/moe.md, "Expert parallelism".

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> moe = mf.expert_parallel(mf.MoE(64, 32, experts=4, top_k=2), dist.group.WORLD)
        >>> moe(torch.ones(3, 64)).mean().backward()
        >>> mf.average_expert_gradients(moe)  # each gradient divided by the number of ranks, 1
        >>> mf.destroy_process_group()
    """
    layers = divided_experts(require_module("average_expert_gradients", model))
    group = None if mesh is None else group_of("average_expert_gradients: mesh", mesh)
    if group is not None:
        require_same_experts(layers, group)
    for experts, parallel in layers.items():
        for parameter in (p for p in experts.parameters() if p.requires_grad):
            if group is not None and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is None:
                continue
            gradient, ranks = local_of(parameter.grad), parallel.ranks
            if group is not None:
                dist.all_reduce(gradient, group=group)
                ranks *= dist.get_world_size(group)
            gradient.div_(ranks)


def averaged_before(layers: Mapping[Experts, ExpertParallel]) -> str | None:
    """Returns the error where FSDP2 shards the experts of a rank over other ranks; else None."""
    for experts, parallel in layers.items():
        ranks = set(dist.get_process_group_ranks(parallel.group))
        for parameter in filter(is_distributed, experts.parameters()):
            if set(parameter.device_mesh.mesh.flatten().tolist()) - ranks:
                return (
                    f"average_expert_gradients: mesh: {parallel.name}: expected None for experts "
                    f"that FSDP2 shards, which averages over {parameter.device_mesh} itself, got "
                    "ranks"
                )
    return None


def require_same_experts(
    layers: Mapping[Experts, ExpertParallel], group: dist.ProcessGroup
) -> None:
    """Compares the experts that the ranks of a group hold.

    They do in each call: a rank cannot know whether the experts of another have changed.

    Raises:
        ValueError: on every rank of the group, where they differ, a rank is missing, or FSDP2
            averages their gradients.
    """
    parts = []
    for experts, parallel in layers.items():
        first, last = parallel.first_expert, parallel.first_expert + parallel.local - 1
        trained = [n for n, p in experts.named_parameters() if p.requires_grad]
        shapes = [f"{n} {tuple(local_of(experts.get_parameter(n)).shape)}" for n in trained]
        parts.append(f"{parallel.name}: experts {first} to {last}, {', '.join(shapes)}")
    require_same(
        "mf.average_expert_gradients of",
        "; ".join(parts) or "none",
        group,
        expected="average_expert_gradients: expected all {} ranks of mesh to call it, for {}",
        absent="they have not called it",
        differs="average_expert_gradients: mesh: expected ranks that hold the same experts",
        fault=averaged_before(layers),
    )
