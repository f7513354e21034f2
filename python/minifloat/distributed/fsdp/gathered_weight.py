"""GatheredWeight: the whole weight on each rank, in memory that FSDP2 frees and fills again.

Rowwise codes are a view of FSDP2's memory, which holds the codes of all ranks in order. Columnwise
codes and scales of blocks are inner tensors that FSDP2 frees with that memory. Other scales are
small and stay.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ...spec import Spec
from ...tensor.quantized import Quantized
from ...tensor.quantized_tensor import TENSORS, Context, QuantizedTensor


class GatheredWeight(QuantizedTensor):
    """A quantized weight whose codes are FSDP2's memory; a copy would hold on to that memory.

    The directions are never replaced: a compiled block reads their tensors from attributes at each
    call.
    """

    owns_codes = False

    def __init__(
        self,
        rowwise: Quantized | None,
        columnwise: Quantized | None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__(rowwise, columnwise, dtype)
        self.flattened = super().__tensor_flatten__()
        for name in self.flattened[0]:
            side, tensor = name[1:].split("_")
            self.__dict__[name] = getattr(getattr(self, side), tensor)

    @classmethod
    def _of_parts(
        cls, rowwise: Quantized | None, columnwise: Quantized | None, dtype: torch.dtype
    ) -> GatheredWeight:
        return cls(rowwise, columnwise, dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        return self.flattened

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Context, outer_size: object, outer_stride: object
    ) -> GatheredWeight:
        whole = QuantizedTensor.__tensor_unflatten__(inner, context, outer_size, outer_stride)
        return GatheredWeight(whole.rowwise, whole.columnwise, whole.dtype)


for _side in ("rowwise", "columnwise"):
    for _name in TENSORS:
        setattr(GatheredWeight, f"_{_side}_{_name}", None)  # instances set them


class ShardCast(Protocol):
    """The native cast of one direction of a weight's shards (torch/sharded/shard_cast.h)."""

    def fits(self, ranks: int) -> bool: ...

    def has_common_scale(self) -> bool: ...

    def new_operand(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...


def empty_direction(
    cast: ShardCast, spec: str, columnwise: bool, shape: tuple[int, int], codes: Tensor
) -> Quantized:
    """Allocates one direction of a weight.

    Args:
        cast: the native ShardCast of the direction.
        spec: the direction's operand spec.
        columnwise: whether the direction is columnwise.
        shape: (rows, cols) of the weight.
        codes: uint8, the gathered bytes of all ranks.

    Returns:
        The direction as read. Rowwise codes are a view of `codes`.
    """
    rows, cols = shape
    new_codes, scale, amax = cast.new_operand(codes)
    if not columnwise:
        new_codes = codes[: new_codes.numel()].view(new_codes.shape)
    scale = scale if scale.dtype == torch.float32 else scale.view(Spec.parse(spec).scale_dtype)
    read = (cols, rows) if columnwise else (rows, cols)
    return Quantized(new_codes, scale, amax, spec, read, columnwise)


def targets_of(whole: GatheredWeight) -> list[Tensor]:
    """Lists the tensors that the native batch fills: both directions' codes, scale and amax."""
    row, col = whole.rowwise, whole.columnwise
    assert row is not None
    assert col is not None
    return [row.codes, row.scale, row.amax, col.codes, col.scale, col.amax]
