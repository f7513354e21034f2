"""Lightning's Trainer with converted models: TrainingStateCallback.

`import minifloat` does not load this module, which needs lightning or pytorch_lightning.
"""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils.hooks import RemovableHandle

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
            not finite, before Lightning clips it; None: there is no guard. Lightning shows it no
            step of self.optimizers(use_pl_optimizer=False): a batch with one is a RuntimeError.
    """

    def __init__(self, *, on_nonfinite: str | None = None) -> None:
        self.steps_ended = 0  # Lightning's count of steps that mf.step has followed
        self.stepped = self.unseen = False  # since mf.step: an optimizer, one without a check
        self.checked: set[int] = set()  # the ids of optimizers before whose steps the guard checked
        self.handles: list[RemovableHandle] = []
        self.on_nonfinite = on_nonfinite
        self.guard: StepGuard | None = None

    def on_train_start(self, trainer: Trainer, pl_module: nn.Module) -> None:
        """Checks the module, and makes the guard.

        Raises:
            ValueError: no layer of the module is converted.
        """
        require_converted("TrainingStateCallback", pl_module)
        self.steps_ended = trainer.global_step
        self.remove_hooks()
        self.begin()
        for optimizer in trainer.optimizers:  # Lightning counts steps of those that it wraps alone
            if hasattr(optimizer, "_optimizer_step_post_hooks"):
                self.handles.append(optimizer.register_step_post_hook(self.after_step))
        if self.on_nonfinite is not None:
            self.guard = StepGuard(pl_module, trainer.optimizers, on_nonfinite=self.on_nonfinite)
            self.guard.steps = trainer.global_step

    def begin(self) -> None:
        """Begins to note steps."""
        self.stepped = self.unseen = False
        self.checked.clear()

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: nn.Module, optimizer: object
    ) -> None:
        if self.guard is not None:
            self.guard.check()
            self.checked.add(id(optimizer))

    def after_step(self, optimizer: object, *_: object) -> None:
        self.stepped = True
        self.unseen |= self.guard is not None and id(optimizer) not in self.checked

    def remove_hooks(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def on_exception(self, *_: object) -> None:
        """Ends the guard without a report, which an error already is."""
        self.remove_hooks()
        guard, self.guard = self.guard, None
        if guard is not None:
            guard.__exit__(RuntimeError)

    def on_train_end(self, *_: object) -> None:
        """Ends the guard, which may have to report the last step."""
        self.remove_hooks()
        guard, self.guard = self.guard, None
        if guard is not None:
            guard.remove()

    def on_train_batch_end(self, trainer: Trainer, pl_module: nn.Module, *others: object) -> None:
        if self.unseen:
            raise RuntimeError(
                f"TrainingStateCallback(on_nonfinite={self.on_nonfinite!r}): expected steps of "
                "Lightning's optimizers, got one that no callback saw; take self.optimizers(), or "
                "a StepGuard of your own"
            )
        if self.stepped or trainer.global_step != self.steps_ended:  # not within accumulation
            step(pl_module)
            self.steps_ended = trainer.global_step
            self.begin()

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
