"""Slices of one quantized direction on block boundaries.

All sizes are from the spec (spec.py): code bytes a row, scale rows and columns, blocks.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..spec import Sizes, Spec
from .quantized import Quantized, map_tensors


def cut(q: Quantized, dim: int, start: int, end: int) -> Quantized:
    """Copies elements [start, end) along rows (0) or columns (1) of the operand as read."""
    spec = Spec.parse(q.spec)
    length, block = q.shape[dim], spec.alignment[dim]
    if start % block or (end % block and end != length):
        raise ValueError(
            f"QuantizedTensor: expected a cut of {q.spec} at multiples of its block, {block}, got "
            f"[{start}, {end}) of {length}"
        )

    def sizes_to(n: int) -> Sizes:
        """Returns the sizes of the elements [0, n)."""
        return spec.sizes(*((n, q.shape[1]) if dim == 0 else (q.shape[0], n)))

    first, last = sizes_to(start), sizes_to(end)
    codes = q.codes[start:end] if dim == 0 else q.codes[:, first[0] : last[0]]
    scale, amax = q.scale, q.amax
    if scale.dim() == 2:
        window = slice(first[2 + dim], last[2 + dim])
        scale = scale[window] if dim == 0 else scale[:, window]
    elif scale.dim() == 1 and dim == 0:
        scale, amax = scale[start:end], amax[start:end]
    shape = (end - start, q.shape[1]) if dim == 0 else (q.shape[0], end - start)
    sliced = replace(q, codes=codes, scale=scale, amax=amax, shape=shape)
    return map_tensors(sliced, lambda t: t.clone(memory_format=torch.contiguous_format))
