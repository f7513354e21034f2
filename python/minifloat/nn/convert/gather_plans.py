"""How FSDP2 will gather each weight: plans, and the sentences of mf.quantize_'s report."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ...recipe import Recipe
from ..hooks import (
    COMPUTE_DTYPE,
    QUANTIZED,
    ExpertChoice,
    ExpertSelection,
    PlannedGather,
    expert_hooks,
    hooks,
    is_distributed,
)
from ..names import owners_of_weights
from .selection import Selection


def plan_gathers(
    model: nn.Module, selection: Selection, gather: str, primary: bool
) -> dict[str, PlannedGather]:
    """Plans how FSDP2 gathers the weight of each chosen layer.

    Returns:
        Name -> (plan, or None for the compute dtype; sentence for the report).

    Raises:
        ValueError: FSDP2 has sharded a weight that is to be gathered as codes.
    """
    owners = owners_of_weights(model)
    recipes = {id(module): recipe for _, module, recipe in selection.chosen}

    def plan(fqn: str, module: nn.Linear, recipe: Recipe) -> PlannedGather:
        if primary:
            return None, "its weight is codes"
        if gather == COMPUTE_DTYPE:
            return None, "weight is gathered in the compute dtype: gather says so"
        readers = {recipes.get(id(owner)) for owner in owners[id(module.weight)]}
        if len(readers) > 1:
            return None, "weight is gathered in the compute dtype: it is tied to another reader's"
        if recipe.is_delayed and len(owners[id(module.weight)]) > 1:
            how = "weight is gathered in the compute dtype"
            return None, f"{how}: it is tied, and each reader has its own scale"
        return require_no_shards(fqn, module, [module.weight], hooks().plan_gather(recipe))

    return {fqn: plan(fqn, module, recipe) for fqn, module, recipe in selection.chosen}


def plan_mixtures(
    model: nn.Module, mixtures: ExpertSelection, gather: str, primary: bool
) -> dict[str, PlannedGather]:
    """Plans how FSDP2 gathers the weights of each chosen experts module, as plan_gathers does."""
    owners = owners_of_weights(model)

    def plan(choice: ExpertChoice) -> PlannedGather:
        how = "weight is gathered in the compute dtype"
        if primary:
            return None, "its weight is codes"
        if gather == COMPUTE_DTYPE:
            return None, f"{how}: gather says so"
        weights = [choice.module.get_parameter(name) for name in choice.names]
        if any(len(owners[id(weight)]) > 1 for weight in weights):
            return None, f"{how}: a weight of the module is tied to another's"
        placements = [p for w in weights if is_distributed(w) for p in w.placements]
        if any(getattr(placement, "dim", 0) != 0 for placement in placements):
            return None, f"{how}: ranks cut the experts' matrices"
        planned = expert_hooks().plan_gather(choice)
        return require_no_shards(choice.fqn, choice.module, weights, planned)

    return {choice.fqn: plan(choice) for choice in mixtures.chosen}


def require_no_shards(
    fqn: str, module: nn.Module, weights: Sequence[Tensor], planned: PlannedGather
) -> PlannedGather:
    """Returns what is planned; raises ValueError where FSDP2 has sharded a weight too early."""
    for weight in weights:
        if planned[0] is not None and is_distributed(weight):
            hooks().require_no_shard(module, fqn, weight)
    return planned


def require_gather(gather: str) -> None:
    if gather not in (QUANTIZED, COMPUTE_DTYPE):
        raise ValueError(f"gather: expected {QUANTIZED!r} or {COMPUTE_DTYPE!r}, got {gather!r}")
