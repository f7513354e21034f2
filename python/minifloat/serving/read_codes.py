"""Quantized weights of checkpoints, as codes of this library.

                 codes               scales                          a factor of the matrix
    nvfp4        _packed, or bytes   _scale, E4M3, 1x16              _global_scale: divides
                                                                     _scale_2: multiplies
    mxfp4        _packed, _blocks    _scale, _scales, E8M0, 1x32
    mxfp8        E4M3                _scale, E8M0, 1x32
    FP8          E4M3                _scale, _scale_inv: of a tensor, of rows, 1x128, 128x128

The layouts are those of schemes.py. A name's part before these ends is the parameter's:
q_proj.weight, experts.down_proj. Which spec a weight has follows from dtypes and shapes. Codes and
block scales stay as they are.

A factor of NVFP4 is stored here as an amax A, of which the factor is 1 / (2688 / A), or 1 / (1536 /
A) under +4over6. `nvfp4_amax` finds the A whose values are the checkpoint's, but for some ties.
"""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache
from math import inf, prod
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from ..spec import Spec
from ..tensor.directions import TENSORS
from ..tensor.quantized import Quantized, dequantize
from ..tensor.quantized_tensor import QuantizedTensor
from . import schemes
from .read_checkpoint import Source
from .schemes import DIVIDES, MULTIPLIES

CODES = ("", schemes.PACKED, schemes.BLOCKS)  # ends of names
SCALES = (schemes.SCALE, schemes.INVERSE, schemes.SCALES)
# Scales of activations and of caches, which a layer here finds itself, by the ends of their names.
ACTIVATIONS = (".input_scale", ".input_global_scale", "activation_scale", ".output_scale")
CACHES = (".q_scale", ".k_scale", ".v_scale")
TENSOR, ROW, NVFP4 = "e4m3/tensor", "e4m3/row+exact", "nvfp4"
NUMERATORS = {NVFP4: 2688.0, "nvfp4+4over6": 1536.0}  # S · A (docs/numerics.md, section 5)
NEIGHBOURS = 4  # amaxes that are tried on each side of the first, next to each other in float32
ONE = 0x38  # 1 in E4M3
# The first one that dtypes and shapes fit: one scale is that of the tensor.
LAYOUTS = {
    NVFP4: schemes.NVFP4,
    "mxfp4": schemes.WEIGHTS["e2m1", "mx"],
    "mxfp8": schemes.WEIGHTS["e4m3", "mx"],
    TENSOR: schemes.WEIGHTS["e4m3", "tensor"],
    ROW: schemes.WEIGHTS["e4m3", "row"],
    "e4m3/128x128+exact": schemes.WEIGHTS["e4m3", "block"],
    "e4m3/1x128+exact": schemes.FP8_GROUPS,
}
BF16_STEP = 2.0**-7  # from a number to the next one, over the number, at the most


class Stored(NamedTuple):
    """A quantized weight in a checkpoint: the names of its tensors, its spec and shape."""

    codes: str
    scale: str
    factor: str | None
    spec: str
    shape: tuple[int, ...]  # (N, K) or (E, N, K)


class Names(NamedTuple):
    """The tensors of a checkpoint.

    Args:
        weights: the quantized ones, by the parameter's name.
        plain: those in high precision.
        ignored: scales of activations and of caches.
    """

    weights: dict[str, Stored]
    plain: list[str]
    ignored: list[str]

    def of(self, name: str) -> list[str]:
        """Returns the tensors that have a parameter's values: codes and scales, or itself."""
        if (weight := self.weights.get(name)) is None:
            return [name]
        return [n for n in (weight.codes, weight.scale, weight.factor) if n is not None]


def read_names(source: Source, own: Container[str]) -> Names:
    """Finds the quantized weights of a checkpoint.

    Args:
        source: the checkpoint.
        own: names of the model's parameters and buffers, which are scales of no other tensor.

    Raises:
        ValueError: a weight has codes or scales of no known layout.
    """
    names = sorted(source.tensors)
    weights: dict[str, Stored] = {}
    taken: set[str] = set()
    for scale in (name for name in names if name not in own):
        for end in SCALES:
            parameter = scale.removesuffix(end)
            codes = next((parameter + c for c in CODES if parameter + c in source.tensors), None)
            if parameter in weights and codes is not None and parameter != scale:
                raise source.error(
                    f"{parameter}: expected scales in one tensor, got {weights[parameter].scale} "
                    f"and {scale}"
                )
            if parameter != scale and codes is not None:
                factors = [parameter + end for end in (DIVIDES, MULTIPLIES)]
                factor = next((name for name in factors if name in source.tensors), None)
                weights[parameter] = stored(source, codes, scale, factor)
                taken |= {codes, scale, factor or codes}
    left = [name for name in names if name not in taken]
    ends = ACTIVATIONS + CACHES
    ignored = [name for name in left if f".{name}".endswith(ends) and name not in own]
    return Names(weights, [name for name in left if name not in ignored], ignored)


def stored(source: Source, codes: str, scale: str, factor: str | None) -> Stored:
    """Returns the weight that these tensors are."""
    c, s = source.tensors[codes], source.tensors[scale]
    shape = tuple((c.flatten(-2) if codes.endswith(schemes.BLOCKS) else c).shape)
    if c.dtype in (torch.uint8, torch.int8):
        shape = (*shape[:-1], 2 * shape[-1])
    spec = spec_of(c.dtype, s.dtype, shape, tuple(s.shape)) if len(shape) in (2, 3) else None
    if spec is None or (spec == NVFP4) != (factor is not None):
        beside = f" beside {factor}" if factor else ""
        raise source.error(
            f"{codes}: expected codes and scales of NVFP4, MXFP4, MXFP8 or FP8 (of a tensor, of "
            f"rows, blocks of 1x128 or 128x128), got {c.dtype} {tuple(c.shape)} with scales "
            f"{s.dtype} {tuple(s.shape)}{beside}"
        )
    return Stored(codes, scale, factor, spec, shape)


