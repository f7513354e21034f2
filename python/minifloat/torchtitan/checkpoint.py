"""mf.training_state in torchtitan's checkpoints: an entry beside its model and optimizers.

torchtitan has no hook for what else a checkpoint holds, so its CheckpointManager gets the entry
when it is built. A model without converted layers has none.
"""

from functools import wraps
from typing import Any

from torch import Tensor, nn

from ..nn.state.model_state import load_training_state, training_state
from ..nn.state.recipe_state import RecipeState

KEY = "minifloat"  # in checkpoints, and in checkpoint.exclude_from_loading


class TrainingState:
    """The state of a model's parts, as torch.distributed.checkpoint saves and loads it.

    Args:
        parts: of the model on this rank; names of layers are those of the whole model.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        self.parts = parts

    def state_dict(self) -> dict[str, Tensor]:
        return {name: t for part in self.parts for name, t in training_state(part).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for part in self.parts:
            load_training_state(part, {name: state[name] for name in training_state(part)})


def keep_training_state(manager: type[Any]) -> None:
    """Makes each new checkpoint manager of a converted model keep its training state."""
    build = manager.__init__

    @wraps(build)
    def build_with_state(
        self: Any, *args: Any, model_parts: list[nn.Module], states: dict[str, Any], **named: Any
    ) -> None:
        if any(isinstance(m, RecipeState) for part in model_parts for m in part.modules()):
            states[KEY] = TrainingState(model_parts)
        build(self, *args, model_parts=model_parts, states=states, **named)

    manager.__init__ = build_with_state
