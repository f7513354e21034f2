"""Engines of another GPU on the one at hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from minifloat._native import ops


@contextmanager
def assumed_capability(major: int, minor: int) -> Iterator[None]:
    """Chooses products for GPUs of this compute capability, on every CUDA device."""
    ops.assume_capability(10 * major + minor)
    try:
        yield
    finally:
        ops.assume_capability(0)
