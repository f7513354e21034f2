"""Weights that are quantized from sharded masters, and the comparison of two."""

from __future__ import annotations

from typing import Any

import minifloat as mf
import pytest
import torch


def as_bytes(t):
    if t.dtype == torch.float32:  # torch's rounding to bfloat16 makes NaNs of different bits
        t = torch.where(t.isnan(), torch.nan, t)
    return t.reshape(-1).view(torch.uint8)


def assert_same_weight(got, want):
    """Compares amax, scales and codes of both directions, each by name."""
    for side in ("rowwise", "columnwise"):
        mine, theirs = getattr(got, side), getattr(want, side)
        assert (mine is None) == (theirs is None)
        for name in ("amax", "scale", "codes") if mine is not None else ():
            a, b = as_bytes(getattr(mine, name)), as_bytes(getattr(theirs, name))
            assert torch.equal(a, b), (
                f"{side} {name} of {got!r}: {int((a != b).sum())} bytes differ"
            )


def master_of(shape, seed, special=False):
    """Returns fp32 values over many binades, with zero blocks and odd ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-30, 3, shape, generator=generator).float())
    x[: shape[0] // 3, : shape[1] // 2] = 0
    if special:
        x[-1, -1] = [float("nan"), float("inf"), -float("inf")][seed % 3]
    return x


def empty_weight(shape, specs, dtype=torch.bfloat16):
    """Returns a weight of other values, so that a cast has to write every byte."""
    return mf.QuantizedTensor.from_tensor(torch.full(shape, -3.0, dtype=dtype), *specs)


def whole_cast(master, specs, dtype=torch.bfloat16):
    return mf.QuantizedTensor.from_tensor(master.to(dtype), *specs)


def require_refused(shape: tuple[int, ...], change: dict[str, Any], message: str) -> None:
    """Changes arguments of a legal call for an NVFP4 weight: an error, and nothing is written.

    change: by name; a function is called with the weight.
    """
    weight = empty_weight(shape, ("nvfp4/16x16", None))
    before = weight.rowwise.codes.clone()
    arguments = {
        "model_weights": [weight],
        "master_weights": [torch.zeros(weight.numel())],
        "start_offsets": [0],
        "group": None,
    }
    arguments |= {name: v(weight) if callable(v) else v for name, v in change.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        mf.distributed.quantize_master_weights(**arguments)
    assert torch.equal(weight.rowwise.codes, before)
