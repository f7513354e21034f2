"""Casts x and the gradient g for dispatch="codes", on the ranks that have the tokens.

An operand that travels as codes has the bytes that it has in one process with the tokens of all
ranks. So the amax of an expert's rows is reduced over the ranks before the cast. Random bits come
from the pair ids among all ranks.

Shape suffixes: M rows that this rank sends, E experts of all ranks, n of this one, T tokens, k
slots, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..._native import ops
from ...nn.grouped_product import ProductCall
from ...nn.registry import distributed_functions
from ...nn.state.recipe_state import ExpertRange
from ...recipe import Recipe, operand_names
from ...spec import Spec
from ...tensor.quantized import Operand
from .dispatch import ExchangePlan

X, G = "x/fprop", "g/dgrad"  # the operands that can travel as codes
ACTIVE, CURRENT = 0, 1  # columns of an amax history


def operand_spec(name: str, recipe: str | Recipe) -> Spec:
    """Returns the spec of X or G in a recipe."""
    products = Recipe(recipe)
    return Spec.parse(products.fprop.a if name == X else products.dgrad.a)


def why_not_codes(name: str, calls: Sequence[ProductCall]) -> str | None:
    """Returns why an operand travels as values under dispatch="codes"; None: it travels as codes.

    Args:
        name: X or G.
        calls: those of the products that read the operand.
    """
    spec = operand_spec(name, calls[0].recipe)
    if spec.is_bf16:
        return "the recipe has bf16 there"
    if any(Recipe(call.recipe) != Recipe(calls[0].recipe) for call in calls):
        return "w1 and w3 have two recipes"
    if len(calls) > 1 and (spec.is_stochastic or spec.is_delayed):
        return "w1 and w3 each quantize it, with random bits or a scale of their own"
    if spec.draws_signs:
        return "the signs of its transform are those of one product"
    return None


@dataclass(frozen=True)
class OperandCast:
    """Casts one operand on the ranks of its tokens, before its rows are dispatched.

    Args:
        name: X or G.
        call: the arguments of the product that reads it.
        experts: those of this rank, and the group over which amaxes are reduced.
    """

    name: str
    call: ProductCall
    experts: ExpertRange

    @property
    def spec(self) -> Spec:
        return operand_spec(self.name, self.call.recipe)

    def row_fields(self, width: int) -> list[tuple[torch.dtype, int]]:
        """Returns the fields of a row of `width` elements: codes, then its scales and its amax."""
        spec, sizes = self.spec, self.spec.sizes(1, width)
        fields = [(torch.uint8, sizes.code_cols)]
        if spec.has_blocks:
            one_byte = spec.scale_dtype.itemsize == 1
            fields.append((torch.uint8 if one_byte else torch.float32, sizes.scale_cols))
        if spec.amax_of == "row":  # its amax where blocks have scales, else its scale
            fields.append((torch.float32, 1))
        return fields

    @property
    def _own_tensors(self) -> int:
        """How many of codes, scale and amax rows have of their own: the tensors of `row_fields`."""
        return 1 + self.spec.has_blocks + (self.spec.amax_of == "row")

    def quantize(
        self, x: Tensor, plan: ExchangePlan, codes: Operand | None = None
    ) -> tuple[list[Tensor], list[Tensor], int]:
        """Casts x for the rows that this rank sends.

        Where a row's codes depend on that row alone, each token is cast once. Elsewhere each row of
        each expert is cast.

        Args:
            x: (T, D), of the tokens.
            plan: of the rows.
            codes: x as a linear layer has quantized it; None, or without codes: x is cast here.

        Returns:
            The tensors of `row_fields`, of tokens or of rows; scale and amax of this rank's
            experts, float32 (n) each, the scale empty where rows have their own, the amax empty
            where experts have none; and the slots by which to pack the fields: k for those of
            tokens, 0 for those of rows.
        """
        none = torch.empty(0, device=x.device)
        if self.spec.casts_rows_alone:
            if codes is None or not codes.has_codes:
                codes = Operand(*ops.quantize(x, self.spec.text, "")[:4])
            of_tokens = [codes.codes, codes.scale, codes.amax][: self._own_tensors]
            return of_tokens, [none, none], plan.order.slots
        spec, call, tokens = self.spec, self.call, plan.order.tokens
        table = ops.group_table(plan.order.offs, plan.pair_ids.shape[0])
        active = current = None
        if spec.amax_of == "tensor":
            active, current = self._amaxes(x, table, tokens, plan)
        rows, scale, amax, *_ = ops.quantize(
            x,
            spec.text,
            "",
            amax_row=active,
            rng=call.rng if spec.is_stochastic else None,
            stream_row=ops.stream(self.name) ^ call.stream,
            groups=table,
            row_ids=plan.pair_ids if spec.is_stochastic else None,
            rows_from=tokens,
        )
        amaxes = none if current is None else current[self._own]
        count = self._own_tensors
        of_experts = none if count > 1 else scale[self._own]
        return [rows, scale, amax][:count], [of_experts, amaxes], 0

    @property
    def _own(self) -> slice:
        """This rank's experts among all."""
        return slice(self.experts.begin, self.experts.begin + self.experts.count)

    def _amaxes(
        self, x: Tensor, table: Tensor, tokens: Tensor, plan: ExchangePlan
    ) -> tuple[Tensor, Tensor]:
        """Reduces the amaxes of each expert's rows over the ranks, in one all-reduce.

        Rows that a capacity drops are left out. Under delayed scaling this rank's experts record
        their current amaxes.

        Returns:
            The amaxes that the cast uses, and the current ones, float32 (E) each.
        """
        plan.wait()  # ranks with different layers must not reduce amaxes
        if (kept := plan.kept_rows()) is not None:
            numbers, table = kept
            tokens = tokens.index_select(0, numbers)
        largest = ops.amax(x, self.spec.text, groups=table, rows_from=tokens)
        history, group = self.call.amax_history, self.experts.group
        if not self.spec.is_delayed or history is None:
            largest = distributed_functions.reduce_amaxes(largest, group)
            return largest, largest
        row, own = operand_names().index(self.name), self._own
        active = torch.zeros_like(largest)
        active[own] = history[row, :, ACTIVE]
        both = torch.stack([largest, active])
        largest, active = distributed_functions.reduce_amaxes(both, group)
        # .data: torch does not count the write. No cast reads current amaxes, so backward need not
        # take it for a change of what forward has read.
        current = history.data[row, :, CURRENT]
        torch.maximum(current, largest[own], out=current)
        return active, largest

    def operand(self, fields: Sequence[Tensor], factors: Sequence[Tensor]) -> list[Tensor]:
        """Returns codes, scale and amax of the rows that arrived.

        Args:
            fields: of the rows, as `row_fields`.
            factors: scale and amax of this rank's experts, from `quantize`.
        """
        scale, amax = factors
        return [*fields, *(scale, amax)[len(fields) - 1 :]]
