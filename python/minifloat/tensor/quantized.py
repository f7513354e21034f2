"""Casts, transforms and products of plain tensors: the operators with Python's manners.

    q = mf.quantize(x, "nvfp4")              x: (rows, cols) or (batch, rows, cols), fp32 or bf16
    q = mf.quantize(x, "nvfp4", columnwise=True)      of the transpose, from x's own memory order
    y = mf.scaled_mm(a, b)                   a (m, k) · b (n, k)ᵀ, both read K-major

"As read" means x itself, or its transpose where columnwise: codes, scales, amax and positions are
those of that matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._native import ops
from ..checks import require_int, require_text
from ..spec import Spec

HADAMARD_SIGNS = 0xD7E8  # one bit a point, repeated every 16: set means -1


def require_tensor(name: str, value: Any) -> Tensor:
    """The tensor; TypeError where it is none."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(value).__name__}")
    return value


@dataclass(frozen=True, eq=False)
class Quantized:
    """An operand in low precision.

    codes       uint8 (…, rows, bytes a row); E2M1 packs two a byte, the low nibble first
    scale       what codes are multiplied by: float32, float8_e4m3fn or float8_e8m0fnu; one a
                tensor, row or block, never swizzled
    amax        float32, the amax in force of a tensor or row rule; empty for the others
    shape       of the operand as read, (…, rows, cols)
    """

    codes: Tensor
    scale: Tensor
    amax: Tensor
    spec: str
    shape: tuple[int, ...]
    columnwise: bool = False

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        return dequantize(self, dtype)

    def __reduce__(self) -> tuple[Any, ...]:
        # The scale as bytes: plain pickle cannot read back torch's one-byte float dtypes.
        what = (self.spec, tuple(self.shape), self.columnwise)
        return _rebuild, (self.codes, raw_scale(self), self.amax, *what)


def _rebuild(
    codes: Tensor, raw: Tensor, amax: Tensor, spec: str, shape: tuple[int, ...], columnwise: bool
) -> Quantized:
    return Quantized(codes, raw.view(Spec.parse(spec).scale_dtype), amax, spec, shape, columnwise)


torch.serialization.add_safe_globals([_rebuild])


def quantize(
    x: Tensor,
    spec: str,
    *,
    columnwise: bool = False,
    amax: Tensor | None = None,
    seed: int = 0,
    stream: int = 0,
    origin: tuple[int, int] = (0, 0),
) -> Quantized:
    """x in low precision: a pure function of the arguments, on every device the same bytes.

    amax: float32, () or (batch,) for tensor and NVFP4 scaling, (…, rows) for row scaling; None: x's
    own. seed, stream: 64-bit ints, of stochastic rounding (`+sr`). origin: (row, col) of x within
    the whole that it is a shard of; the shard gets the bytes that the whole would have there. Under
    `+sr` the whole has at most 2^32 rows and 2^36 columns, as read: the random bits repeat beyond.

    Raises ValueError or TypeError, before anything is computed, where an argument does not fit.
    """
    require_tensor("quantize: x", x)
    parsed = Spec.parse(spec)
    rng = None
    seed = require_int("quantize: seed", seed)
    if parsed.is_stochastic:
        rng = torch.tensor([seed, 0], dtype=torch.int64, device=x.device)
    row, col = ("", parsed.text) if columnwise else (parsed.text, "")
    out = ops.quantize(
        x,
        row,
        col,
        amax_row=None if columnwise else amax,
        amax_col=amax if columnwise else None,
        rng=rng,
        stream_row=stream,
        stream_col=stream,
        origin=list(origin),
    )
    return read_direction(out, x, parsed.text, columnwise)


def read_direction(out: Sequence[Tensor], x: Tensor, spec: str, columnwise: bool) -> Quantized:
    """One direction of what the operator quantize gave for x."""
    codes, scale, used = out[4:7] if columnwise else out[:3]
    *batch, rows, cols = x.shape
    shape = (*batch, cols, rows) if columnwise else (*batch, rows, cols)
    return Quantized(codes, scale.view(Spec.parse(spec).scale_dtype), used, spec, shape, columnwise)


