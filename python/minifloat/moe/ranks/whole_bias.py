"""The output biases of all experts, from those of each rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


class GatherExperts(torch.autograd.Function):
    """(n, D) of each rank -> float32 (E, D) on all. Its gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.experts, ctx.dtype = group, own.shape[0], own.dtype
        sent = own.float().contiguous()
        whole = sent.new_empty(sent.shape[0] * dist.get_world_size(group), *sent.shape[1:])
        dist.all_gather_into_tensor(whole, sent, group=group)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        begin = dist.get_rank(ctx.group) * ctx.experts
        return total[begin : begin + ctx.experts].to(ctx.dtype), None


def gather_experts(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the rows of all ranks' experts, float32 (E, D), differentiably."""
    return GatherExperts.apply(own, group)
