"""Gradients of a step: their mean over ranks, where experts are divided, and their norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .expert_ranks import divided_experts
from .world import whole


def average_gradients(model: nn.Module) -> None:
    """Divides gradients of experts, which are sums over the ranks of a group, by their number.

    FSDP2 takes means of all other gradients.
    """
    for _, module in divided_experts(model):
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
    by_mesh: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = getattr(parameter.grad, "device_mesh", None)
            by_mesh.setdefault(mesh, []).append(parameter)
    groups = list(by_mesh.values())
    if len(groups) < 2:
        return nn.utils.clip_grad_norm_(groups[0] if groups else [], limit)
    norms = [
        whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]))
        for group in groups
    ]
    total = torch.stack([norm.to(norms[0].device) for norm in norms]).norm()
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, limit, total)
    return total
