"""What both versions of torchtitan share: the settings, and mf.training_state in checkpoints.

torchtitan reads the types of fields, so annotations here are evaluated.
"""

from dataclasses import asdict, dataclass, field, fields
from functools import wraps
from typing import Any, Literal

from torch import Tensor, nn

from ..nn.convert.filters import DEFAULT_KEEP, Keep
from ..nn.state.model_state import load_training_state, training_state
from ..nn.state.recipe_state import DEFAULT_HISTORY, DelayedScaling, RecipeState

KEY = "minifloat"  # in checkpoints, and in checkpoint.exclude_from_loading


@dataclass
class Minifloat:
    """The section [minifloat] of a job config: which layers train under which recipe.

    Args:
        recipe: of all layers, or a map from module names: "*: nvfp4; layers.31.*: bf16".
        filter_fqns: texts. A layer whose name contains one stays as it is. The text
            "auto_filter_small_kn" leaves out small layers (see mf.nn.auto_filter_small_kn).
        keep: what else stays in high precision: "head", "nvfp4_paper" or "nothing", as
            mf.quantize_'s.
        gather: how FSDP2 gathers weights: "codes", where they have fewer bits than bf16, or
            "compute_dtype", as FSDP2 does by itself.
        seed: of stochastic rounding, 64 bits with sign.
        amax_history_length, amax_algorithm, margin: the fields of mf.nn.DelayedScaling.
        recompute: what backward computes again instead of saving: "weight", or None, nothing.
        fuse: whether feed-forwards are one op (docs/memory.md).
        share_amax: "servers": weights that servers fuse have one amax (docs/choose.md), or None.
    """

    recipe: str = ""
    filter_fqns: list[str] = field(default_factory=list)
    keep: Keep = DEFAULT_KEEP
    gather: Literal["codes", "compute_dtype"] = "codes"
    seed: int = 0
    amax_history_length: int = DEFAULT_HISTORY
    amax_algorithm: Literal["max", "most_recent"] = "max"
    margin: int = 0
    recompute: Literal["weight"] | None = None
    fuse: bool = False
    share_amax: Literal["servers"] | None = None


def options_of(settings: Minifloat) -> dict[str, Any]:
    """Returns the keywords of mf.quantize_ for these settings; ValueError without a recipe."""
    if not settings.recipe:
        raise ValueError(
            "minifloat: expected a recipe in the section [minifloat] (--minifloat.recipe) or among "
            "the override's keywords, got none"
        )
    options = asdict(settings)
    rule = {f.name: options.pop(f.name) for f in fields(DelayedScaling)}
    return {**options, "delayed_scaling": DelayedScaling(**rule)}


@dataclass(eq=False)
class TrainingState:
    """The state of a model's parts, as torch.distributed.checkpoint saves and loads it.

    Args:
        parts: of the model on this rank; names of layers are those of the whole model.
    """

    parts: list[nn.Module]

    def state_dict(self) -> dict[str, Tensor]:
        return {name: t for part in self.parts for name, t in training_state(part).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for part in self.parts:
            load_training_state(part, {name: state[name] for name in training_state(part)})


def keep_training_state(manager: type[Any]) -> None:
    """Makes each new checkpoint manager of a converted model keep its training state.

    torchtitan has no hook for what a checkpoint holds beside its model and optimizers.
    """
    build = manager.__init__

    @wraps(build)
    def build_with_state(
        self: Any, *args: Any, model_parts: list[nn.Module], states: dict[str, Any], **named: Any
    ) -> None:
        if any(isinstance(m, RecipeState) for part in model_parts for m in part.modules()):
            states[KEY] = TrainingState(model_parts)
        build(self, *args, model_parts=model_parts, states=states, **named)

    manager.__init__ = build_with_state
