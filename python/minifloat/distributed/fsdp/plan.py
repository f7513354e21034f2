"""How the weights of a recipe travel between the ranks of FSDP2, and in how many bits.

    one      fprop and dgrad read one square format: its rowwise codes travel, once, and what dgrad
             reads is transposed after the gather
    both     two formats, or one along each direction, of less than 16 bits a weight together
    split    less than 16 bits each: what fprop reads before forward, what dgrad reads before
             backward. Where FSDP2 gathers once for both, bf16 is no more, and is what travels
    None     in the compute dtype, as FSDP2 alone has it, with the reason

A plan is a function of the recipe. What it needs of the shards, Travel decides when it
meets them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...recipe import Recipe
from ...spec import Spec

PLAIN_BITS = 16  # of bf16, what travels otherwise


@dataclass(frozen=True)
class Part:
    """One direction of a weight (N, K) that travels. Rows are W's own, whichever the direction."""

    spec: str
    columnwise: bool

    @property
    def is_delayed(self) -> bool:
        return Spec.parse(self.spec).is_delayed

    @property
    def block(self) -> int:
        """Rows of W that share a scale; 1 where scales are a row's, or the tensor's."""
        return max(Spec.parse(self.spec).block[1 if self.columnwise else 0], 1)

    @property
    def width(self) -> int:
        """Columns of W that share a scale."""
        return max(Spec.parse(self.spec).block[0 if self.columnwise else 1], 1)

    @property
    def transform(self) -> int:
        """Rows of W that a transform mixes; 1: none."""
        return max(Spec.parse(self.spec).transform, 1) if self.columnwise else 1

    @property
    def is_transformed(self) -> bool:
        return Spec.parse(self.spec).transform > 0

    @property
    def amaxes(self) -> str:
        """What one amax is of: the "tensor", a "row" as read, or nothing but blocks, ""."""
        return Spec.parse(self.spec).amax_of

    @property
    def is_shared(self) -> bool:
        """Do all ranks know the scale from amaxes that they exchange, so that it need not travel?

        Not those of blocks, nor of rows that are transformed, which are cast shard by shard.
        """
        is_of_own_rows = self.is_transformed and self.amaxes == "row" and not self.columnwise
        return not Spec.parse(self.spec).has_blocks and not is_of_own_rows


@dataclass(frozen=True)
class Plan:
    """The parts that travel, and when: "one", "both", "split"."""

    mode: str
    row: Part
    col: Part

    def parts(self, backward: bool) -> tuple[Part, ...]:
        if self.mode == "both":
            return self.row, self.col
        return (self.col,) if self.mode == "split" and backward else (self.row,)

    def __str__(self) -> str:
        row, col = self.row.spec, self.col.spec
        row_bits, col_bits = Spec.parse(row).bits, Spec.parse(col).bits
        if self.mode == "one":
            return f"weight travels as {row}, {row_bits:.4g} bits"
        if self.mode == "both":
            how = f"weight travels as {row} and columnwise {col}, {row_bits + col_bits:.4g} bits"
            rows = self.col.transform
            return how if rows == 1 else f"{how}; as it is where shards are not of {rows} rows"
        how = f"weight travels as {row}, for backward as columnwise {col}, {row_bits:.4g} bits"
        return f"{how}; as it is where one gather serves both"


def plan_gather(recipe: Recipe) -> tuple[Plan | None, str]:
    """The plan of a layer's weight, None for the compute dtype; and what a report says of it."""
    row, col = Spec.parse(recipe.fprop.b), Spec.parse(recipe.dgrad.b)
    for spec, product in ((row, "fprop"), (col, "dgrad")):
        if spec.is_bf16:
            return None, f"weight travels in the compute dtype: {product} reads it so"
        if spec.is_stochastic:
            why = f"{spec.text} draws bits in each forward"
            return None, f"weight travels in the compute dtype: {why}"
    parts = Part(row.text, False), Part(col.text, True)
    if row == col and row.transposes_exactly:
        plan = Plan("one", *parts)
    elif row.bits + col.bits < PLAIN_BITS:
        plan = Plan("both", *parts)
    else:
        plan = Plan("split", *parts)
    return plan, str(plan)
