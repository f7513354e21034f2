"""What all ranks of torch.distributed tell each other around a folder that one of them writes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..nn.registry import is_distributed
from ..nn.state.recipe_state import ExpertRange


def has_ranks() -> bool:
    """Tells whether there are other processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_writer() -> bool:
    """Tells whether this process writes."""
    return not has_ranks() or dist.get_rank() == 0


def of_all_ranks(value: Any) -> list[Any]:
    """Returns the value of each rank; they all call it together."""
    if not has_ranks():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ---- tensors that ranks divide -------------------------------------------------------------------


def whole_of(tensor: Tensor, experts: ExpertRange | None) -> Tensor:
    """Gathers a tensor from the ranks that have parts of it; they all call it together.

    Args:
        tensor: of a model, maybe a DTensor.
        experts: the range of them that this rank has, (n, …) of (E, …); None: it is no tensor of
            experts that ranks divide.
    """
    tensor = tensor.detach()
    if is_distributed(tensor):  # FSDP2 may shard what a process group has divided
        tensor = tensor.full_tensor()
    if experts is None or len(tensor) == experts.experts:
        return tensor
    tensor = tensor.contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(experts.group))]
    dist.all_gather(parts, tensor, group=experts.group)
    return torch.cat(parts)


def whole_shape(tensor: Tensor, experts: ExpertRange | None) -> tuple[int, ...]:
    """Returns the shape of what `whole_of` returns."""
    shape = tuple(tensor.shape)
    return shape if experts is None else (experts.experts, *shape[1:])


def without_values(tensor: Tensor, experts: ExpertRange | None = None) -> Tensor:
    """Returns a tensor of the whole's shape and dtype, on meta."""
    return torch.empty(whole_shape(tensor, experts), dtype=tensor.dtype, device="meta")