def spec_of(
    codes: torch.dtype, scale: torch.dtype, shape: tuple[int, ...], scales: tuple[int, ...]
) -> str | None:
    """Returns the spec of a weight (…, N, K); None where this library has none."""
    *experts, n, k = shape
    grid = scales[len(experts) :]
    if list(scales[: len(experts)]) != experts:
        return None
    fits = (
        spec
        for spec, scheme in LAYOUTS.items()
        if scheme.reads(codes, scale) and scheme.has_grid(grid, n, k)
    )
    return next(fits, None)


def read_part(source: Source, weight: Stored, spec: str) -> tuple[Tensor, Tensor]:
    """Reads the codes and scales of a weight in the layout of `spec`.

    spec: the weight's own, or ROW of one scale a tensor, which rows then repeat.
    """
    *experts, n, k = weight.shape
    codes = source.tensors[weight.codes].view(torch.uint8).reshape((*experts, n, -1))
    scale, wanted = source.tensors[weight.scale], Spec.parse(spec)
    if wanted.scale_dtype != torch.float32:
        return codes, scale.view(wanted.scale_dtype)
    if spec == ROW and weight.spec == TENSOR:
        return codes, scale.float().reshape((*experts, 1)).expand((*experts, n))
    return codes, scale.float().reshape((*experts, *wanted.scale_shape(n, k)))


def problem_of_scales(source: Source, weight: Stored) -> str | None:
    """Returns why the scales of a weight give it no values; None where they do.

    What a layer computes of NaN is NaN, and no cast gives scales with a sign.
    """
    scales = source.tensors[weight.scale]
    if scales.dtype == torch.uint8:
        scales = scales.view(schemes.E8M0)
    values = scales.float()
    bad = values[~((values >= 0) & values.isfinite())]
    if not bad.numel():
        return None
    return f"{weight.scale} has {bad.numel()} scales that are negative, Inf or NaN"


def nvfp4_factors(source: Source, weight: Stored) -> list[tuple[float, bool]]:
    """Returns NVFP4's factor of each matrix of a weight, and whether scales are divided by it.

    Raises:
        ValueError: it is not positive and finite, or not one a matrix.
    """
    assert weight.factor is not None
    values = source.tensors[weight.factor].float().flatten().tolist()
    if len(values) != prod(weight.shape[:-2]) or not all(0 < value < inf for value in values):
        raise source.error(
            f"{weight.factor}: expected a positive factor for each matrix, got {values[:4]}"
        )
    return [(value, weight.factor.endswith(DIVIDES)) for value in values]


def crc_of(weight: QuantizedTensor) -> int:
    """Returns the CRC-32 of all bytes of a weight of codes, which a write to them changes."""
    crc = 0
    for part in weight.directions:
        for name in TENSORS:
            data = getattr(part, name).detach().cpu().contiguous().flatten().view(torch.uint8)
            crc = crc32(data.numpy(), crc)
    return crc


class Amax(NamedTuple):
    """An amax of NVFP4 that stands for a checkpoint's factor.

    Args:
        value: it.
        ties: the pairs of a code and a block scale, of 2,032, whose value in bfloat16 is the next
            one to the checkpoint's: values halfway between two, but for a rounding in float32.
    """

    value: float
    ties: int


@lru_cache(maxsize=4096)
def nvfp4_amax(spec: str, factor: float, divides: bool) -> Amax | None:
    """Finds the amax under which a spec's values are those of a checkpoint's factor.

    Args:
        spec: a key of NUMERATORS.
        factor: of a matrix, in float32.
        divides: whether block scales are divided by it: compressed-tensors computes code · (s /
            factor), ModelOpt code · (s · factor), both in float32, rounded to bfloat16.

    Returns:
        That with the fewest ties, and of those one whose factor, as mf.export writes it, is the
        checkpoint's. None: the factor is out of an amax's range.
    """
    f = torch.tensor(factor)
    first = NUMERATORS[spec] / f if divides else NUMERATORS[spec] * f
    order = sorted(range(-NEIGHBOURS, NEIGHBOURS + 1), key=abs)
    amax = (first.view(torch.int32) + torch.tensor(order, dtype=torch.int32)).view(torch.float32)
    scale = torch.arange(0x7F, dtype=torch.uint8)  # all but NaN
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    table = Quantized(
        codes.repeat(len(order), len(scale), 1),
        scale[:, None].repeat(len(order), 1, 1).view(torch.float8_e4m3fn),
        amax,
        spec,
        (len(order), len(scale), 16),
    )
    s = scale.view(torch.float8_e4m3fn).float()[:, None]
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    wanted = torch.cat([magnitudes, -magnitudes]) * (s / f if divides else s * f)
    wanted, found = wanted.bfloat16().float(), dequantize(table, torch.bfloat16).float()
    is_near = ((found - wanted).abs() <= wanted.abs() * BF16_STEP).flatten(1).all(1)
    counts = (found != wanted).flatten(1).sum(1).tolist()
    near = [i for i, fits in enumerate(is_near.tolist()) if fits]
    ours = dequantize(table, torch.float32)[:, ONE, 2]  # of scale 1 and code 1
    is_other = ((ours.reciprocal() if divides else ours) != f).tolist()
    best = min(near, key=lambda i: (counts[i], is_other[i]), default=None)
    return None if best is None else Amax(amax[best].item(), counts[best])
