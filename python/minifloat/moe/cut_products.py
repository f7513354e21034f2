"""Products of experts whose weights the ranks of a group have cut along I.

    x, routing weights     whole on each rank                   gradients: summed over the ranks
    w1, w3, gate, up, h    cut along I
    w2                     cut along I, its contraction
    y                      a sum over the ranks

Operands equal one process's, byte for byte (cut_casts.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._native import ops
from ..recipe import Recipe, operand_names
from ..spec import Spec
from ..tensor.operands import Operands
from .cut_casts import Cut, CutOperand, Random
from .row_codes import ACTIVE, CURRENT

COLUMNWISE = ("w/dgrad", "g/wgrad", "x/wgrad")  # operands that are read so


def specs_of(recipe: Recipe) -> dict[str, str]:
    """Returns the spec of each operand."""
    products = recipe.fprop, recipe.dgrad, recipe.wgrad
    return dict(zip(operand_names(), [text for p in products for text in (p.a, p.b)]))


@dataclass(frozen=True)
class CutProduct:
    """A product of experts whose weight (E, N, K) the ranks cut along N or K.

    Args:
        name: of the weight, for errors.
        recipe: the formats of the three products.
        cut: where the ranks cut the weight.
        rng: int64 (seed, count); None: nothing is stochastic.
        stream: of the product.
        history: float32 (6, E, 1 + length); None: nothing is delayed.
        weight: the four tensors of each direction of this rank's weight, as the op quantize returns
            them; None: cast by the product.
    """

    name: str
    recipe: Recipe
    cut: Cut
    rng: Tensor | None = None
    stream: int = 0
    history: Tensor | None = None
    weight: Sequence[Tensor] | None = None

    def multiply(
        self,
        a_MK: Tensor,
        b_EKN: Tensor,
        offs_E: Tensor,
        row_ids_M: Tensor | None = None,
        bias_EN: Tensor | None = None,
    ) -> Tensor:
        """Returns this rank's part of the rows times their matrices, differentiable."""
        return CutMultiply.apply(self, a_MK, b_EKN, offs_E, row_ids_M, bias_EN)

    def operand(self, place: str, values: Tensor, **at: Any) -> CutOperand:
        """Returns x, w or g (rows, columns) as the operand `place`, such as "x/fprop"."""
        text, columnwise = specs_of(self.recipe)[place], place in COLUMNWISE
        spec = Spec.parse(text)
        if spec.is_bf16:
            none = values.new_empty(0, dtype=torch.float32)
            return CutOperand(values.transpose(-2, -1) if columnwise else values, none, none)
        row = operand_names().index(place)
        if place[0] == "w" and self.weight is not None:
            found = CutOperand(*Operands.of(self.weight).direction(columnwise)[:3])
        else:
            found = self._cast(place, values, text, columnwise, row, at)
        if spec.is_delayed and self.history is not None:
            current = self.history[row, ..., CURRENT]
            torch.maximum(current, found.amax, out=current)
        return found

    def _cast(
        self, place: str, values: Tensor, text: str, columnwise: bool, row: int, at: dict[str, Any]
    ) -> CutOperand:
        spec, random, active = Spec.parse(text), None, None
        if spec.is_stochastic and self.rng is not None:
            random = Random(self.rng, ops.stream(place) ^ self.stream)
        if spec.is_delayed and self.history is not None:
            active = self.history[row, ..., ACTIVE]
        return self.cut.cast(
            place[0], values, text, columnwise, random=random, active_amax=active, **at
        )

    def cast_weight(self, values: Tensor, *, rowwise: bool, columnwise: bool) -> list[Tensor]:
        """Quantizes this rank's weight (E, N, K): four tensors each direction, or empty ones."""
        none = values.new_empty(0)
        out, specs = [], specs_of(self.recipe)
        for place, is_needed in (("w/fprop", rowwise), ("w/dgrad", columnwise)):
            row, text = operand_names().index(place), specs[place]
            if not is_needed or Spec.parse(text).is_bf16:
                out += [none] * 4
                continue
            out += [*self._cast(place, values, text, place in COLUMNWISE, row, {}), none]
        return out

    def require_specs(self, length: int) -> None:
        """Raises ValueError where blocks, transforms or random groups reach over a cut.

        Args:
            length: of each part of this rank's weight along I.
        """
        for place, text in specs_of(self.recipe).items():
            at = self.cut.dim_of(place[0])
            multiple = 1 if at is None else ops.shard_multiple(text, place in COLUMNWISE, at)
            if length % multiple:
                raise ValueError(
                    f"{self.name}: expected I over the ranks as a multiple of {multiple}, of "
                    f"{place} in {text}, got {length}"
                )


