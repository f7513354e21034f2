"""Experts that are divided over the ranks of a job.

ranks     groups of `--expert-parallel` ranks divide the experts, and rows travel within a group
groups    FSDP2 cuts a rank's experts over the groups, where there are several
others    FSDP2 cuts all other weights over all ranks
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minifloat.moe.expert_parallel import expert_parallel
from minifloat.moe.layer import Experts
from minifloat.nn.grouped_product import product_of
from minifloat.nn.names import join
from minifloat.nn.recipe_state import histories_of


def divide_experts(model: nn.Module, device: str, size: int, ranks: int) -> set[nn.Parameter]:
    """Divides the experts over `ranks` ranks, and over the groups of so many with FSDP2.

    Args:
        model: that each of `size` processes has whole.
        device: of the job.
        size: processes, a multiple of `ranks`.
        ranks: of one group.

    Returns:
        The parameters that FSDP2 is to leave alone: with one group, those of the experts, which
        would else be copied in each forward.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (size // ranks, ranks), mesh_dim_names=("group", "rank"))
    expert_parallel(model, mesh["rank"])
    found = [module for _, module in divided_experts(model)]
    if size == ranks:
        return {parameter for module in found for parameter in module.parameters()}
    # torch says once that it gathers such parameters by two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for module in found:
        fully_shard(module, mesh=mesh["group"])
    return set()


def divided_experts(model: nn.Module) -> Iterator[tuple[str, Experts]]:
    """Yields (name, experts) of each mixture that is divided."""
    for name, module in model.named_modules():
        if isinstance(module, Experts) and module.parallel is not None:
            yield name, module


# ---- amax histories ------------------------------------------------------------------------------


def divided_histories(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields the name in mf.training_state, and the ranks, of each history of divided experts."""
    histories = {layer: join(fqn, "amax_history") for fqn, layer, _ in histories_of(model)}
    for _, module in divided_experts(model):
        for name in module.weight_names:
            product = product_of(module, name)
            if product in histories:
                yield histories[product], module.parallel


def whole_histories(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns mf.training_state with the histories of all experts, on all ranks."""
    whole = dict(state)
    for name, link in divided_histories(model):
        own = state[name].contiguous()
        parts = [torch.empty_like(own) for _ in range(link.ranks)]
        dist.all_gather(parts, own, group=link.group)
        whole[name] = torch.cat(parts, dim=1)
    return whole


def own_histories(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns what `whole_histories` returned with the histories of this rank's experts alone."""
    own = dict(state)
    for name, link in divided_histories(model):
        own[name] = state[name][:, link.first_expert : link.first_expert + link.local]
    return own
