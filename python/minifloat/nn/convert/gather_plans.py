"""How FSDP2 will gather each weight: plans, and the sentences of mf.quantize_'s report."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ..hooks import COMPUTE_DTYPE, Choice, PlannedGather, hooks, is_distributed
from ..names import owners_of_parameters


def plan_gathers(
    model: nn.Module, chosen: Sequence[Choice], gather: str, primary: bool
) -> dict[str, PlannedGather]:
    """Plans how FSDP2 gathers the weights of each chosen module.

    Returns:
        Name -> (plan, or None for the compute dtype; sentence for the report).

    Raises:
        ValueError: FSDP2 has sharded a weight that is to be gathered as codes.
    """
    owners = owners_of_parameters(model)
    recipes = {id(choice.module): choice.recipe for choice in chosen}

    def reason_against_codes(choice: Choice) -> str | None:
        if gather == COMPUTE_DTYPE:
            return "gather says so"
        readers = [owner for weight in choice.weights for owner in owners[id(weight)]]
        is_tied = len(readers) > len(choice.names)
        if isinstance(choice.module, nn.Linear):
            if any(recipes.get(id(reader)) != choice.recipe for reader in readers):
                return "it is tied to another reader's"
            is_scaled_twice = is_tied and choice.recipe.is_delayed
            return "it is tied, and each reader has its own scale" if is_scaled_twice else None
        if is_tied:
            return "a weight of the module is tied to another's"
        placements = [p for w in choice.weights if is_distributed(w) for p in w.placements]
        if any(getattr(placement, "dim", 0) != 0 for placement in placements):
            return "ranks cut the experts' matrices"
        return None if choice.reads_codes else "the module's own forward reads the parameter"

    def plan(choice: Choice) -> PlannedGather:
        if primary:
            return None, "its weight is codes"
        if (why := reason_against_codes(choice)) is not None:
            return None, f"weight is gathered in the compute dtype: {why}"
        is_linear = isinstance(choice.module, nn.Linear)
        plan_for = hooks().plan_gather if is_linear else hooks().plan_experts
        planned = plan_for(choice.recipe)
        for weight in choice.weights if planned[0] is not None else ():
            if is_distributed(weight):
                hooks().require_no_shard(choice.module, choice.fqn, weight)
        return planned

    return {choice.fqn: plan(choice) for choice in chosen}
