"""Checks before a collective that all ranks of a group call it, and for the same layers.

Each rank has a title: the kind of the collective, and a text that describes the rank's layers. Each
rank adds a 26-bit hash of its title to one counter in the group's store. The last rank checks that
the sum is the number of ranks times its own hash.

    all titles are equal      all ranks continue, after a few messages to the store
    titles differ             all ranks read all titles from the store, and raise an error with them
    a rank has an error       its title is the error's message, and all ranks raise it
    a rank is missing         the others raise an error with its number, instead of a hang

A rank whose own checks fail must not raise alone, because the others would wait for it. So it puts
its error in place of its title.

Ranks use the store and no collective for this. Where ranks differ, a collective would pair values
of different layers, or wait for a missing rank. The store is on the host, so no handshake waits for
a device.

Handshakes of a group are numbered. The last rank in one deletes the keys of the one before.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import NoReturn, cast

import torch
import torch.distributed as dist

from .._native import ops

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
UNKNOWN = -1
GATHER = "fully_shard: expected all {} ranks to gather {} as codes"
NOT_CALLED = "they have not called it"
SAME_WEIGHT = "fully_shard: expected all ranks to have the same weight"
# The wait for a rank is half of the group's timeout, so that the error comes before one of the
# group's collectives, and no longer than this: ranks that compile come minutes apart.
LONGEST = timedelta(minutes=5)
TITLE_BITS, COUNT_BIT = 26, 44  # sums of titles of 2^18 ranks end below the count of ranks
SAME, DIFFERENT = "same", "different"  # what the store says at the end
FAULT = "an error"  # the kind of a rank that came to raise one

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
    absent: str = NOT_CALLED,
    number: int | None = None,
    fault: str | None = None,
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
        fault: why this rank cannot go on, which every rank then raises; None: it can.

    Returns:
        The text of each rank; None where all are equal.

    Raises:
        ValueError: ranks have faults, are missing, which the message names, or begin different
            exchanges.
    """
    world = dist.get_world_size(group)
    if not has_others(group):
        raise_fault(fault)
        return None
    if fault is not None:
        kind, text, number = FAULT, fault, None
    number = number_of(kind, text) if number is None else number
    store, done = _store_of(group), rounds.get(group, 0)
    key = f"minifloat/{done}"
    seconds = min(_timeout_of(group) / 2, LONGEST)
    end, missing = _wait_for_all(store, group, number, seconds)
    if missing:
        begin = expected.format(world, text) if fault is None else fault
        raise ValueError(
            f"{begin}, but ranks {missing} have not arrived in {seconds}: {absent}, or they have "
            "ended or hang"
        )
    rounds[group] = done + 1
    leftovers[group] = [key, f"{key}/end"]
    if end == SAME:
        raise_fault(fault)
        return None
    leftovers[group] += [f"{key}/read", f"{key}/all", *(f"{key}/{i}" for i in range(world))]
    found = _texts_of_ranks(store, key, dist.get_rank(group), world, f"{kind}\n{text}")
    raise_fault(_faults_of(found))
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
    absent: str = NOT_CALLED,
    differs: str,
    fault: str | None = None,
) -> None:
    """Waits for all ranks of a group, and raises ValueError on each where their texts differ.

    Args:
        kind, text, group, expected, absent, fault: as those of meet.
        differs: the beginning of the error where texts differ.
    """
    texts = meet(kind, text, group, expected=expected, absent=absent, fault=fault)
    if texts is not None:
        raise_different(texts, differs)


def has_others(group: dist.ProcessGroup) -> bool:
    """Tells whether a group has other ranks than this one."""
    # torch's backend "fake" has a size and no ranks.
    return dist.get_world_size(group) > 1 and dist.get_backend(group) != "fake"


def raise_fault(fault: str | None) -> None:
    """Raises a fault as a ValueError; None or "": there is none."""
    if fault:
        raise ValueError(fault)


