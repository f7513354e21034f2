"""Inputs of golden cases, and digests of their results.

Inputs are integers that a hash of the element's index makes, times powers of two. They use no
generator of torch, whose stream may change, and no function whose last bits depend on a library.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from tests.support.same_bits import bits, on_cpu

MASK = 0xFFFFFFFF
INF, NAN = math.inf, math.nan
# Zeros, ties of every format, the largest values and their neighbours, denormals, scales' edges.
EDGES = (
    *(0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 17.0, 19.0, 448.0, 464.0, 57344.0),
    *(2.0**-9, 3 * 2.0**-10, 2.0**-16, 3 * 2.0**-17, 2.0**-126, 2.0**-133, 3 * 2.0**-149, 2.0**127),
)
KINDS = ("bell", "ties", "edges", "bits", "rows")


def hashed(count: int, seed: int) -> Tensor:
    """Returns int64 (count): 32 bits of a hash of (index, seed). 64-bit products wrap."""
    x = (torch.arange(count) + seed * 0x3C6EF372) * 0x9E3779B1 & MASK
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        x = (x ^ x >> 16) * factor & MASK
    return x ^ x >> 16


def integers(low: int, high: int, shape: Sequence[int], seed: int) -> Tensor:
    """Returns float32 integers from `low` to `high`."""
    found = hashed(math.prod(shape), seed) % (high - low + 1) + low
    return found.float().view(*shape)


@lru_cache(maxsize=512)
def values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Makes data.

    bell     sums of four uniform integers, times 2^-15
    ties     halves and quarters of small integers: many are halfway between two codes
    edges    EDGES of either sign among bell's, 2^-20 to 2^11 as large by rows
    bits     any bits of float32: every exponent, infinities, NaN
    rows     bell's; one element in some rows is Inf or NaN, and some rows are zeros
    """
    count = math.prod(shape)
    words = hashed(4 * count, seed).view(4, count)
    bell = ((words & 0xFFFF).sum(0) - 2 * 0xFFFF).float().view(*shape) * 2.0**-15
    if kind == "bell":
        x = bell
    elif kind == "ties":
        x = integers(-24, 24, shape, seed) * 0.25
    elif kind == "bits":
        x = words[0].to(torch.int32).view(torch.float32).view(*shape)
    else:
        index = torch.arange(count).view(*shape)
        rows = index // shape[-1]
        if kind == "edges":
            picked = torch.tensor(EDGES)[(words[1] >> 4) % len(EDGES)].view(*shape)
            sign = 1 - 2 * (words[2] & 1).float().view(*shape)
            exponents = (rows * 7 % 32 - 20).int()
            is_edge = (words[3] % 5 == 0).view(*shape)
            x = torch.where(is_edge, picked * sign, torch.ldexp(bell, exponents))
        else:
            x = torch.where(rows % 5 == 3, torch.zeros_like(bell), bell)
            at = index % shape[-1] == rows * 11 % shape[-1]
            x = torch.where(at & (rows % 8 == 1), INF, x)
            x = torch.where(at & (rows % 8 == 6), NAN, x)
    return x.to(dtype)


def any_bytes(shape: Sequence[int], seed: int) -> Tensor:
    return (hashed(math.prod(shape), seed) >> 8 & 0xFF).to(torch.uint8).view(*shape)


def planted(shape: Sequence[int], amax: float, seed: int) -> Tensor:
    """Makes integers below amax, with +-amax once in each 16 of every row and of every column.

    All blocks, rows and the tensor have the same amax. Three in four integers are -4 to 4, so that
    sums of their products stay small; the others need more digits than a code has.
    """
    near, far = (
        integers(-4, 4, shape, seed),
        integers(1 - int(amax), int(amax) - 1, shape, seed + 1),
    )
    words = hashed(near.numel(), seed + 2).view(*shape)
    rows = torch.arange(shape[-2]).view(-1, 1) + torch.arange(shape[-1])
    x = torch.where(words % 4 == 0, far, near)
    return torch.where(rows % 16 == 0, amax * (1 - 2 * (words >> 9 & 1).float()), x)


def outliers(shape: tuple[int, int], large: str, zero: str, seed: int) -> Tensor:
    """Makes bell's values with stripes of 8 rows or columns, 2^14 as large or zero.

    large, zero: letters of stripes: rows "a" (0 to 8) and "b" (8 to 16), columns "A" and "B". A
    stripe that is large in one operand of a product is zero in the other. So it decides scales, by
    the rule of each spec, and adds nothing: past 16 rows and columns results show those scales.
    """
    x = values("bell", shape, torch.float32, seed).clone()
    for letters, factor in ((large, 2.0**14), (zero, 0.0)):
        for letter in letters:
            begin = 8 * (letter in "bB")
            stripe = slice(begin, begin + 8)
            part = x[:, stripe] if letter.isupper() else x[stripe]
            part.mul_(factor)
    return x


# ---- digests -------------------------------------------------------------------------------------


def digest(tensors: Iterable[Tensor | None]) -> str:
    """Returns 16 digits of SHA-256 of dtypes, shapes and bytes. Float NaNs are equal."""
    total, given = hashlib.sha256(), list(tensors)
    found = iter(on_cpu([t for t in given if t is not None]))
    for each in given:
        if each is None:
            total.update(b"none")
            continue
        t = next(found)
        if t.dtype in (torch.float32, torch.bfloat16):  # processors have different NaN bits
            t = torch.where(t.isnan(), torch.nan, t)
        total.update(f"{t.dtype} {list(t.shape)}".encode())
        total.update(bits(t).numpy().tobytes())
    return total.hexdigest()[:16]


def weighted_sum(t: Tensor) -> float:
    """Returns Σ c v / sqrt(Σ v²), c integers from -3 to 3: a number whose size is about 2.

    Two results that differ in the order of fp32 sums alone have sums that differ by less than
    2^-16. Another random stream, scale or code changes some elements by percents.
    """
    v = t.detach().cpu().double().flatten()
    c = integers(-3, 3, (v.numel(),), 77).double()
    norm = v.square().sum().sqrt().item()
    return (c * v).sum().item() / norm if norm else 0.0
