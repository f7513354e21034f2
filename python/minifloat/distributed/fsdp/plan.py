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
from functools import lru_cache

import torch

from ..._native import ops
from ...recipe import Recipe
from ...tensor.quantized import has_flag, scale_dtype
from ...tensor.slicing import PROBE, has_transform, is_blocked, is_square, sizes

QUANTIZED, COMPUTE_DTYPE = "quantized", "compute_dtype"
PLAIN_BITS = 16  # of bf16, what travels otherwise


@dataclass(frozen=True)
class Part:
    """One direction of a weight (N, K) that travels. Rows are W's own, whichever the direction."""

    spec: str
    columnwise: bool

    @property
    def is_delayed(self) -> bool:
        return has_flag(self.spec, "delayed")

    @property
    def block(self) -> int:
        """Rows of W that share a scale; 1 where scales are a row's, or the tensor's."""
        return block_shape(self.spec)[1 if self.columnwise else 0]

    @property
    def width(self) -> int:
        """Columns of W that share a scale."""
        return block_shape(self.spec)[0 if self.columnwise else 1]

    @property
    def transform(self) -> int:
        """Rows of W that a transform mixes; 1: none."""
        return sizes(self.spec, 1, 1)[1] if self.columnwise else 1

    @property
    def is_transformed(self) -> bool:
        return has_transform(self.spec)

    @property
    def amaxes(self) -> str:
        """What one amax is of: the "tensor", a "row" as read, or nothing but blocks, ""."""
        return amax_of(self.spec)

    @property
    def is_shared(self) -> bool:
        """Do all ranks know the scale from amaxes that they exchange, so that it need not travel?

        Not those of blocks, nor of rows that are transformed, which are cast shard by shard.
        """
        is_of_own_rows = self.is_transformed and self.amaxes == "row" and not self.columnwise
        return not is_blocked(self.spec) and not is_of_own_rows


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
        if self.mode == "one":
            return f"weight travels as {row}, {bits(row):.4g} bits"
        if self.mode == "both":
            how = f"weight travels as {row} and columnwise {col}, {bits(row) + bits(col):.4g} bits"
            rows = self.col.transform
            return how if rows == 1 else f"{how}; as it is where shards are not of {rows} rows"
        how = f"weight travels as {row}, for backward as columnwise {col}, {bits(row):.4g} bits"
        return f"{how}; as it is where one gather serves both"


@lru_cache(maxsize=256)
def block_shape(spec: str) -> tuple[int, int]:
    _, _, rows, cols = sizes(spec, PROBE, PROBE)
    return (PROBE // rows, PROBE // cols) if is_blocked(spec) else (1, 1)


@lru_cache(maxsize=256)
def amax_of(spec: str) -> str:
    try:
        return ("tensor", "row")[ops.amax(torch.zeros(1, 1), spec).dim()]
    except ValueError:
        return ""


@lru_cache(maxsize=256)
def bits(spec: str) -> float:
    """Bits an element, block scales included."""
    code_cols, _, scale_rows, scale_cols = sizes(spec, PROBE, PROBE)
    scales = scale_rows * scale_cols * scale_dtype(spec).itemsize
    return 8 * (code_cols * PROBE + scales) / PROBE**2


def plan_gather(recipe: Recipe) -> tuple[Plan | None, str]:
    """The plan of a layer's weight, None for the compute dtype; and what a report says of it."""
    row, col = recipe.fprop.b, recipe.dgrad.b
    for spec, product in ((row, "fprop"), (col, "dgrad")):
        if spec == "bf16":
            return None, f"weight travels in the compute dtype: {product} reads it so"
        if has_flag(spec, "sr"):
            return None, f"weight travels in the compute dtype: {spec} draws bits in each forward"
    parts = Part(row, False), Part(col, True)
    if row == col and is_square(row):
        plan = Plan("one", *parts)
    elif bits(row) + bits(col) < PLAIN_BITS:
        plan = Plan("both", *parts)
    else:
        plan = Plan("split", *parts)
    return plan, str(plan)
