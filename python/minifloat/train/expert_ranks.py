"""Experts that are divided over the ranks of a job.

ranks     groups of `--expert-parallel` ranks divide the experts, and rows travel within a group
groups    FSDP2 cuts a rank's experts over the groups, where there are several: between experts,
          or along another dimension where the groups do not divide their number
others    FSDP2 cuts all other weights over all ranks
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from minifloat.moe.expert_parallel import expert_parallel
from minifloat.moe.layer import Experts


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
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh(device, (size // ranks, ranks), mesh_dim_names=("group", "rank"))
    expert_parallel(model, mesh["rank"], capacity=capacity)
    found = [module for _, module in divided_experts(model)]
    if size == ranks:
        return {parameter for module in found for parameter in module.parameters()}
    groups = size // ranks

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(next(dim for dim, n in enumerate(local_shape(parameter)) if n % groups == 0))

    for module in found:
        fully_shard(module, mesh=mesh["group"], shard_placement_fn=placement)
    return set()


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


def local_shape(parameter: nn.Parameter) -> torch.Size:
    """Returns the shape of this rank's part of a parameter."""
    return getattr(parameter, "_local_tensor", parameter).shape


def divided_experts(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Yields (name, experts) of each mixture that is divided."""
    for name, module in model.named_modules():
        if isinstance(module, Experts) and module.parallel is not None:
            yield name, module
