"""Primary weights: layers whose parameter is a QuantizedTensor, and the reasons against one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...checks import require_bool
from ...recipe import Recipe
from ...tensor.directions import require_nearest
from ...tensor.quantized_tensor import QuantizedTensor
from ..hooks import is_distributed
from ..state.recipe_state import RecipeState

HIGH_PRECISION_INIT = "_high_precision_init"  # of an attribute's name, after the parameter's


def reason_against_codes(recipe: Recipe) -> str | None:
    """Returns why a recipe does not read the codes of a QuantizedTensor; None where it does."""
    specs = recipe.fprop.b, recipe.dgrad.b
    if "bf16" in specs:
        return f"{recipe} reads the weight in high precision"
    try:
        for spec in specs:
            require_nearest(spec, False)
    except ValueError as error:
        return str(error)
    return None


def reason_against_primary(
    weight: Tensor, recipe: Recipe, owners: dict[int, list[nn.Module]]
) -> str | None:
    """Returns why a weight cannot be a QuantizedTensor; None where it can."""
    if len(owners[id(weight)]) > 1:
        return "primary: its weight is tied to another module's"
    if is_distributed(weight):
        return "primary: its weight is a DTensor"
    why = reason_against_codes(recipe)
    return None if why is None else f"primary: {why}"


def make_primary(
    module: nn.Module,
    names: Sequence[str],
    recipe: Recipe,
    keep_high_precision_init: bool,
    is_row_major: bool = False,
) -> None:
    """Replaces parameters of a converted module by QuantizedTensors: a weight, or 3D ones."""
    row, col = recipe.fprop.b, recipe.dgrad.b
    specs = (col, row) if is_row_major else (row, col)  # of the parameter as it lies in memory
    for name in names:
        weight = module.get_parameter(name)
        if keep_high_precision_init:
            setattr(module, name + HIGH_PRECISION_INIT, weight.detach().cpu().clone())
        quantized = QuantizedTensor.from_tensor(weight.detach(), *specs)
        setattr(module, name, nn.Parameter(quantized, requires_grad=weight.requires_grad))
    if isinstance(module, RecipeState):
        module._forget()  # the weight before had a cache


def require_primary(primary: bool, keep_high_precision_init: bool) -> None:
    require_bool("primary", primary)
    require_bool("keep_high_precision_init", keep_high_precision_init)
    if keep_high_precision_init and not primary:
        raise ValueError(
            "keep_high_precision_init: expected primary=True with it, got primary=False, "
            "where the weight itself stays in high precision"
        )
