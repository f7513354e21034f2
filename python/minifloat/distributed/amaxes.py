"""Amaxes of several ranks: bits of magnitudes order like the values, NaN above infinity."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def magnitude_bits(values: Tensor) -> Tensor:
    """Returns the bits of float32 magnitudes, as int32."""
    return values.abs().view(torch.int32)


def raise_to_largest(bits: Tensor, group: dist.ProcessGroup | None) -> None:
    """Raises each element to the largest of all ranks, in place, in one all-reduce."""
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)


def reduce_amaxes(amaxes: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the largest amaxes of all ranks, elementwise."""
    bits = magnitude_bits(amaxes)
    raise_to_largest(bits, group)
    return bits.view(torch.float32)
