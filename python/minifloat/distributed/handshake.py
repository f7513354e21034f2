"""Checks before a weight's first gather: all ranks take part, with one name, recipe and shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .._native import ops

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNKNOWN = -1
GATHER = "fully_shard: expected all {} ranks to gather {} as codes"


def agree(
    title: str, dtype: torch.dtype | None, group: dist.ProcessGroup, device: torch.device
) -> torch.dtype:
    """Agrees on the compute dtype of a weight's gathers.

    Args:
        title: the weight's name, recipe and shape.
        dtype: the compute dtype, on ranks with a full shard; None: FSDP2's hook does not pass it.
        group: the ranks that hold the shards.
        device: of the shard.

    Returns:
        The dtype of rank 0, whose shard is full.

    Raises:
        ValueError: on every rank, where titles differ or a rank is missing.
    """
    index = UNKNOWN if dtype is None else COMPUTE_DTYPES.index(dtype)
    world = dist.get_world_size(group)
    if world == 1:
        return COMPUTE_DTYPES[index]
    wait_for_all(title, group, device)
    sent = torch.tensor([ops.stream(title), index], device=device)
    received = sent.new_empty(world * 2)
    dist.all_gather_into_tensor(received, sent, group=group)
    titles, dtypes = received.view(-1, 2).t().tolist()
    require_equal(title, titles, group, "fully_shard: expected all ranks to have the same weight")
    return COMPUTE_DTYPES[dtypes[0]]


def require_equal(
    title: str, numbers: Sequence[int], group: dist.ProcessGroup, expected: str
) -> None:
    """Compares the numbers of the ranks' titles, on all ranks.

    Raises:
        ValueError: on every rank, where numbers differ: `expected`, and the titles of all.
    """
    if len(set(numbers)) > 1:
        texts: list[str | None] = [None] * len(numbers)
        dist.all_gather_object(texts, title, group=group)
        listed = "; ".join(f"rank {i} has {text}" for i, text in enumerate(texts))
        raise ValueError(f"{expected}, but {listed}")


def wait_for_all(
    title: str,
    group: dist.ProcessGroup,
    device: torch.device,
    expected: str = GATHER,
    change: str = "converted",
    key: str = "arrived",
) -> None:
    """Waits until all ranks of a group call this function.

    Ranks count themselves in the group's store. A collective would not do: a rank whose layer is
    not converted never calls it, and the others would hang. The wait is half of the group's
    timeout, so that the error is raised before one of its collectives.

    Args:
        title, group, device: as those of agree.
        expected: the beginning of the error, with fields for the number of ranks and the title.
        change: what a missing rank's layer may not have been.
        key: of the count in the store. Each use of this function has its own.

    Raises:
        ValueError: ranks are missing; the message names them.
    """
    world = dist.get_world_size(group)
    try:
        store = dist.distributed_c10d._get_process_group_store(group)
        seconds = group._get_backend(device).options._timeout / 2
    except (AttributeError, RuntimeError):  # torch has no public name for either
        return
    arrived = store.add(f"minifloat/{key}", 1)
    round_key = f"minifloat/{key}/{(arrived - 1) // world}"
    store.set(f"{round_key}/{dist.get_rank(group)}", "")
    if arrived % world == 0:
        store.set(round_key, "")
    try:
        store.wait([round_key], seconds)
    except RuntimeError as error:
        store.add(f"minifloat/{key}", -1)
        missing = [rank for rank in range(world) if not store.check([f"{round_key}/{rank}"])]
        raise ValueError(
            f"{expected.format(world, title)}, but ranks {missing} have not arrived in {seconds}: "
            f"their layer is not {change}, or they have ended or hang"
        ) from error
