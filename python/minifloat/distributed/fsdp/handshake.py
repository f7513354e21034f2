"""Before a weight's first gather: all ranks come, and mean the same weight."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..._native import ops

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNKNOWN = -1


def agree(
    title: str, dtype: torch.dtype | None, group: dist.ProcessGroup, device: torch.device
) -> torch.dtype:
    """The compute dtype, which those know that hold a full shard; ValueError where titles differ.

    title: the weight's name, recipe and shape.
    """
    known = UNKNOWN if dtype is None else COMPUTE_DTYPES.index(dtype)
    world = dist.get_world_size(group)
    if world == 1:
        return COMPUTE_DTYPES[known]
    meet(title, group, device)
    own = torch.tensor([ops.stream(title), known], device=device)
    every = own.new_empty(world * 2)
    dist.all_gather_into_tensor(every, own, group=group)
    titles, dtypes = every.view(-1, 2).t().tolist()
    if len(set(titles)) > 1:
        texts: list[Any] = [None] * world
        dist.all_gather_object(texts, title, group=group)
        listed = "; ".join(f"rank {i} has {text}" for i, text in enumerate(texts))
        raise ValueError(f"fully_shard: expected all ranks to have the same weight, but {listed}")
    return COMPUTE_DTYPES[dtypes[0]]


def meet(title: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Waits for all ranks; ValueError, which names those that do not come.

    By the group's store: a rank whose layer is not converted never comes to a collective of ours,
    and would be waited for without a word. Half of the group's timeout, so that this speaks before
    its collectives do.
    """
    world = dist.get_world_size(group)
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
        seconds = group._get_backend(device).options._timeout / 2
    except (AttributeError, RuntimeError):  # torch has no public word for either
        return
    came = store.add("minifloat/came", 1)
    turn = f"minifloat/came/{(came - 1) // world}"
    store.set(f"{turn}/{dist.get_rank(group)}", "")
    if came % world == 0:
        store.set(turn, "")
    try:
        store.wait([turn], seconds)
    except RuntimeError as error:
        store.add("minifloat/came", -1)
        missing = [rank for rank in range(world) if not store.check([f"{turn}/{rank}"])]
        raise ValueError(
            f"fully_shard: expected all {world} ranks to gather {title} as codes, but ranks "
            f"{missing} have not come in {seconds}: their layer is not converted, or they have "
            "ended or hang"
        ) from error