class CutMultiply(torch.autograd.Function):
    """The rows of a times the matrices b. Arguments: product, a, b, offs, row ids, bias."""

    @staticmethod
    def forward(
        ctx: Any,
        call: CutProduct,
        a: Tensor,
        b: Tensor,
        offs: Tensor,
        row_ids: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        table = ops.group_table(offs, a.shape[0])
        x = call.operand("x/fprop", a, groups=table, row_ids=row_ids)
        w = call.operand("w/fprop", matrices_of(call, b, a))
        ctx.call = call
        ctx.save_for_backward(a, b, offs, table, row_ids, bias)
        return ops.scaled_mm(
            *x,
            *w,
            str(call.recipe.fprop),
            k=a.shape[1],
            bias=bias,
            out_dtype=a.dtype,
            groups=table,
            zero_tail=True,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        call, (a, b, offs, table, row_ids, bias) = ctx.call, ctx.saved_tensors
        recipe, (_, needs_a, needs_b, _, _, needs_bias) = call.recipe, ctx.needs_input_grad
        g = grads[0].to(a.dtype).contiguous()
        da = db = dbias = None
        if needs_a:
            da = ops.scaled_mm(
                *call.operand("g/dgrad", g, groups=table, row_ids=row_ids),
                *call.operand("w/dgrad", matrices_of(call, b, a)),
                str(recipe.dgrad),
                k=g.shape[1],
                out_dtype=a.dtype,
                groups=table,
                zero_tail=True,
            )
        if needs_b:
            specs = recipe.wgrad.a, recipe.wgrad.b
            unit = max(Spec.parse(spec).group_unit for spec in specs)
            where = {"groups": table, "group_unit": unit}
            left, right = call.operand("g/wgrad", g, **where), call.operand("x/wgrad", a, **where)
            product, rows = str(recipe.wgrad), a.shape[0]
            dw = ops.scaled_mm(*left, *right, product, k=rows, out_dtype=b.dtype, **where)
            db = dw.transpose(-2, -1)
        if needs_bias:
            dbias = sums_of_groups(g, offs, bias)
        return None, da, db, None, None, dbias


def sums_of_groups(g: Tensor, offs: Tensor, bias: Tensor) -> Tensor:
    """Returns the gradient of the bias (E, N): the sum of each group's rows of g.

    The op takes matrices too, which this gradient does not depend on.
    """
    a, b = g.new_zeros(g.shape[0], 1), g.new_zeros(bias.shape[0], 1, bias.shape[1])
    needed = False, False, True
    return ops.scaled_grouped_mm_backward(g, a, b, offs, "bf16", needed, bias=bias)[2]


def matrices_of(call: CutProduct, b_EKN: Tensor, a: Tensor) -> Tensor:
    """Returns this rank's weight (E, N, K) in the dtype of a."""
    w = b_EKN.transpose(-2, -1)
    return w if call.weight is not None and not reads_values(call.recipe) else w.to(a.dtype)


def reads_values(recipe: Recipe) -> bool:
    """Tells whether a product reads the weight in bf16."""
    return any(Spec.parse(spec).is_bf16 for spec in (recipe.fprop.b, recipe.dgrad.b))
