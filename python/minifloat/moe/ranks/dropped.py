"""Rows that were dropped past a capacity, and copies of numbers to the host."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def to_host(numbers: Tensor) -> list[int]:
    """Copies numbers to the host, and waits for the device.

    No other function of a forward does.
    """
    return numbers.tolist()


def is_capturing(t: Tensor) -> bool:
    """Tells whether a CUDA graph captures what is done with the tensor now."""
    return t.is_cuda and torch.cuda.is_current_stream_capturing()


def warn_of_dropped(links: Sequence[Any]) -> None:
    """Ends a step: warns of rows that were dropped since the step before, after one copy.

    A step that a CUDA graph captures does neither; the next step outside a graph does.

    Args:
        links: objects of parallel_experts.ExpertParallel.
    """
    counted = [link for link in links if link.dropped is not None]
    counters = [link.dropped for link in counted]
    if not counters or is_capturing(counters[0]):
        return
    numbers = to_host(torch.cat([counter.to(counters[0].device) for counter in counters]))
    for link, counter, number in zip(counted, counters, numbers):
        counter.zero_()
        link.step_dropped = number
    dropped = [(link, number) for link, number in zip(counted, numbers) if number]
    if dropped:
        listed = ", ".join(
            f"{n} rows of {link.name} (capacity {link.capacity})" for link, n in dropped
        )
        warnings.warn(
            f"mf.step: rank {dropped[0][0].rank} dropped {listed}: more rows than the capacity "
            "went to one rank, and added nothing to their tokens",
            stacklevel=3,
        )
