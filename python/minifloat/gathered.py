"""The whole weight on each rank, from the pieces that all ranks sent.

Rowwise codes are FSDP2's own memory, where those of all ranks follow each other; columnwise ones
are transposed from what travelled. Scales of blocks travel; others are of amaxes that all know.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .gather import Part
from .parts import is_blocked, sizes, transpose_codes_into
from .quantized import Quantized, raw_scale, scale_dtype
from .shard import Rows, block_places, code_bytes, grown, table_dtype, table_shape
from .tensor import QuantizedTensor


class GatheredWeight(QuantizedTensor):
    """What a gather brings. Its codes are FSDP2's memory, which a copy would keep from it."""

    owns_codes = False

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> GatheredWeight:
        whole = QuantizedTensor.__tensor_unflatten__(inner, context, outer_size, outer_stride)
        return GatheredWeight(whole.rowwise, whole.columnwise, whole.dtype)


@contextmanager
def unversioned(*tensors: Tensor) -> Iterator[None]:
    """Writes to what FSDP2 has gathered again: the same values, for those who saved them."""
    versioned = tuple(t for t in tensors if not t.is_inference())
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(versioned):
        yield


def whole_table(sent: Tensor, part: Part, rows: Rows, cols: int) -> Tensor:
    """The scales of W by blocks of rows, from those of all ranks: bytes (world, table_bytes)."""
    height, width = table_shape(part, rows, cols)
    table = sent.contiguous().view(table_dtype(part)).view(rows.world * height, width)
    where = block_places(part, rows, table.device)
    return table[: -(-grown(part, rows.n) // part.block)] if where is None else table[where]


def empty_direction(part: Part, n: int, cols: int, device: torch.device) -> Quantized:
    """Room for one direction of W (n, cols), as read."""
    shape = (cols, n) if part.columnwise else (n, cols)
    code_cols, _, *blocks = sizes(part.spec, *shape)
    codes = torch.empty(shape[0], code_cols, dtype=torch.uint8, device=device)
    each = {"row": shape[:1], "tensor": (), "": (0,)}[part.amaxes]
    scale_shape = blocks if is_blocked(part.spec) else each
    scale = torch.empty(scale_shape, dtype=scale_dtype(part.spec), device=device)
    amax = torch.empty(each, dtype=torch.float32, device=device)
    return Quantized(codes, scale, amax, part.spec, shape, part.columnwise)


def fill_codes(target: Quantized, sent: Part, codes: Tensor) -> None:
    """A direction's codes from the flat ones of a part: the same direction, or a square's other."""
    n = target.shape[1] if target.columnwise else target.shape[0]
    cols = target.shape[0] if target.columnwise else target.shape[1]
    width = code_bytes(sent, cols)
    rows = codes[: grown(sent, n) * width].view(-1, width)
    if target.columnwise:
        transpose_codes_into(target.codes, target.spec, rows, cols)
    elif target.codes.data_ptr() != rows.data_ptr():
        target.codes.copy_(rows)


def fill_scales(target: Quantized, sent: Part, table: Tensor | None, scale: Tensor, amax: Tensor) -> None:
    """table: scales by blocks of rows; None: `scale` is all ranks'."""
    if table is None:
        torch._foreach_copy_([target.scale, target.amax], [scale, amax])
    elif sent.amaxes == "row":
        target.scale.copy_(table[:, 0])
        target.amax.copy_(table[:, 1])
    else:
        raw_scale(target).copy_(table.t() if target.columnwise else table)
        target.amax.copy_(amax)


def poison(target: Quantized) -> None:
    """A direction that is not there: whatever reads it gets NaN."""
    target.scale.view(-1).view(torch.uint8).fill_(0xFF)  # NaN in float32, E8M0 and E4M3
