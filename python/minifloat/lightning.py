"""Lightning's Trainer with converted models: TrainingStateCallback.

`import minifloat` does not load this module, which needs lightning or pytorch_lightning.
"""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn

from .inspector.guard import StepGuard
from .nn.state.model_state import load_training_state, step, training_state
from .nn.state.recipe_state import require_converted

# The library is published under two names, which may both be installed. A name that the program has
# imported comes first.
IS_SHORT = "lightning.pytorch" in sys.modules or (
    "pytorch_lightning" not in sys.modules and find_spec("lightning") is not None
)
if TYPE_CHECKING or not IS_SHORT:
    from pytorch_lightning import Callback, Trainer
else:
    from lightning.pytorch import Callback, Trainer

KEY = "minifloat_training_state"


class TrainingStateCallback(Callback):
    """Calls mf.step after each optimizer step, and keeps mf.training_state in checkpoints.

        Trainer(callbacks=[TrainingStateCallback()]).fit(module, data)

    A resumed run then continues with the same bytes. Do not call mf.step beside this callback.

    Args:
        on_nonfinite: "raise" or "skip": what an mf.inspector.StepGuard does at a gradient that is
            not finite, before Lightning clips it; None: there is no guard.
    """

    def __init__(self, *, on_nonfinite: str | None = None) -> None:
        self.steps_ended = 0  # optimizer steps that mf.step has followed
        self.on_nonfinite = on_nonfinite
        self.guard: StepGuard | None = None

    def on_train_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Checks the module, and makes the guard.

        Raises:
            ValueError: no layer of the module is converted.
        """
        require_converted("TrainingStateCallback", pl_module)
        self.steps_ended = trainer.global_step
        if self.on_nonfinite is not None:
            self.guard = StepGuard(pl_module, trainer.optimizers, on_nonfinite=self.on_nonfinite)
            self.guard.steps = trainer.global_step

    def on_before_optimizer_step(self, *_: object) -> None:
        if self.guard is not None:
            self.guard.check()

    def on_train_end(self, *_: object) -> None:
        """Ends the guard, which may have to report the last step."""
        guard, self.guard = self.guard, None
        if guard is not None:
            guard.remove()

    def on_train_batch_end(self, trainer: Trainer, pl_module: nn.Module, *others: object) -> None:
        if trainer.global_step != self.steps_ended:  # not in the middle of accumulation
            step(pl_module)
            self.steps_ended = trainer.global_step

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: nn.Module, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint[KEY] = training_state(pl_module)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: nn.Module, checkpoint: dict[str, Any]
    ) -> None:
        """Loads the state of the checkpoint.

        Raises:
            KeyError: the checkpoint has no state of minifloat.
        """
        if KEY not in checkpoint:
            raise KeyError(
                f"TrainingStateCallback: expected {KEY!r} in the checkpoint, which a run with this "
                "callback writes"
            )
        load_training_state(pl_module, checkpoint[KEY])
