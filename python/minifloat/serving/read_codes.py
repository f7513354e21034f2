"""Quantized weights of checkpoints, as codes of this library.

                 codes               scales                          a factor of the matrix
    nvfp4        _packed, or bytes   _scale, E4M3, 1x16              _global_scale: divides
                                                                     _scale_2: multiplies
    mxfp4        _packed, _blocks    _scale, _scales, E8M0, 1x32
    mxfp8        E4M3                _scale, E8M0, 1x32
    FP8          E4M3                _scale, _scale_inv: of a tensor, of rows, 1x128, 128x128

A name's part before these ends is the parameter's: q_proj.weight, experts.down_proj. Which spec a
weight has follows from dtypes and shapes. Codes and block scales stay as they are.

A factor of NVFP4 is stored here as an amax A, of which the factor is 1 / (2688 / A), or 1 / (1536 /
A) under +4over6. `nvfp4_amax` finds the A whose values are the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ..spec import Spec
from ..tensor.quantized import Quantized, dequantize
from .read_checkpoint import Checkpoint

CODES = ("", "_packed", "_blocks")  # ends of names
SCALES = ("_scale", "_scale_inv", "_scales")
FACTORS = ("_global_scale", "_scale_2")
# Last parts of names of scales of activations and of caches, which a layer here finds itself.
ACTIVATIONS = (
    *("input_scale", "input_global_scale", "activation_scale", "output_scale"),
    *("q_scale", "k_scale", "v_scale"),
)
TENSOR, ROW, NVFP4 = "e4m3/tensor", "e4m3/row+exact", "nvfp4"
# Of NVFP4's specs, S · A (docs/numerics.md, section 5).
NUMERATORS = {NVFP4: 2688.0, "nvfp4+4over6": 1536.0}
NEIGHBOURS = 4  # amaxes that are tried on each side of the first, next to each other in float32
BLOCK = 128


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
        ignored: scales of activations.
    """

    weights: dict[str, Stored]
    plain: list[str]
    ignored: list[str]


