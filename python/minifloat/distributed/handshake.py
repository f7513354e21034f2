"""The handshake of ranks before an exchange: all of them come to it, and all with one text.

    title -> 26 bits, added to one counter of the group's store; the last rank to come compares
    all have one title           each rank goes on: a few messages to the store, no collective
    titles differ                all ranks are there, so they exchange their texts by the store
    a rank is missing            the others raise an error with its number, before their exchange

No collective of values would do: where ranks differ, it would pair values of different layers, or
wait for a rank that never comes. The store is the host's, so no handshake waits for a device.

The handshakes of a group are numbered, and each takes the place of the one before in the store: the
last rank that comes to a handshake deletes what the one before has left.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from .._native import ops

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNKNOWN = -1
GATHER = "fully_shard: expected all {} ranks to gather {} as codes"
SAME_WEIGHT = "fully_shard: expected all ranks to have the same weight"
# The wait for a rank is half of the group's timeout, so that the error comes before one of the
# group's collectives, and no longer than this: ranks that compile come minutes apart.
LONGEST = timedelta(minutes=5)
TITLE_BITS, COUNT_BIT = 26, 44  # sums of titles of 2^18 ranks end below the count of ranks
SAME, DIFFERENT = "same", "different"  # what the store says at the end

# The number of handshakes that each group has had, and the keys that the last one has left.
rounds: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
leftovers: weakref.WeakKeyDictionary[dist.ProcessGroup, list[str]] = weakref.WeakKeyDictionary()


def number_of(kind: str, text: str) -> int:
    """Returns the bits of a title that ranks compare."""
    bits: int = ops.stream(f"{kind}\n{text}")
    return bits & ((1 << TITLE_BITS) - 1)


def meet(
    kind: str,
    text: str,
    group: dist.ProcessGroup,
    *,
    expected: str,
    absent: str,
    number: int | None = None,
) -> list[str] | None:
    """Waits until all ranks of a group come to this handshake, and compares their texts.

    Args:
        kind: of the exchange that follows, for the error where ranks begin different ones.
        text: this rank's.
        group: the ranks.
        expected: the beginning of the error of a missing rank, with fields for the number of ranks
            and the text.
        absent: why a rank may be missing, besides an end of it.
        number: of kind and text, where it is known: number_of's.

    Returns:
        The text of each rank; None where all are equal.

    Raises:
        ValueError: ranks are missing, which the message names, or begin different exchanges.
    """
    world = dist.get_world_size(group)
    if world == 1 or dist.get_backend(group) == "fake":  # torch's backend without other ranks
        return None
    store = _store_of(group)
    number = number_of(kind, text) if number is None else number
    done = rounds.get(group, 0)
    key, mark = f"minifloat/{done}", f"minifloat/rank/{dist.get_rank(group)}"
    store.set(mark, str(done))
    arrived = store.add(key, (1 << COUNT_BIT) + number)
    if arrived >> COUNT_BIT == world:
        end = SAME if arrived & ((1 << COUNT_BIT) - 1) == world * number else DIFFERENT
        store.set(f"{key}/end", end)
        for left in leftovers.get(group, ()):
            store.delete_key(left)
    else:
        seconds = min(_timeout_of(group) / 2, LONGEST)
        try:
            store.wait([f"{key}/end"], seconds)
        except RuntimeError as error:
            store.add(key, -((1 << COUNT_BIT) + number))
            others = [rank for rank in range(world) if rank != dist.get_rank(group)]
            # Ranks that came and gave up are named only where no other is missing.
            missing = [rank for rank in others if not _has_come(store, rank, done)] or others
            raise ValueError(
                f"{expected.format(world, text)}, but ranks {missing} have not arrived in "
                f"{seconds}: {absent}, or they have ended or hang"
            ) from error
        end = store.get(f"{key}/end").decode()
    rounds[group] = done + 1
    leftovers[group] = [key, f"{key}/end"]
    if end == SAME:
        return None
    leftovers[group] += [f"{key}/read", f"{key}/all", *(f"{key}/{i}" for i in range(world))]
    found = _texts_of_ranks(store, key, dist.get_rank(group), world, f"{kind}\n{text}")
    if len({of_rank for of_rank, _ in found}) > 1:
        listed = "; ".join(f"rank {i}: {what} {title}" for i, (what, title) in enumerate(found))
        raise ValueError(f"expected all ranks to begin the same exchange, but {listed}")
    return [title for _, title in found]


def require_same(
    kind: str,
    text: str,
    group: dist.ProcessGroup,
    *,
    expected: str,
    absent: str,
    differs: str,
    number: int | None = None,
) -> None:
    """Waits for all ranks of a group, and raises ValueError on each where their texts differ.

    Args:
        kind, text, group, expected, absent, number: as those of meet.
        differs: the beginning of the error where texts differ.
    """
    texts = meet(kind, text, group, expected=expected, absent=absent, number=number)
    if texts is not None:
        raise_different(texts, differs)


def raise_different(texts: Sequence[str], differs: str) -> None:
    """Raises ValueError with the text of each rank."""
    listed = "; ".join(f"rank {i} has {text}" for i, text in enumerate(texts))
    raise ValueError(f"{differs}, but {listed}")


def require_equal(
    title: str, numbers: Sequence[int], group: dist.ProcessGroup, expected: str
) -> None:
    """Compares the numbers of the ranks' titles, which an exchange has brought, on all ranks.

    Raises:
        ValueError: on every rank, where numbers differ: `expected`, and the titles of all.
    """
    if len(set(numbers)) > 1:
        texts: list[str] = [""] * len(numbers)
        dist.all_gather_object(texts, title, group=group)
        raise_different(texts, expected)


def agree(title: str, dtype: torch.dtype | None, group: dist.ProcessGroup) -> torch.dtype:
    """Agrees on the compute dtype of a weight's gathers.

    Args:
        title: the weight's name, recipe and shape.
        dtype: the compute dtype, on ranks with a full shard; None: FSDP2's hook does not pass it.
        group: the ranks that hold the shards.

    Returns:
        The dtype of rank 0, whose shard is full.

    Raises:
        ValueError: on every rank, where titles differ or a rank is missing.
    """
    index = UNKNOWN if dtype is None else COMPUTE_DTYPES.index(dtype)
    answers = meet(
        "the first gather of",
        f"{title}\n{index}",
        group,
        expected=GATHER,
        absent="their layer is not converted",
    )
    if answers is None:
        return COMPUTE_DTYPES[index]
    titles, dtypes = zip(*(answer.rsplit("\n", 1) for answer in answers))
    if len(set(titles)) > 1:
        raise_different(titles, SAME_WEIGHT)
    return COMPUTE_DTYPES[int(dtypes[0])]


def _store_of(group: dist.ProcessGroup) -> dist.Store:
    store: dist.Store = dist.distributed_c10d._get_process_group_store(group)
    return store


def _texts_of_ranks(
    store: dist.Store, key: str, rank: int, world: int, text: str
) -> list[tuple[str, str]]:
    """Returns (kind, text) of each rank, once all have read them: a rank that raises may end.

    A collective would not do: over NCCL a rank that ends fails one that another still waits for.
    """
    store.set(f"{key}/{rank}", text)
    texts = [store.get(f"{key}/{i}").decode() for i in range(world)]
    if store.add(f"{key}/read", 1) == world:
        store.set(f"{key}/all", "")
    store.wait([f"{key}/all"])
    return [(kind, rest) for kind, _, rest in (each.partition("\n") for each in texts)]


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns the timeout of a group, the shortest where it has several backends."""
    backends = [group._get_backend(device) for device in group._device_types]
    found: timedelta = min(backend.options._timeout for backend in backends)
    return found


def _has_come(store: dist.Store, rank: int, done: int) -> bool:
    """Tells whether a rank has come to handshake `done`."""
    mark = f"minifloat/rank/{rank}"
    return store.check([mark]) and int(store.get(mark)) >= done
