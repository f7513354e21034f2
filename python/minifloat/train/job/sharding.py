"""A model over the ranks of a job: experts that are divided, and gradients of several meshes.

ranks     groups of `--expert-parallel` ranks divide the experts, and rows travel within a group
groups    FSDP2 cuts a rank's experts over the groups, where there are several: between experts,
          or along another dimension where the groups do not divide their number
others    FSDP2 cuts all other weights over all ranks
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ...moe.layer import Experts
from ...moe.ranks.expert_parallel import expert_parallel


def whole(tensor: Tensor) -> Tensor:
    """Gathers a sharded tensor on every rank; returns any other unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def divide_experts(
    model: nn.Module, device: str, size: int, ranks: int, capacity: int | str | None
) -> set[nn.Parameter]:
    """Divides the experts over `ranks` ranks, and over the groups of so many with FSDP2.

    torch 2.11 sets no state of a dimension that two meshes cut unevenly. So FSDP2 cuts a parameter
    along the first dimension that the groups divide. Cut along 0, weights are gathered as codes.

    Args:
        model: that each of `size` processes has whole.
        device: of the job.
        size: processes, a multiple of `ranks`.
        ranks: of one group.
        capacity: as that of mf.expert_parallel.

    Returns:
        The parameters that FSDP2 is to leave alone: with one group, those of the experts, which
        would else be copied in each forward.
    """
    groups = size // ranks
    mesh = init_device_mesh(device, (groups, ranks), mesh_dim_names=("group", "rank"))
    expert_parallel(model, mesh["rank"], capacity=capacity)
    if groups == 1:
        return {p for module in divided_experts(model) for p in module.parameters()}

    def placement(parameter: nn.Parameter) -> Shard:
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        return Shard(next(dim for dim, n in enumerate(local.shape) if n % groups == 0))

    for module in divided_experts(model):
        fully_shard(module, mesh=mesh["group"], shard_placement_fn=placement)
    return set()


def divided_experts(model: nn.Module) -> list[Experts]:
    """Returns the experts of each mixture that is divided."""
    found = [module for module in model.modules() if isinstance(module, Experts)]
    return [module for module in found if module.parallel is not None]


@contextmanager
def quiet_gathers() -> Iterator[None]:
    """Drops torch's message that it gathers parameters of two meshes by two collectives."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")

    def is_kept(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("While redistributing")

    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)


def average_gradients(model: nn.Module) -> None:
    """Divides gradients of experts, which are sums over the ranks of a group, by their number.

    FSDP2 takes means of all other gradients.
    """
    for module in divided_experts(model):
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(module.parallel.ranks)


def clip_gradients(parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
    """Scales gradients to a norm of at most `limit`, in place.

    torch.nn.utils.clip_grad_norm_ takes DTensors of one mesh alone. The result is that function's
    otherwise: an infinite norm makes finite gradients 0 and infinite ones NaN, and a NaN makes all
    NaN.

    Args:
        parameters: they may be on several meshes, or have no gradients.
        limit: the largest norm.

    Returns:
        The norm before, of all gradients together; 0 where there are none.
    """
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    groups = list(by_mesh.values())
    if len(groups) < 2:
        norm: Tensor = nn.utils.clip_grad_norm_(groups[0] if groups else [], limit)
        return norm
    norms = [
        whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]))
        for group in groups
    ]
    total = torch.stack([each.to(norms[0].device) for each in norms]).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, limit, total)
    return total


def dropped_rows(model: nn.Module) -> int:
    """Returns the rows that this rank dropped in the last step, after mf.step."""
    return sum(module.parallel.step_dropped for module in divided_experts(model))


def forget_dropped(model: nn.Module) -> None:
    """Drops the counts of rows that were dropped since the last step."""
    for module in divided_experts(model):
        if module.parallel.dropped is not None:
            module.parallel.dropped.zero_()
