"""One process's and several ranks' passes of an mf.MoE, and the operands of their products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from minifloat._native import ops
from minifloat.spec import Spec
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.same_bits import require_same_bytes


@dataclass
class Product:
    """One grouped product: operands as values of codes, scale and amax, and boundaries of groups.

    row_starts: where groups start among rows.
    starts: the same, among padded columns where groups lie along the contraction.
    """

    sides: list[tuple[str, Tensor, Tensor, Tensor]]  # spec, values, scale, amax
    codes: list[Tensor]  # of each side: codes, or values where the product has those
    table: Tensor
    row_starts: list[int]
    starts: list[int]
    is_contraction: bool

    @property
    def experts(self) -> int:
        return len(self.starts) - 1

    def part(self, side: int, expert: int) -> list[Tensor]:
        """Returns values, scale and amax of one expert's part of an operand."""
        spec, values, *factors = self.sides[side]
        starts = self.row_starts if Spec.parse(spec).is_bf16 else self.starts
        begin, end = starts[expert], starts[expert + 1]
        if side == 1 and not self.is_contraction:
            return [t[expert] for t in (values, *factors) if t.numel()]
        along = 1 if self.is_contraction else 0
        found = [values.narrow(along, begin, end - begin)]
        if Spec.parse(spec).is_bf16 or (along == 0 and begin == end):
            return found
        for t in factors:
            # The values of codes have the scales of blocks, which may be those of tokens, not rows.
            if t.numel() == 0 or (along == 0 and t.dim() == 2):
                continue
            is_of_group = t.shape[0] == self.experts and t.shape[0] != values.shape[0]
            if is_of_group:
                found.append(t[expert])
                continue
            step = 1 if along == 0 else values.shape[1] // t.shape[1]
            found.append(t.narrow(along, begin // step, (end - begin) // step))
        return found


class Products(TorchDispatchMode):
    """A record of the grouped products of a pass, in the order of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Product] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is ops.scaled_mm.default and kwargs.get("groups") is not None:
            self._record(args, kwargs)
        return out

    def _record(self, args: Any, kwargs: Any) -> None:
        table, unit, text = kwargs["groups"], kwargs.get("group_unit", 0), args[6]
        row = 0 if unit == 0 else {16: 1, 32: 2, 64: 3, 128: 4}[unit]
        sides, codes = [], []
        for i, spec in enumerate(text.split(",")[0].split("*")):
            values, scale, amax = (t.clone() for t in args[3 * i : 3 * i + 3])  # FSDP2 frees them
            codes.append(values)
            if values.dtype == torch.uint8:
                is_grouped = {"groups": table, "group_unit": unit} if values.dim() == 2 else {}
                cols = kwargs["k"]
                if unit > 0:
                    cols = values.shape[1] * 8 // Spec.parse(spec).code_bits
                values = ops.decode(values, scale, spec, cols, **is_grouped)
            sides.append((spec, values, scale, amax))
        starts = table[0].tolist(), table[row].tolist()
        self.found.append(Product(sides, codes, table, *starts, unit > 0))


def in_one_order(products: list[Product]) -> list[Product]:
    """Returns a pass's products with the gradient of w2 right after that of h.

    Backward computes it last where that takes less memory, which a rank may decide otherwise.
    """
    width = products[0].sides[0][1].shape[1]  # a bias, summed by a product of 8 rows, has less
    gradients = [p for p in products if p.is_contraction and p.sides[0][1].shape[0] >= width]
    after_h = len(gradients) + 1
    if products[-1] is not gradients[-1] or any(p is gradients[0] for p in products[: after_h + 1]):
        return products
    return [*products[:after_h], products[-1], *products[after_h:-1]]


def require_same_operands(found: list[Product], wanted: list[Product], first: int) -> int:
    """Compares a rank's products with one process's. Returns how many operands were compared."""
    assert len(found) == len(wanted), (len(found), len(wanted))
    compared = 0
    for i, (product, whole) in enumerate(zip(found, wanted)):
        assert product.is_contraction == whole.is_contraction, i
        for side in range(2):
            for e in range(product.experts):
                what = f"product {i}, operand {side}, expert {first + e}"
                parts = zip(product.part(side, e), whole.part(side, first + e))
                for j, (a, b) in enumerate(parts):
                    require_same_bytes(a, b, f"{what}, tensor {j}, {product.sides[side][0]}")
                compared += 1
    return compared
