"""mf.moe.average_expert_gradients: means of the gradients of experts that ranks divide.

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
from torch import Tensor, nn

from ...checks import require_module
from ...distributed.handshake import raise_fault, raise_on_all, require_same
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
        TypeError: `model` is no module, or `mesh` is neither of the two. Where other ranks hold the
            same experts it is a ValueError.
        ValueError: the ranks of `mesh` hold different experts, or gradients of different shapes or
            dtypes; one is missing, or has a gradient that is sparse or expanded; or FSDP2 has
            sharded the experts and averages their gradients itself; on every rank of `mesh`.
            Nothing has been changed then.

    Source: docs/moe.md, "Expert parallelism".

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> moe = mf.expert_parallel(mf.MoE(64, 32, experts=4, top_k=2), dist.group.WORLD)
        >>> moe(torch.ones(3, 64)).mean().backward()
        >>> mf.moe.average_expert_gradients(moe)  # each gradient divided by the number of ranks, 1
        >>> mf.distributed.destroy_process_group()
    """
    group = None
    try:
        group = None if mesh is None else group_of("average_expert_gradients: mesh", mesh)
        layers = divided_experts(require_module("average_expert_gradients", model).modules())
    except (TypeError, ValueError) as error:
        if mesh is None:
            raise
        raise_on_all(error, mesh if group is None else group)
    if group is None:
        raise_fault(why_not_averaged(layers))
    else:
        require_same_experts(layers, group)
    for experts, parallel in layers.items():
        for parameter in (p for p in experts.parameters() if p.requires_grad):
            if group is not None and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
            if parameter.grad is None:
                continue
            gradient, ranks = local_of(parameter.grad), parallel.ranks
            if group is not None:
                # An all-reduce adds up by memory order, which may differ between ranks.
                total = gradient.contiguous()
                dist.all_reduce(total, group=group)
                if total is not gradient:
                    gradient.copy_(total)
                ranks *= dist.get_world_size(group)
            gradient.div_(ranks)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's gradient, or that which a missing one would have."""
    if parameter.grad is not None:
        return parameter.grad.dtype
    return parameter.grad_dtype or parameter.dtype


def why_not_averaged(layers: Mapping[Experts, ExpertParallel]) -> str | None:
    """Returns the error where a gradient has no memory of its own for each element; else None."""
    for experts, parallel in layers.items():
        for name, parameter in experts.named_parameters():
            if not parameter.requires_grad or parameter.grad is None:
                continue
            gradient = local_of(parameter.grad)
            is_dense = gradient.layout == torch.strided
            if is_dense and not any(
                size > 1 and step == 0 for size, step in zip(gradient.shape, gradient.stride())
            ):
                continue
            got = f"strides {gradient.stride()}" if is_dense else f"{gradient.layout}"
            return (
                f"average_expert_gradients: {parallel.name}.{name}: expected a dense gradient with "
                f"memory of its own for each element, got {got}"
            )
    return None


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
    """Compares the experts that the ranks of a group hold, and the kinds of their gradients.

    They do in each call: a rank cannot know whether the experts of another have changed.

    Raises:
        ValueError: on every rank of the group, where they differ, a rank is missing, or FSDP2
            averages their gradients.
    """
    parts = []
    for experts, parallel in layers.items():
        first, last = parallel.first_expert, parallel.first_expert + parallel.local - 1
        trained = [(n, p) for n, p in experts.named_parameters() if p.requires_grad]
        gradients = [
            f"{name} {tuple(local_of(p if p.grad is None else p.grad).shape)} {gradient_dtype(p)}"
            for name, p in trained
        ]
        parts.append(f"{parallel.name}: experts {first} to {last}, {', '.join(gradients)}")
    require_same(
        "mf.moe.average_expert_gradients of",
        "; ".join(parts) or "none",
        group,
        expected="average_expert_gradients: expected all {} ranks of mesh to call it, for {}",
        differs="average_expert_gradients: mesh: expected ranks that hold the same experts, and "
        "gradients of one shape and dtype",
        fault=averaged_before(layers) or why_not_averaged(layers),
    )
