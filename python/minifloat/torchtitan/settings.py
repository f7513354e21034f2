"""What a user of torchtitan sets: one section of the job config, or an override's keywords.

torchtitan reads the types of fields, so annotations here are evaluated.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from ..nn.convert.filters import DEFAULT_KEEP, Keep
from ..nn.state.recipe_state import DEFAULT_HISTORY


@dataclass
class Minifloat:
    """The section [minifloat] of a job config: which layers train under which recipe.

    Args:
        recipe: of all layers, or a map from module names: "*: nvfp4; layers.31.*: bf16".
        filter_fqns: texts. A layer whose name contains one stays as it is. The text
            "auto_filter_small_kn" leaves out small layers (see mf.auto_filter_small_kn).
        keep: what else stays in high precision: "head", "nvfp4_paper" or "nothing", as
            mf.quantize_'s.
        gather: how FSDP2 gathers weights: "quantized", as codes where they have fewer bits than
            bf16, or "compute_dtype", as FSDP2 does by itself.
        seed: of stochastic rounding, 64 bits with sign.
        amax_history_length: of delayed scaling, in steps.
        amax_algorithm: of delayed scaling.
        margin: of delayed scaling, in powers of two by which scales are enlarged.
        memory: what backward computes again instead of saving: "speed", nothing, or "weights".
        fuse: whether feed-forwards are one op (docs/memory.md).
    """

    recipe: str = ""
    filter_fqns: list[str] = field(default_factory=list)
    keep: Keep = DEFAULT_KEEP
    gather: Literal["quantized", "compute_dtype"] = "quantized"
    seed: int = 0
    amax_history_length: int = DEFAULT_HISTORY
    amax_algorithm: Literal["max", "most_recent"] = "max"
    margin: int = 0
    memory: Literal["speed", "weights"] = "speed"
    fuse: bool = False


def require_recipe(settings: Minifloat) -> None:
    """Raises ValueError where no recipe is set."""
    if not settings.recipe:
        raise ValueError(
            "minifloat: expected a recipe in the section [minifloat] (--minifloat.recipe) or among "
            "the override's keywords, got none"
        )


def options_of(settings: Minifloat) -> dict[str, Any]:
    """Returns the keywords of mf.quantize_ for these settings."""
    return {**dataclasses.asdict(settings), "verbose": False}
