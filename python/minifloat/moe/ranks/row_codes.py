"""Rows that travel as codes: the sender's cast.

The codes and scales are those that one process with all ranks' tokens has for x in fprop and for g
in dgrad. The operand that wgrad reads is cast from the bfloat16 values of the codes.

Shape suffixes: M rows that this rank sends, E experts of all ranks, n of this one, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..._native import ops
from ...nn.grouped_product import ProductCall
from ...nn.hooks import hooks
from ...recipe import Recipe, operand_names
from ...spec import Spec
from ...tensor.operands import Operand
from ..permute import Order, take_rows
from .dispatch import SentGroups

X, G = "x/fprop", "g/dgrad"  # the operands that can travel
ACTIVE, CURRENT = 0, 1  # columns of an amax history


@dataclass(frozen=True)
class CodeSender:
    """The cast of one operand by the ranks of its tokens.

    Args:
        name: X or G.
        call: the product's arguments.
        group: the ranks, which amaxes are reduced over.
        first, local: this rank's experts.
    """

    name: str
    call: ProductCall
    group: dist.ProcessGroup
    first: int
    local: int

    @property
    def spec(self) -> Spec:
        recipe = Recipe(self.call.recipe)
        return Spec.parse(recipe.fprop.a if self.name == X else recipe.dgrad.a)

    def fields(self, width: int) -> list[tuple[torch.dtype, int]]:
        """Returns the fields of a row of `width` elements: its codes, and its scales if it has."""
        spec, sizes = self.spec, self.spec.sizes(1, width)
        found = [(torch.uint8, sizes.code_cols)]
        if spec.has_blocks:
            one_byte = spec.scale_dtype.itemsize == 1
            found.append((torch.uint8 if one_byte else torch.float32, sizes.scale_cols))
        elif spec.amax_of == "row":
            found.append((torch.float32, 1))
        return found

    def quantize(
        self,
        rows: Tensor,
        table: Tensor,
        ids_M: Tensor,
        rows_from: Tensor | None = None,
        sent: SentGroups | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Casts rows by the amaxes of all ranks' rows.

        Args:
            rows: (M, D), or those that `rows_from` chooses from.
            table: of the E groups.
            ids_M: int32 (M), of random bits.
            rows_from: int32 (M), the row of each; None: its own.
            sent: the rows that count for amaxes; None: all.

        Returns:
            The tensors of `fields`, and scale and amax of this rank's experts, float32 (n): an
            empty scale where rows have their own, an empty amax where no expert has one.
        """
        spec, call = self.spec, self.call
        active = current = None
        if spec.amax_of == "tensor":
            if sent is not None:
                chosen = sent.rows if rows_from is None else rows_from.index_select(0, sent.rows)
                active, current = self._amaxes(rows, sent.table, chosen)
            else:
                active, current = self._amaxes(rows, table, rows_from)
        codes, scale, *_ = ops.quantize(
            rows,
            spec.text,
            "",
            amax_row=active,
            rng=call.rng if spec.is_stochastic else None,
            stream_row=ops.stream(self.name) ^ call.stream,
            groups=table,
            row_ids=ids_M if spec.is_stochastic else None,
            rows_from=rows_from,
        )
        own = slice(self.first, self.first + self.local)
        amaxes = torch.empty(0, device=rows.device) if current is None else current[own]
        if spec.has_blocks or spec.amax_of == "row":
            return [codes, scale], [scale.new_empty(0), amaxes]
        return [codes], [scale[own], amaxes]

    def can_reuse(self, tokens: Operand) -> bool:
        """Tells whether rows can be copies of these tokens' codes, which a linear layer reads.

        A linear layer whose product is exact reads values.
        """
        return self.spec.amax_of != "tensor" and tokens.has_codes

    def gather_codes(self, tokens: Operand, order: Order) -> tuple[list[Tensor], list[Tensor]]:
        """Copies the codes of tokens to their rows, and returns what `quantize` does."""
        none = torch.empty(0, device=tokens.codes.device)
        return [take_rows(t, order) for t in (tokens.codes, tokens.scale)], [none, none]

    def _amaxes(
        self, rows: Tensor, table: Tensor, rows_from: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the active and the current amax of each of the E experts, from one all-reduce.

        Under delayed scaling it records the current amaxes of this rank's experts.
        """
        found = ops.amax(rows, self.spec.text, groups=table, rows_from=rows_from)
        history = self.call.history
        if not self.spec.is_delayed or history is None:
            found = hooks.reduce_amaxes(found, self.group)
            return found, found
        place, own = operand_names().index(self.name), slice(self.first, self.first + self.local)
        active = torch.zeros_like(found)
        active[own] = history[place, :, ACTIVE]
        found, active = hooks.reduce_amaxes(torch.stack([found, active]), self.group)
        current = history[place, :, CURRENT]
        torch.maximum(current, found[own], out=current)
        return active, found

    def received(self, fields: Sequence[Tensor], shared: Sequence[Tensor]) -> list[Tensor]:
        """Returns codes, scale and amax of rows that arrived, of what `quantize` returned."""
        scale, amax = shared
        return [fields[0], fields[1] if len(fields) > 1 else scale, amax]


def why_values(name: str, calls: Sequence[ProductCall]) -> str | None:
    """Returns why an operand travels as values under dispatch="codes"; None: it travels as codes.

    Args:
        name: X or G.
        calls: those of the products that read the operand.
    """
    recipes = [Recipe(call.recipe) for call in calls]
    spec = Spec.parse(recipes[0].fprop.a if name == X else recipes[0].dgrad.a)
    if spec.is_bf16:
        return "the recipe has bf16 there"
    if any(recipe != recipes[0] for recipe in recipes[1:]):
        return "w1 and w3 have two recipes"
    if len(calls) > 1 and (spec.is_stochastic or spec.is_delayed):
        return "w1 and w3 each quantize it, with random bits or a scale of their own"
    return None
