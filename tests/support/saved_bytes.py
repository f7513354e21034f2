"""Bytes that a forward saves for backward, and the most that a step has at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.profiler import profile


def storage_of(t: Tensor) -> torch.UntypedStorage:
    return getattr(t, "_local_tensor", t).untyped_storage()


def saved_bytes(run: Callable[[], Tensor], known: Iterable[Tensor] = ()) -> int:
    """Counts the bytes of the storages that `run` saves, except those of `known` tensors."""
    known_storages = {storage_of(t).data_ptr() for t in known}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = storage_of(t)
        if storage.data_ptr() not in known_storages:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run()  # holds what is saved
    assert y.requires_grad
    return sum(saved.values())


def peak_bytes(run: Callable[[], object]) -> int:
    """Returns the most bytes that tensors on the CPU have at once in `run`, above those before."""
    with profile(profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    events = profiled.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))