def is_of_activations(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last in ACTIVATIONS or last.endswith("_activation_scale")


def read_names(checkpoint: Checkpoint) -> Names:
    """Finds the quantized weights of a checkpoint.

    Raises:
        ValueError: a weight has codes or scales of no known layout.
    """
    names = set(checkpoint.names)
    weights: dict[str, Stored] = {}
    taken: set[str] = set()
    for scale in sorted(names):
        for end in SCALES:
            parameter = scale.removesuffix(end)
            codes = next((parameter + c for c in CODES if parameter + c in names), None)
            if parameter == scale or codes is None:
                continue
            factors = [parameter + end for end in FACTORS if parameter + end in names]
            factor = factors[0] if factors else None
            weights[parameter] = stored(checkpoint, codes, scale, factor)
            taken |= {codes, scale, *factors}
    ignored = sorted(name for name in names - taken if is_of_activations(name))
    return Names(weights, sorted(names - taken - {*ignored}), ignored)


def stored(checkpoint: Checkpoint, codes: str, scale: str, factor: str | None) -> Stored:
    """Returns the weight that these tensors are."""
    dtypes = checkpoint.dtype(codes), checkpoint.dtype(scale)
    shape, scales = checkpoint.shape(codes), checkpoint.shape(scale)
    is_packed = dtypes[0] in (torch.uint8, torch.int8)
    if codes.endswith("_blocks"):
        shape = (*shape[:-2], prod(shape[-2:]))
    if is_packed:
        shape = (*shape[:-1], 2 * shape[-1])
    spec = spec_of(dtypes, shape, scales) if len(shape) in (2, 3) else None
    needs_factor = spec == NVFP4
    if spec is None or needs_factor != (factor is not None):
        beside = f" beside {factor}" if factor else ""
        raise checkpoint.error(
            f"{codes}: expected codes and scales of NVFP4, MXFP4, MXFP8 or "
            f"FP8 (of a tensor, of rows, blocks of 1x128 or 128x128), got {dtypes[0]} "
            f"{checkpoint.shape(codes)} with scales {dtypes[1]} {scales}{beside}"
        )
    return Stored(codes, scale, factor, spec, shape)


def spec_of(
    dtypes: tuple[object, object], shape: tuple[int, ...], scales: tuple[int, ...]
) -> str | None:
    """Returns the spec of a weight (…, N, K); None where this library has none."""
    *experts, n, k = shape
    codes, scale = dtypes
    grid = tuple(scales[len(experts) :]) if tuple(scales[: len(experts)]) == (*experts,) else None
    if grid is None:
        return None
    is_mx = scale in (torch.uint8, torch.float8_e8m0fnu)
    if codes in (torch.uint8, torch.int8):
        if scale == torch.float8_e4m3fn and grid == (n, k // 16) and k % 16 == 0:
            return NVFP4
        return "mxfp4" if is_mx and grid == (n, k // 32) and k % 32 == 0 else None
    if codes != torch.float8_e4m3fn:
        return None
    if is_mx and grid == (n, k // 32) and k % 32 == 0:
        return "mxfp8"
    if scale == torch.uint8 or scale not in (
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e8m0fnu,
    ):
        return None
    if prod(grid) == 1:
        return TENSOR
    if grid in ((n,), (n, 1)):
        return ROW
    blocks = -(-n // BLOCK), -(-k // BLOCK)
    if grid in (blocks, (blocks[0], 1, blocks[1], 1)):
        return "e4m3/128x128+exact"
    return "e4m3/1x128+exact" if grid == (n, blocks[1]) else None


# ---- tensors -------------------------------------------------------------------------------------


def read_part(checkpoint: Checkpoint, weight: Stored, spec: str) -> tuple[Tensor, Tensor]:
    """Reads the codes and scales of a weight in the layout of `spec`.

    spec: the weight's own, or ROW of one scale a tensor, which rows then repeat.
    """
    *experts, n, k = weight.shape
    codes = checkpoint.read(weight.codes).view(torch.uint8)
    codes = codes.reshape(*experts, n, -1)
    scale = checkpoint.read(weight.scale)
    wanted = Spec.parse(spec)
    if wanted.scale_dtype != torch.float32:
        return codes, scale.view(wanted.scale_dtype)
    scale = scale.float()
    if spec == ROW and weight.spec == TENSOR:
        return codes, scale.reshape((*experts, 1)).expand((*experts, n))
    return codes, scale.reshape((*experts, *wanted.scale_shape(n, k)))


def nvfp4_factor(checkpoint: Checkpoint, weight: Stored) -> tuple[list[float], bool]:
    """Returns NVFP4's factor of each matrix of a weight, and whether scales are divided by it.

    Raises:
        ValueError: it is not positive and finite, or not one a matrix.
    """
    assert weight.factor is not None
    values = checkpoint.read(weight.factor).float().flatten().tolist()
    if len(values) != prod(weight.shape[:-2]) or not all(0 < v < float("inf") for v in values):
        raise checkpoint.error(
            f"{weight.factor}: expected a positive factor for each matrix, got {values[:4]}"
        )
    return values, weight.factor.endswith(FACTORS[0])


@lru_cache(maxsize=4096)
def nvfp4_amax(spec: str, factor: float, divides: bool) -> float | None:
    """Finds the amax under which a spec's values are those of a checkpoint's factor.

    Args:
        spec: a key of NUMERATORS.
        factor: of a matrix, in float32.
        divides: whether block scales are divided by it: compressed-tensors computes code · (s /
            factor), ModelOpt code · (s · factor), both in float32, rounded to bfloat16.

    Returns:
        The amax: for every code and every block scale the values in bfloat16 have equal bits.
        None: there is none.
    """
    f = torch.tensor(factor)
    first = NUMERATORS[spec] / f if divides else NUMERATORS[spec] * f
    order = sorted(range(-NEIGHBOURS, NEIGHBOURS + 1), key=abs)
    bits = first.view(torch.int32) + torch.tensor(order, dtype=torch.int32)
    amax = bits.view(torch.float32)
    count = len(order)
    scales = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)  # but NaN
    codes = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    shape = (count, len(scales), 16)
    table = Quantized(
        codes.expand(count, len(scales), -1).contiguous(),
        scales.view(torch.uint8)[:, None].repeat(count, 1, 1).view(torch.float8_e4m3fn),
        amax,
        spec,
        shape,
    )
    s = scales.float()[:, None]
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    wanted = torch.cat([magnitudes, -magnitudes]) * (s / f if divides else s * f)
    found = dequantize(table, torch.bfloat16) == wanted.bfloat16()
    equal = found.flatten(1).all(1).nonzero()
    return amax[equal[0]].item() if len(equal) else None


def choose_nvfp4(factors: Iterable[tuple[float, bool]]) -> str | None:
    """Returns the spec that has an amax for each of these factors; None where no one has."""
    wanted = set(factors)
    specs = (s for s in NUMERATORS if all(nvfp4_amax(s, *f) is not None for f in wanted))
    return next(specs, None)