def raise_on_all(error: Exception, group: object) -> NoReturn:
    """Raises an error of this rank's arguments on all ranks that wait for it in a handshake.

    Args:
        error: of the arguments.
        group: the ranks, as the caller got them. The default group stands for what is no group,
            because the other ranks may have passed None; but nobody waits for a rank that is not a
            member.

    Raises:
        ValueError: the error's text, on every rank. Where there are no other ranks, the error.
    """
    is_member = group is not dist.GroupMember.NON_GROUP_MEMBER
    if is_member and dist.is_available() and dist.is_initialized():
        ranks = group if isinstance(group, dist.ProcessGroup) else dist.group.WORLD
        ranks = cast(dist.ProcessGroup, ranks)
        if has_others(ranks):
            is_checked = isinstance(error, (TypeError, ValueError))
            fault = f"{error}" if is_checked else f"{type(error).__name__}: {error}"
            meet(FAULT, fault, ranks, expected=fault, fault=fault)
    raise error


def raise_different(texts: Sequence[str], differs: str) -> None:
    """Raises ValueError with the text of each rank."""
    listed = "; ".join(f"rank {i} has {text}" for i, text in enumerate(texts))
    raise ValueError(f"{differs}, but {listed}")


def call_to_handshake(group: dist.ProcessGroup, name: int, at: int | None) -> int | None:
    """Calls all ranks of a group to a handshake; waits for none of them.

    Args:
        group: the ranks. Others must look here to see the call.
        name: of the call, equal on all ranks.
        at: the step of the handshake; of several calls the first counts. None: look alone.

    Returns:
        The step of the call; None: nobody has called.
    """
    store, key = _store_of(group), f"minifloat/call/{name}"
    if at is not None:
        return int(store.compare_set(key, "", str(at)))
    return int(store.get(key)) if store.check([key]) else None


def remove_call(group: dist.ProcessGroup, name: int) -> None:
    """Removes a call from the store in the group's next handshake, if there was one."""
    leftovers.setdefault(group, []).append(f"minifloat/call/{name}")


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


def _wait_for_all(
    store: dist.Store, group: dist.ProcessGroup, number: int, seconds: timedelta
) -> tuple[str, list[int]]:
    """Adds this rank's number to the handshake's counter, and waits until all ranks have.

    Returns:
        SAME or DIFFERENT, and the ranks that have not come in time.
    """
    world, rank, done = dist.get_world_size(group), dist.get_rank(group), rounds.get(group, 0)
    key = f"minifloat/{done}"
    store.set(f"minifloat/rank/{rank}", str(done))
    arrived = store.add(key, (1 << COUNT_BIT) + number)
    if arrived >> COUNT_BIT == world:
        end = SAME if arrived & ((1 << COUNT_BIT) - 1) == world * number else DIFFERENT
        store.set(f"{key}/end", end)
        for left in leftovers.get(group, ()):
            store.delete_key(left)
        return end, []
    try:
        store.wait([f"{key}/end"], seconds)
    except RuntimeError:
        still = store.add(key, -((1 << COUNT_BIT) + number))
        # The last rank may have come at the same time. It then goes on, so this one does too: ranks
        # count the same handshakes.
        if still >> COUNT_BIT != world - 1:
            others = [i for i in range(world) if i != rank]
            # Ranks that came and gave up are named only where no other is missing.
            return DIFFERENT, [i for i in others if not _has_come(store, i, done)] or others
    return store.get(f"{key}/end").decode(), []


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


def _faults_of(found: Sequence[tuple[str, str]]) -> str:
    """Returns the faults among the ranks' titles, each once, with its ranks; "": there are none."""
    faults: dict[str, list[int]] = {}
    for rank, (kind, text) in enumerate(found):
        if kind == FAULT:
            faults.setdefault(text, []).append(rank)
    return "; ".join(f"{text} (ranks {ranks})" for text, ranks in faults.items())


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns the timeout of a group, the shortest where it has several backends."""
    backends = [group._get_backend(device) for device in group._device_types]
    found: timedelta = min(backend.options._timeout for backend in backends)
    return found


def _has_come(store: dist.Store, rank: int, done: int) -> bool:
    """Tells whether a rank has come to handshake `done`."""
    mark = f"minifloat/rank/{rank}"
    return store.check([mark]) and int(store.get(mark)) >= done
