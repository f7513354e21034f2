"""Casts of tensors: the Python interface of the operators.

    q = quantize(x, "nvfp4")              x: (rows, cols) or (batch, rows, cols), fp32 or bf16
    q = quantize(x, "nvfp4", columnwise=True)      the transpose, which is not copied first

"As read" means x itself, or its transpose where columnwise is True. Codes, scales, amax and
positions are those of the matrix as read.

The rows of x may lie in groups, such as the tokens of each expert:

    groups = group_table(offs, x.shape[0])        offs: the end of each group
    q = quantize(x, "mxfp8", groups=groups)       groups along the rows of q

Columnwise each group begins at a multiple of a unit, and the operand has L columns as read. The
picture and the equations are in include/minifloat/core/groups.h.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from .._native import ops
from ..checks import require_int, require_text
from ..spec import Spec


def require_tensor(name: str, value: object) -> Tensor:
    """Returns `value`; TypeError where it is no Tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a Tensor, got {type(value).__name__}")
    return value


@dataclass(frozen=True, eq=False)
class Quantized:
    """An operand in low precision: codes, scales and active amax.

    Args:
        codes: uint8 (…, rows, bytes of a row). E2M1 has two codes a byte, the low nibble first.
        scale: float32, float8_e4m3fn or float8_e8m0fnu: the factors of codes, not swizzled. Its
            shape is (), (…, rows) or (…, rows of blocks, columns of blocks).
        amax: float32, the active amax: () or (batch) of a tensor, (…, rows) of rows; empty where
            only blocks have one. Of E groups: (E) of a tensor; (rows) of rows, or (E, rows) with
            groups along the contraction dimension.
        spec: the canonical operand spec.
        shape: (…, rows, cols) as read; (rows, L) with groups along the contraction dimension.
        columnwise: whether the operand as read is the transpose.
        groups: the table that group_table returned; None: no groups. Codes, scales and amaxes of
            no group are unspecified.
        group_unit: the unit of groups along the contraction dimension; 0: groups lie along rows.

    Example:
        >>> q = mf.tensor.quantize(torch.full((2, 64), 6.0), "mxfp8")
        >>> q.codes.shape, q.codes.dtype
        (torch.Size([2, 64]), torch.uint8)
        >>> q.scale
        tensor([[0.0156, 0.0156],
                [0.0156, 0.0156]], dtype=torch.float8_e8m0fnu)
        >>> q.amax  # only blocks have one
        tensor([])
    """

    codes: Tensor
    scale: Tensor
    amax: Tensor
    spec: str
    shape: tuple[int, ...]
    columnwise: bool = False
    groups: Tensor | None = None
    group_unit: int = 0

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Returns mf.tensor.dequantize of this operand."""
        return dequantize(self, dtype)

    def __reduce__(self) -> tuple[object, ...]:
        # The scale is pickled as bytes: pickle cannot read torch's one-byte float dtypes.
        description = (self.spec, tuple(self.shape), self.columnwise)
        groups = () if self.groups is None else (self.groups, self.group_unit)
        return _rebuild, (self.codes, raw_scale(self), self.amax, *description, *groups)


def _rebuild(
    codes: Tensor,
    raw: Tensor,
    amax: Tensor,
    spec: str,
    shape: tuple[int, ...],
    columnwise: bool,
    groups: Tensor | None = None,
    group_unit: int = 0,
) -> Quantized:
    scale = raw.view(Spec.parse(spec).scale_dtype)
    return Quantized(codes, scale, amax, spec, shape, columnwise, groups, group_unit)


torch.serialization.add_safe_globals([_rebuild])


class Operand(NamedTuple):
    """One direction of a matrix. A tensor is empty where the direction or its spec has none.

    Args:
        codes: as the product's engine reads them.
        scale: of the codes.
        amax: of the tensor, the groups or the rows.
        decoded: values in bfloat16, which exact products read instead of codes.
    """

    codes: Tensor
    scale: Tensor
    amax: Tensor
    decoded: Tensor

    @classmethod
    def none(cls, device: torch.device) -> Operand:
        """Returns a direction that no product reads."""
        float32 = torch.empty(0, dtype=torch.float32, device=device)
        return cls(float32.to(torch.uint8), float32, float32, float32.to(torch.bfloat16))

    @classmethod
    def of(cls, q: Quantized) -> Operand:
        """Returns the tensors of an operand that is not decoded."""
        return cls(q.codes, raw_scale(q), q.amax, q.codes.new_empty(0, dtype=torch.bfloat16))

    @property
    def has_codes(self) -> bool:
        """Whether there are the codes of a cast, not FP4 codes as FP8."""
        return self.codes.dim() > 1 and self.codes.dtype == torch.uint8


class Operands(NamedTuple):
    """Both directions of a matrix, as the ops quantize and layer_operands return them."""

    rowwise: Operand
    columnwise: Operand

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Operands:
        """Returns the operands of an op's eight tensors."""
        count = len(Operand._fields)
        return cls(Operand(*tensors[:count]), Operand(*tensors[count:]))

    def tensors(self) -> list[Tensor]:
        """Returns the eight tensors, as an op takes them."""
        return [*self.rowwise, *self.columnwise]