def require_quantized(name: str, q: Any) -> Quantized:
    """The operand; TypeError where it is none, ValueError where its shape is not of matrices."""
    if not isinstance(q, Quantized):
        raise TypeError(f"{name}: expected Quantized, got {type(q).__name__}")
    if not isinstance(q.shape, tuple) or len(q.shape) < 2:
        raise ValueError(f"{name}: expected shape (…, rows, cols), got {q.shape!r}")
    return q


def raw_scale(q: Quantized) -> Tensor:
    """The scale as the operators hand it over."""
    return q.scale if q.scale.dtype == torch.float32 else q.scale.view(torch.uint8)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of the codes, as read: (…, rows, cols), float32 or bfloat16.

    A transformed operand (`+rht`) stays transformed, its last dimension grown to whole transforms.
    """
    q = require_quantized("dequantize: q", q)
    return ops.dequantize(q.codes, q.scale, q.amax, q.spec, q.shape[-1], dtype=dtype)


def amax(x: Tensor, spec: str, *, columnwise: bool = False) -> Tensor:
    """max |x| as the spec needs it: () or (batch,) for a tensor, (…, rows) for rows, as read."""
    return ops.amax(x, require_text("amax: spec", spec), columnwise)


def hadamard(
    x: Tensor, points: int = 16, *, columnwise: bool = False, signs: int = HADAMARD_SIGNS
) -> Tensor:
    """The randomised Hadamard transform along the columns (columnwise: of the transpose), in bf16.

    points: 16, 32, 64 or 128; the transformed dimension grows to a multiple of it.
    """
    return ops.hadamard(x, points, columnwise, signs)


def swizzle_scales(scale: Tensor, *, offs: Tensor | None = None, groups: str = "") -> Tensor:
    """One-byte scales in the 128x4 tiled layout that block-scaled products of the hardware read.

    scale: (rows, cols) or (batch, rows, cols). groups: "m" or "k" cuts rows or columns at offs, the
    groups' ends (int32), and lays out each alone.
    """
    return ops.swizzle_scales(scale, offs=offs, groups=groups)


def unswizzle_scales(
    swizzled: Tensor, rows: int, cols: int, *, offs: Tensor | None = None, groups: str = ""
) -> Tensor:
    """The inverse of swizzle_scales: (rows, cols), or (batch, rows, cols)."""
    return ops.unswizzle_scales(swizzled, rows, cols, offs=offs, groups=groups)


def transpose_codes(codes: Tensor, cols: int) -> Tensor:
    """Packed 4-bit codes (…, rows, ⌈cols / 2⌉) as those of the transpose, (…, cols, ⌈rows / 2⌉)."""
    return ops.transpose_codes(codes, cols)


def _operand(name: str, x: Quantized | Tensor) -> tuple[Tensor, Tensor, Tensor, str, int]:
    if isinstance(x, Quantized):
        require_quantized(f"scaled_mm: {name}", x)
        return x.codes, x.scale, x.amax, x.spec, x.shape[-1]
    if not isinstance(x, Tensor):
        raise TypeError(
            f"scaled_mm: expected {name} as Quantized or Tensor, got {type(x).__name__}"
        )
    if x.dim() != 2:
        raise ValueError(f"scaled_mm: expected {name} of 2 dimensions, got {x.dim()}")
    none = x.new_empty(0, dtype=torch.float32)
    return x, none, none, "bf16", x.shape[-1]


def scaled_mm(
    a: Quantized | Tensor,
    b: Quantized | Tensor,
    *,
    fast: bool = False,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """a (m, k) · b (n, k)ᵀ + bias, rounded once. A plain tensor is an operand in high precision."""
    a_codes, a_scale, a_amax, a_spec, k = _operand("a", a)
    b_codes, b_scale, b_amax, b_spec, b_k = _operand("b", b)
    if k != b_k:
        raise ValueError(f"scaled_mm: expected a (m, k) and b (n, k), got k = {k} and {b_k}")
    product = f"{a_spec}*{b_spec}" + (",fast" if fast else "")
    return ops.scaled_mm(
        a_codes,
        a_scale,
        a_amax,
        b_codes,
        b_scale,
        b_amax,
        product,
        k=k,
        bias=bias,
        out_dtype=out_dtype,
    )


# ---- one direction -------------------------------------------------------------------------------


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
