"""What all ranks of torch.distributed tell each other around a folder that one of them writes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


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