def quantize(
    x: Tensor,
    spec: str,
    *,
    columnwise: bool = False,
    amax: Tensor | None = None,
    seed: int = 0,
    stream: int = 0,
    origin: tuple[int, int] = (0, 0),
    groups: Tensor | None = None,
    group_unit: int = 0,
    row_ids: Tensor | None = None,
    first_expert: int = 0,
) -> Quantized:
    """Casts x to low precision, with equal bytes on every device.

    Args:
        x: (rows, cols) or (batch, rows, cols), float32 or bfloat16.
        spec: the operand spec.
        columnwise: whether to quantize the transpose, with blocks along x's rows.
        amax: float32, the active amax: () or (batch) of tensor and NVFP4 scaling, (…, rows), as
            read, of row scaling; None: the current amax of x. With groups, shaped as
            Quantized.amax.
        seed: key of the random bits of `+sr` and `+eden`, 64 bits with sign.
        stream: name of the use of the random bits, 64 bits with sign. Under `+eden` streams that
            differ in the lowest bit alone have the same signs of the transform: the two operands of
            a product take such a pair.
        origin: (row, col) of x within the matrix that x is a shard of. The codes are those that the
            whole matrix has there. So its column, as read, cuts no block, transform or byte of
            codes; nor may its row, where blocks have several, which is not checked: a matrix of its
            own may begin at any. Under `+sr` and `+eden` the column is a multiple of 16, and x must
            end within 2^32 rows and 2^36 columns of that matrix.
        groups: the table that group_table(offs, rows) returned, for x (rows, cols). Each group
            is cast as a matrix of its own. Rows past the last group are not read.
        group_unit: least unit of the columns of a columnwise operand: 16, 32, 64 or 128; 0: the
            spec's own.
        row_ids: int32 (rows), the row of the random counter for each row of a rowwise operand with
            groups; None: its index in x.
        first_expert: number e of the first group or matrix of a batch. The row of the random
            counter is e · rows + row, as read, in batches and columnwise groups.

    Returns:
        Codes, scales and active amax.

    Raises:
        TypeError, ValueError: an argument is not as expected. Nothing has been computed then.

    Source: docs/numerics.md, sections 1 to 7 and 10. MX: OCP Microscaling Formats (MX)
    Specification v1.0. NVFP4: Transformer Engine's order of operations. `+4over6`: arXiv
    2512.02010. `+eden`: arXiv 2601.22813.

    Example:
        >>> q = mf.tensor.quantize(torch.tensor([[0.1, 0.2, 0.4, 6.0] * 8]), "mxfp8")
        >>> q.codes[0, :4]
        tensor([ 77,  85,  93, 124], dtype=torch.uint8)
        >>> q.scale
        tensor([[0.0156]], dtype=torch.float8_e8m0fnu)
        >>> mf.tensor.dequantize(q)[0, :4]
        tensor([0.1016, 0.2031, 0.4062, 6.0000])
    """
    require_tensor("quantize: x", x)
    parsed, side = Spec.parse(spec), "col" if columnwise else "row"
    key = [require_int("quantize: seed", seed), 0]
    out = ops.quantize(
        x,
        "" if columnwise else parsed.text,
        parsed.text if columnwise else "",
        **{f"amax_{side}": amax, f"stream_{side}": require_int("quantize: stream", stream)},
        rng=torch.tensor(key, device=x.device) if parsed.is_stochastic else None,
        origin=list(origin),
        groups=groups,
        group_unit=group_unit,
        row_ids=row_ids,
        first_expert=first_expert,
    )
    q = read_direction(out, x, parsed.text, columnwise)
    if groups is None:
        return q
    if not columnwise:
        return replace(q, groups=groups)
    unit = max(group_unit, parsed.group_unit)
    length = q.codes.shape[-1] * (8 // parsed.code_bits)  # L, whole units
    return replace(q, shape=(x.shape[-1], length), groups=groups, group_unit=unit)


def read_direction(out: Sequence[Tensor], x: Tensor, spec: str, columnwise: bool) -> Quantized:
    """Returns one direction of the operator quantize's result for x without groups."""
    operands = Operands.of(out)
    codes, scale, active_amax, _ = operands.columnwise if columnwise else operands.rowwise
    *batch, rows, cols = x.shape
    shape = (*batch, cols, rows) if columnwise else (*batch, rows, cols)
    scale = scale.view(Spec.parse(spec).scale_dtype)
    return Quantized(codes, scale, active_amax, spec, shape, columnwise)


def quantize_both(
    x: Tensor, row_spec: str | None, col_spec: str | None
) -> tuple[Quantized | None, Quantized | None]:
    """Quantizes both directions of (…, rows, cols), which is read once."""
    out = ops.quantize(x, row_spec or "", col_spec or "")
    rowwise = read_direction(out, x, row_spec, False) if row_spec else None
    columnwise = read_direction(out, x, col_spec, True) if col_spec else None
    return rowwise, columnwise


def require_quantized(name: str, q: object) -> Quantized:
    """Returns `q`; TypeError where it is no Quantized, ValueError where its shape has other rows.

    The operators are told the number of columns alone, and check the bytes of a row by it.
    """
    if not isinstance(q, Quantized):
        raise TypeError(f"{name}: expected Quantized, got {type(q).__name__}")
    if not isinstance(q.shape, tuple) or len(q.shape) < 2:
        raise ValueError(f"{name}: expected shape (…, rows, cols), got {q.shape!r}")
    codes = tuple(require_tensor(f"{name}: codes", q.codes).shape)
    if codes[:-1] != q.shape[:-1]:
        raise ValueError(f"{name}: expected codes with the rows of shape {q.shape}, got {codes}")
    return q


def raw_scale(q: Quantized) -> Tensor:
    """Returns the scale in the operators' dtype: float32, or bytes."""
    return q.scale if q.scale.dtype == torch.float32 else q.scale.view(torch.uint8)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Tensor:
    """Computes the values of an operand, as read: code times scale, rounded to the dtype.

    Args:
        q: the operand.
        dtype: of the values, float32 or bfloat16.

    Returns:
        (…, rows, cols). An operand with `+rht` stays transformed: its last dimension is padded to
        whole transforms. Values of no group are unspecified.

    Raises:
        TypeError: `q` is no Quantized.
        ValueError: its tensors do not fit its spec and shape, or `dtype` is another one.

    Source: docs/numerics.md, section 1.

    Example:
        >>> q = mf.tensor.quantize(torch.tensor([[0.1, 0.2, 0.4, 6.0] * 8]), "mxfp4")
        >>> mf.tensor.dequantize(q)[0, :4]
        tensor([0.0000, 0.0000, 0.5000, 6.0000])
    """
    q = require_quantized("dequantize: q", q)
    return ops.dequantize(
        q.codes,
        q.scale,
        q.amax,
        q.spec,
        q.shape[-1],
        dtype=dtype,
        groups=q.groups,
        group_unit=q.group_unit,
    )


def amax(
    x: Tensor,
    spec: str,
    *,
    columnwise: bool = False,
    seed: int = 0,
    stream: int = 0,
    groups: Tensor | None = None,
) -> Tensor:
    """Computes the current amax of x, max |x| after the transform, as a spec needs it.

    Args:
        x: (rows, cols) or (batch, rows, cols), float32 or bfloat16.
        spec: an operand spec with tensor, row or NVFP4 scaling.
        columnwise: whether the operand as read is the transpose.
        seed, stream: those of the cast, as mf.tensor.quantize takes them, for `+eden`.
        groups: the table that mf.tensor.group_table(offs, rows) returned, for x (rows, cols).

    Returns:
        float32: () or (batch) of a tensor, (…, rows), as read, of rows. Of E groups: (E) of a
        tensor; of rows, (rows) rowwise and (E, rows as read) columnwise. Rows of no group are
        unspecified.

    Raises:
        TypeError: `spec` is no str.
        ValueError: `spec` is no spec, or only its blocks have an amax; `groups` is no table for x,
            or the spec has 2D blocks, which the end of a group would cut.

    Example:
        >>> x = torch.tensor([[1.0, -3.0], [0.5, 2.0]])
        >>> mf.tensor.amax(x, "e4m3/tensor"), mf.tensor.amax(x, "e4m3/row")
        (tensor(3.), tensor([3., 2.]))
    """
    require_tensor("amax: x", x)
    parsed = Spec.parse(require_text("amax: spec", spec))
    key = [require_int("amax: seed", seed), 0]
    return ops.amax(
        x,
        parsed.text,
        columnwise,
        rng=torch.tensor(key, device=x.device) if parsed.draws_signs else None,
        stream=require_int("amax: stream", stream),
        groups=groups,
    )
