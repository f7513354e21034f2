"""What all ranks of torch.distributed tell each other around a folder that one of them writes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed.handshake import require_same
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


def wait_for_all(name: str, arguments: str = "") -> None:
    """Waits for all ranks before the first exchange.

    Args:
        name: of the function that they call.
        arguments: those that must be equal on all.

    Raises:
        ValueError: on every rank: one has an error, which it brought by raise_on_all, or other
            arguments, or is missing.
    """
    if has_ranks():
        require_same(
            name,
            arguments,
            cast(dist.ProcessGroup, dist.group.WORLD),
            expected=f"{name}: expected all {{}} ranks to call it",
            differs=f"{name}: expected the same arguments on every rank",
        )


def first_difference(lists: Sequence[Sequence[str]]) -> str:
    """Returns the first items of ranks' lists that differ, with the ranks; "": there are none."""
    for items in zip_longest(*lists, fillvalue="none"):
        ranks: dict[str, list[int]] = {}
        for rank, item in enumerate(items):
            ranks.setdefault(item, []).append(rank)
        if len(ranks) > 1:
            return " and ".join(f"{item} on ranks {of_item}" for item, of_item in ranks.items())
    return ""


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
