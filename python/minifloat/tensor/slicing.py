"""Slices of one quantized direction on block boundaries.

All sizes are from the spec (spec.py): code bytes a row, scale rows and columns, blocks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..spec import Sizes, Spec
from .quantized import Quantized, map_tensors


def slice_elements(q: Quantized, dim: int, start: int, end: int) -> Quantized:
    """Copies elements [start, end) along one dimension of the operand as read."""
    dim -= len(q.shape)  # -2: rows, -1: columns, -3: experts
    length = q.shape[dim]
    shape = tuple(end - start if i == dim else n for i, n in zip(range(-len(q.shape), 0), q.shape))
    if dim == -3:
        amax = q.amax[start:end] if q.amax.dim() > 0 and q.amax.shape != (0,) else q.amax
        sliced = replace(
            q, codes=q.codes[start:end], scale=q.scale[start:end], amax=amax, shape=shape
        )
        return map_tensors(sliced, lambda t: t.clone(memory_format=torch.contiguous_format))
    spec = Spec.parse(q.spec)
    block = spec.alignment[dim]
    if start % block or (end % block and end != length):
        raise ValueError(
            f"QuantizedTensor: expected a cut of {q.spec} at multiples of its block, {block}, got "
            f"[{start}, {end}) of {length}"
        )

    def sizes_to(n: int) -> Sizes:
        """Returns the sizes of the elements [0, n)."""
        return spec.sizes(*((n, q.shape[-1]) if dim == -2 else (q.shape[-2], n)))

    first, last = sizes_to(start), sizes_to(end)
    codes = q.codes[..., start:end, :] if dim == -2 else q.codes[..., first[0] : last[0]]
    scale, amax = q.scale, q.amax
    if spec.has_blocks:
        window = slice(first[dim], last[dim])
        scale = scale[..., window, :] if dim == -2 else scale[..., window]
    elif spec.amax_of == "row" and dim == -2:
        scale, amax = scale[..., start:end], amax[..., start:end]
    sliced = replace(q, codes=codes, scale=scale, amax=amax, shape=shape)
    return map_tensors(sliced, lambda t: t.clone(memory_format=torch.contiguous_format))
