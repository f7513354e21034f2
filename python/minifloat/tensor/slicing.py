"""One quantized direction: moved, cut on block boundaries, transposed exactly.

All geometry is the spec's (spec.py): code bytes a row, scale rows and columns, blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .._native import ops
from ..spec import Sizes, Spec
from .quantized import Quantized, require_tensor, transpose_codes


def require_memory(name: str, t: Tensor) -> None:
    """ValueError where a contiguous tensor's storage is freed or too short: torch itself does not
    look before it copies."""
    if t.device.type not in ("cpu", "cuda") or type(t) is not Tensor:
        return
    needed = (t.storage_offset() + t.numel()) * t.element_size() if t.numel() > 0 else 0
    held = 0 if t._is_zerotensor() else t.untyped_storage().nbytes()
    if held < needed:
        raise ValueError(
            f"{name}: expected {needed} bytes of storage, got {held}: its memory is freed or "
            "resized"
        )


def require_part(name: str, part: Quantized, columnwise: bool, owns_codes: bool) -> None:
    """ValueError or TypeError where a part is no whole matrix: what reads its memory trusts it.

    owns_codes: False for what a gather brings, whose memory FSDP2 frees and fills again.
    """
    if not isinstance(part, Quantized):
        raise TypeError(f"{name}: expected Quantized, got {type(part).__name__}")
    is_matrix = isinstance(part.shape, (tuple, list)) and len(part.shape) == 2
    if not is_matrix or part.columnwise != columnwise:
        raise ValueError(
            f"{name}: expected a matrix with columnwise={columnwise}, got columnwise="
            f"{part.columnwise} and shape {part.shape}"
        )
    for field in ("codes", "scale", "amax"):
        require_tensor(f"{name}: {field}", getattr(part, field))
    rows, cols = part.shape
    if type(rows) is not int or type(cols) is not int:  # symbolic: a trace, of tensors as they are
        return
    spec = Spec.parse(part.spec)
    for field, t, dtype, shape in (
        ("codes", part.codes, torch.uint8, (rows, spec.sizes(rows, cols).code_cols)),
        ("scale", part.scale, spec.scale_dtype, spec.scale_shape(rows, cols)),
        ("amax", part.amax, torch.float32, spec.amax_shape(rows)),
    ):
        if t.dtype != dtype or t.shape != shape or not t.is_contiguous():
            raise ValueError(
                f"{name}: expected {field} of {part.spec}, {rows} x {cols}, as contiguous {dtype} "
                f"{shape}, got {t.dtype} {tuple(t.shape)} with strides {t.stride()}"
            )
        if t.device != part.codes.device:
            raise ValueError(f"{name}: expected {field} on {part.codes.device}, got {t.device}")
        if owns_codes:
            require_memory(f"{name}: {field}", t)


def transpose_codes_into(out: Tensor, spec: str, codes: Tensor, cols: int) -> Tensor:
    """Codes of a matrix read (rows, cols), written to `out` as its transpose has them."""
    ops.transpose_many([codes], [out], [codes.shape[0], cols, Spec.parse(spec).code_bits])
    return out


def transposed(q: Quantized) -> Quantized:
    """A square operand as its other direction holds it, without a rounding."""
    rows, cols = q.shape
    is_packed = Spec.parse(q.spec).code_bits == 4
    codes = transpose_codes(q.codes, cols) if is_packed else q.codes.t().contiguous()
    scale = q.scale.t().contiguous() if q.scale.dim() == 2 else q.scale
    return Quantized(codes, scale, q.amax, q.spec, (cols, rows), not q.columnwise)


def map_tensors(q: Quantized, fn: Callable[[Tensor], Tensor]) -> Quantized:
    return replace(q, codes=fn(q.codes), scale=fn(q.scale), amax=fn(q.amax))


def same_layout(a: Quantized | None, b: Quantized | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.spec == b.spec and a.shape == b.shape


def copy_bytes(target: Quantized, source: Quantized) -> None:
    for name in ("codes", "scale", "amax"):
        getattr(target, name).copy_(getattr(source, name))


def cut(q: Quantized, dim: int, start: int, end: int) -> Quantized:
    """Elements [start, end) along rows (0) or columns (1) of the operand as read, as a copy."""
    spec = Spec.parse(q.spec)
    length, block = q.shape[dim], spec.unit(dim)
    if start % block or (end % block and end != length):
        raise ValueError(
            f"QuantizedTensor: expected a cut of {q.spec} at multiples of its block, {block}, got "
            f"[{start}, {end}) of {length}"
        )

    def before(n: int) -> Sizes:
        """Sizes of the part that ends at n."""
        return spec.sizes(*((n, q.shape[1]) if dim == 0 else (q.shape[0], n)))

    first, last = before(start), before(end)
    codes = q.codes[start:end] if dim == 0 else q.codes[:, first[0] : last[0]]
    scale, amax = q.scale, q.amax
    if scale.dim() == 2:
        window = slice(first[2 + dim], last[2 + dim])
        scale = scale[window] if dim == 0 else scale[:, window]
    elif scale.dim() == 1 and dim == 0:
        scale, amax = scale[start:end], amax[start:end]
    shape = (end - start, q.shape[1]) if dim == 0 else (q.shape[0], end - start)
    piece = replace(q, codes=codes, scale=scale, amax=amax, shape=shape)
    return map_tensors(piece, lambda t: t.clone(memory_format=torch.contiguous_format))
