"""The tensors of a cast: both directions of a matrix, four tensors each.

The ops quantize and layer_operands return the eight tensors in this order. linear and
scaled_grouped_mm take those of layer_operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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

    @property
    def is_decoded(self) -> bool:
        """Whether there are values, for exact products. There may be no codes then."""
        return self.decoded.dim() > 1

    @property
    def has_codes(self) -> bool:
        """Whether there are the codes of a cast, not FP4 codes as FP8."""
        return self.codes.dim() > 1 and self.codes.dtype == torch.uint8


class Operands(NamedTuple):
    """Both directions of a matrix."""

    rowwise: Operand
    columnwise: Operand

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Operands:
        """Returns the operands of an op's eight tensors."""
        count = len(Operand._fields)
        return cls(Operand(*tensors[:count]), Operand(*tensors[count:]))

    def direction(self, columnwise: bool) -> Operand:
        return self.columnwise if columnwise else self.rowwise

    def tensors(self) -> list[Tensor]:
        """Returns the eight tensors, as an op takes them."""
        return [*self.rowwise, *self.columnwise]
