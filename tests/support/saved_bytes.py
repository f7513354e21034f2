"""Bytes that a forward saves for backward, counted by torch's hooks of saved tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def storage_of(t: Tensor) -> torch.UntypedStorage:
    return getattr(t, "_local_tensor", t).untyped_storage()


def saved_bytes(run: Callable[[], Tensor], known: Iterable[Tensor]) -> int:
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
