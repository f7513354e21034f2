"""How FSDP2 gathers the weights of a recipe, and in how many bits.

    one      fprop and dgrad read one format whose codes transpose exactly: its rowwise codes are
             gathered, and dgrad's are transposed from them
    both     two formats, or two directions of one, of less than 16 bits a weight together
    split    less than 16 bits each: fprop's codes are gathered before forward, dgrad's before
             backward. Where one gather serves both, the compute dtype has fewer bits
    None     gathered in the compute dtype, as FSDP2 alone does, with the reason

A plan is a function of the recipe. The first gather decides whether the shards allow it
(gather.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...recipe import Recipe
from ...spec import Spec

BF16_BITS = 16


@dataclass(frozen=True)
class GatherPlan:
    """The mode of a weight's gathers, and the specs that fprop and dgrad read the weight in."""

    mode: str  # "one", "both" or "split"
    row: str
    col: str
    is_cut_by_rows: bool = True  # False: between experts

    def __str__(self) -> str:
        row, col = Spec.parse(self.row), Spec.parse(self.col)
        if self.mode == "one":
            return f"weight is gathered as {self.row}, {row.bits:.4g} bits"
        if self.mode == "split":
            how = f"weight is gathered as {self.row}, for backward as columnwise {self.col}"
            return f"{how}, {row.bits:.4g} bits; unquantized where one gather serves both"
        bits, points = row.bits + col.bits, col.transform
        how = f"weight is gathered as {self.row} and columnwise {self.col}, {bits:.4g} bits"
        if points == 0 or not self.is_cut_by_rows:
            return how
        return f"{how}; unquantized where a chunk's rows are no multiple of {points}"


def plan_gather(recipe: Recipe) -> tuple[GatherPlan | None, str]:
    """Plans the gathers of a layer's weight.

    Args:
        recipe: the formats of the layer's three products.

    Returns:
        The plan, or None for the compute dtype; and the sentence that mf.quantize_ reports.
    """
    row, col = Spec.parse(recipe.fprop.b), Spec.parse(recipe.dgrad.b)
    for spec, product in ((row, "fprop"), (col, "dgrad")):
        if spec.is_bf16:
            return None, f"weight is gathered in the compute dtype: {product} reads it so"
        if spec.is_stochastic:
            why = f"{spec.text} draws bits in each forward"
            return None, f"weight is gathered in the compute dtype: {why}"
    mode = "both" if row.bits + col.bits < BF16_BITS else "split"
    if row == col and row.transposes_exactly:
        mode = "one"
    plan = GatherPlan(mode, row.text, col.text)
    return plan, str(plan)


def plan_experts(recipe: Recipe) -> tuple[GatherPlan | None, str]:
    """Plans the gathers of experts' weights, which FSDP2 cuts between experts.

    Args, Returns: as those of plan_gather.
    """
    plan, sentence = plan_gather(recipe)
    if plan is None:
        return None, sentence
    if plan.mode == "split" and Spec.parse(plan.col).is_delayed:
        why = f"{plan.col} of dgrad alone has a history, which forward records"
        return None, f"weight is gathered in the compute dtype: {why}"
    plan = replace(plan, is_cut_by_rows=False)
    return plan, f"{plan}; in the compute dtype where it is cut along dimension 1"
