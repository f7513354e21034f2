"""Prints digests of casts and layers as JSON, for a comparison with another processor's.

    PYTHONPATH=python python -m tests.support.print_digests

`make test-aarch64-torch` runs it on this machine and under an emulator of aarch64. The inputs come
from integers: torch.randn has other last bits under other instruction sets.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import sys
from collections.abc import Iterable

import minifloat as mf
import torch
from minifloat._native import ops
from torch import Tensor

from tests.support.exact_sums import integers
from tests.support.same_bits import bits
from tests.support.specs import SPECS, flagged

FLAGS = [r + t for r in ("", "+sr") for t in ("", "+rht", "+rht32", "+rht64", "+rht128")]
SHAPES = [(1, 15), (17, 130), (33, 129), (128, 256), (2, 40, 70)]
KINDS = ["normal", "bits", "rare"]
RNG = [-(2**62) + 12345, 7, -987654321]


def values(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Makes test data.

    normal    sums of four uniform integers
    bits      any bits: every exponent, infinities, NaN, denormals
    rare      one such number in 500, so that most blocks are finite
    """
    g = torch.Generator().manual_seed(len(kind) + sum(shape))
    normal = torch.randint(-(2**20), 2**20, (4, *shape), generator=g).sum(0) * 2.0**-19
    any_bits = torch.randint(-(2**31), 2**31, shape, generator=g).int().view(torch.float32)
    picked = torch.randint(500, shape, generator=g) == 0
    share = {"normal": torch.zeros_like(picked), "bits": torch.ones_like(picked), "rare": picked}
    return torch.where(share[kind], any_bits, normal).to(dtype)


def digest(tensors: Iterable[Tensor | None]) -> str:
    """Returns SHA-256 of shapes, dtypes and bytes. fp32 NaNs are equal, as in same_bits.py."""
    total = hashlib.sha256()
    for t in tensors:
        if t is None:
            continue
        if t.dtype == torch.float32:
            t = torch.where(t.isnan(), torch.nan, t)
        total.update(f"{t.dtype} {list(t.shape)}".encode())
        total.update(bytes(bits(t).flatten().view(torch.uint8).tolist()))
    return total.hexdigest()


def casts() -> Iterable[tuple[str, str]]:
    """Digests codes, scales, amaxes and decoded values of both directions."""
    rng = torch.tensor(RNG)
    for spec, shape in itertools.product([flagged(s, f) for s in SPECS for f in FLAGS], SHAPES):
        for dtype, kind in itertools.product((torch.bfloat16, torch.float32), KINDS):
            x = values(kind, shape, dtype)
            given = {"rng": rng} if "+sr" in spec or "+eden" in spec else {}
            if "+delayed" in spec:
                given |= {f"amax_{side}": torch.full(shape[:-2], 3.0) for side in ("row", "col")}
            results = ops.quantize(x, spec, spec, decoded_row=True, decoded_col=True, **given)
            yield f"{spec} of {kind} {dtype} {list(shape)}", digest(results)


def layers() -> Iterable[tuple[str, str]]:
    """Digests the output and the gradients of a linear layer whose sums are exact."""
    for recipe in mf.presets():
        if "nvfp4" in recipe:  # its tensor scale is no power of two
            continue
        x, w, b = (integers(i, *shape) for i, shape in enumerate([(3, 20, 64), (48, 64), (48,)]))
        state = {"amax_history": torch.full((6, 4), 7.0)} if recipe == "fp8_delayed" else {}
        for dtype in (torch.bfloat16, torch.float32):
            inputs = [t.to(dtype).requires_grad_() for t in (x, w, b)]
            y = mf.linear(*inputs, recipe, rng=torch.tensor(RNG), **state)
            y.backward(integers(4, *y.shape).to(dtype))
            yield f"{recipe} layer of {dtype}: y", digest([y])
            for name, t in zip("xwb", inputs):
                yield f"{recipe} layer of {dtype}: gradient of {name}", digest([t.grad])


def main() -> int:
    digests = dict(itertools.chain(casts(), layers()))
    json.dump({"machine": platform.machine(), "digests": digests}, sys.stdout, indent=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
