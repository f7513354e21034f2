"""One direction of a matrix as codes: checks, copies, the transpose, and slices.

All sizes are from the spec (spec.py): code bytes a row, scale rows and columns, blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..private_torch import is_wrapper
from ..spec import Spec
from .quantized import Quantized, require_tensor
from .transforms import transpose_codes

TENSORS = ("codes", "scale", "amax")


def require_nearest(spec: str, allows_delayed: bool = True) -> Spec:
    """Parses a spec of a weight; ValueError where it does not quantize, or not to nearest.

    allows_delayed: whether the weight may scale by an amax of steps before.
    """
    parsed = Spec.parse(spec)
    if parsed.is_bf16:
        raise ValueError(
            "QuantizedTensor: expected a quantizing spec, got bf16; leave it out (None)"
        )
    if parsed.is_stochastic:
        raise ValueError(
            f"QuantizedTensor: weights round to nearest, got the stochastic {parsed.text}"
        )
    if parsed.is_delayed and not allows_delayed:
        raise ValueError(
            f"QuantizedTensor: weights scale by their own amax, got the delayed {parsed.text}"
        )
    return parsed


def require_memory(name: str, t: Tensor) -> None:
    """Raises ValueError where the storage of a dense tensor is freed or too short.

    torch's copies do not check this.
    """
    if is_wrapper(t) or t.device.type not in ("cpu", "cuda"):
        return
    if t.numel() == 0 or torch.compiler.is_compiling():
        return
    last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    needed = (t.storage_offset() + last + 1) * t.element_size()
    present = 0 if t._is_zerotensor() else t.untyped_storage().nbytes()
    if present < needed:
        raise ValueError(
            f"{name}: expected {needed} bytes of storage, got {present}: its memory is freed or "
            "resized"
        )


def tensors_of(spec: Spec, rows: int, cols: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Returns the dtype and shape of each tensor of a matrix read as (rows, cols); (0,): none."""
    return {
        "codes": (torch.uint8, (rows, spec.sizes(rows, cols).code_cols)),
        "scale": (spec.scale_dtype, spec.scale_shape(rows, cols)),
        "amax": (torch.float32, spec.amax_shape(rows)),
    }


def require_direction(name: str, part: Quantized, columnwise: bool, owns_codes: bool) -> None:
    """Raises ValueError or TypeError where a direction is no matrix. Kernels do not check again.

    owns_codes: False for gathered codes, whose memory FSDP2 frees and allocates again.
    """
    if not isinstance(part, Quantized):
        raise TypeError(f"{name}: expected Quantized, got {type(part).__name__}")
    if part.groups is not None:
        raise ValueError(f"{name}: expected a matrix without groups, got a grouped operand")
    is_matrix = isinstance(part.shape, (tuple, list)) and len(part.shape) in (2, 3)
    if not is_matrix or part.columnwise != columnwise:
        raise ValueError(
            f"{name}: expected a matrix with columnwise={columnwise}, got columnwise="
            f"{part.columnwise} and shape {part.shape}"
        )
    for field in TENSORS:
        require_tensor(f"{name}: {field}", getattr(part, field))
    *experts, rows, cols = part.shape
    if any(type(size) is not int for size in part.shape):  # symbolic sizes of a trace
        return
    spec = Spec.parse(part.spec)
    for field, (dtype, shape) in tensors_of(spec, rows, cols).items():
        t = getattr(part, field)
        if shape != (0,):
            shape = (*experts, *shape)
        wanted, got = (dtype, shape, part.codes.device), (t.dtype, tuple(t.shape), t.device)
        if wanted != got or not t.is_contiguous():
            of = " x ".join(map(str, part.shape))
            raise ValueError(
                f"{name}: expected {field} of {part.spec}, {of}, as contiguous {wanted}, got {got} "
                f"with strides {t.stride()}"
            )
        if owns_codes:
            require_memory(f"{name}: {field}", t)


def weight_shape(part: Quantized) -> tuple[int, ...]:
    """Returns the shape of W from that of one of its directions as read."""
    *experts, rows, cols = part.shape
    return *experts, *((cols, rows) if part.columnwise else (rows, cols))


def transposed(q: Quantized) -> Quantized:
    """Transposes an operand with 2D blocks to its other direction, without rounding."""
    *experts, rows, cols = q.shape
    spec = Spec.parse(q.spec)
    is_packed = spec.code_bits == 4
    codes = transpose_codes(q.codes, cols) if is_packed else q.codes.mT.contiguous()
    scale = q.scale.mT.contiguous() if spec.has_blocks else q.scale
    return Quantized(codes, scale, q.amax, q.spec, (*experts, cols, rows), not q.columnwise)


def map_tensors(q: Quantized, fn: Callable[[Tensor], Tensor]) -> Quantized:
    """Returns the operand with `fn` of its tensors, the table of groups included."""
    groups = None if q.groups is None else fn(q.groups)
    return replace(q, codes=fn(q.codes), scale=fn(q.scale), amax=fn(q.amax), groups=groups)


def slice_elements(q: Quantized, dim: int, start: int, end: int) -> Quantized:
    """Copies elements [start, end) along one dimension of the operand as read."""
    length, shape = q.shape[dim], list(q.shape)
    shape[dim] = end - start
    dim -= len(shape)  # -2: rows, -1: columns, -3: experts
    spec, (rows, cols) = Spec.parse(q.spec), q.shape[-2:]
    block = 1 if dim == -3 else spec.alignment[dim]
    if start % block or (end % block and end != length):
        raise ValueError(
            f"QuantizedTensor: expected a cut of {q.spec} at multiples of its block, {block}, got "
            f"[{start}, {end}) of {length}"
        )
    codes, scale, amax = q.codes, q.scale, q.amax
    if dim == -3:
        codes, scale, amax = codes[start:end], scale[start:end], amax[start:end]
    elif dim == -2:
        first, last = spec.sizes(start, cols), spec.sizes(end, cols)
        codes = codes[..., start:end, :]
        if spec.has_blocks:
            scale = scale[..., first.scale_rows : last.scale_rows, :]
        elif spec.amax_of == "row":
            scale = scale[..., start:end]
        if spec.amax_of == "row":
            amax = amax[..., start:end]
    else:
        first, last = spec.sizes(rows, start), spec.sizes(rows, end)
        codes = codes[..., first.code_cols : last.code_cols]
        if spec.has_blocks:
            scale = scale[..., first.scale_cols : last.scale_cols]
    sliced = replace(q, codes=codes, scale=scale, amax=amax, shape=tuple(shape))
    return map_tensors(sliced, lambda t: t.clone(memory_format=torch.contiguous_format))
