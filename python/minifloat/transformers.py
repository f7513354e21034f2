"""Hugging Face's Trainer and models: TrainingStateCallback, replace_conv1d_, restore_conv1d_.

`import minifloat` does not load this module, which needs transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback
from transformers.pytorch_utils import Conv1D
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from .checks import require_module
from .nn.checkpoint_state import load_training_state, training_state
from .nn.delayed_scaling import step
from .nn.recipe_state import require_converted

FILE = "minifloat_training_state.safetensors"


class TrainingStateCallback(TrainerCallback):
    """Calls mf.step after each optimizer step, and keeps mf.training_state in checkpoints.

        Trainer(model, arguments, callbacks=[TrainingStateCallback()], train_dataset=data)

    A resumed run then continues with the same bytes. Do not call mf.step beside this callback.

    Args:
        folder: the checkpoint that training is resumed from; None: the folder checkpoint-<step> of
            the Trainer's output_dir.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = None if folder is None else Path(folder)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **others: Any
    ) -> None:
        """Loads the state of the checkpoint that training is resumed from.

        Raises:
            ValueError: no layer of the model is converted.
            FileNotFoundError: the checkpoint has no state of minifloat.
        """
        model = require_converted("TrainingStateCallback", model)
        if state.global_step == 0:
            return
        path = (self.folder or self.folder_of(args, state)) / FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"TrainingStateCallback: expected {path}, which a run with this callback writes; "
                "for a checkpoint that is elsewhere, pass TrainingStateCallback(folder=...)"
            )
        load_training_state(model, load_file(path))

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **others: Any
    ) -> None:
        step(require_converted("TrainingStateCallback", model))

    def on_save(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **others: Any
    ) -> None:
        """Writes the state, on one process of those that write checkpoints."""
        tensors = training_state(require_converted("TrainingStateCallback", model))  # on all ranks
        if not args.should_save:
            return
        folder = self.folder_of(args, state)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: t.cpu().contiguous() for k, t in tensors.items()}, folder / FILE)

    @staticmethod
    def folder_of(args: Any, state: Any) -> Path:
        """Returns the folder that the Trainer writes this step's checkpoint to."""
        return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


# ---- GPT-2's layers ------------------------------------------------------------------------------


def replace_conv1d_(model: nn.Module) -> nn.Module:
    """Replaces each Conv1D of a model by an nn.Linear of the same values, in place.

    mf.quantize_ can convert the new layers. Call this before it, and build the optimizer after it.
    The weights are transposed copies. To save the model in its own format, call mf.restore_ and
    restore_conv1d_.

    Args:
        model: one of transformers, such as GPT-2, whose Conv1D layers have weights (K, N).

    Returns:
        The model.

    Raises:
        TypeError: `model` is no module.
    """
    for parent, name, layer in children_of(require_module("replace_conv1d_", model), Conv1D):
        k, n = layer.weight.shape
        with torch.device("meta"):
            linear = nn.Linear(k, n)
        linear.weight = transposed(layer.weight)
        linear.bias = layer.bias
        setattr(parent, name, linear.train(layer.training))
        linear.is_of_conv1d = True  # type: ignore[assignment]
    return model


def restore_conv1d_(model: nn.Module) -> nn.Module:
    """Undoes replace_conv1d_ in place, with the present values.

    Args:
        model: one that replace_conv1d_ returned, after mf.restore_ where it is converted.

    Returns:
        The model.

    Raises:
        TypeError: `model` is no module.
        ValueError: a layer is converted. The model is unchanged then.
    """
    found = children_of(require_module("restore_conv1d_", model), nn.Linear)
    layers = [row for row in found if getattr(row[2], "is_of_conv1d", False)]
    for _, name, linear in layers:
        if type(linear) is not nn.Linear:
            raise ValueError(
                f"restore_conv1d_: expected layers that mf.restore_ has restored, but {name} is a "
                f"{type(linear).__name__}"
            )
    for parent, name, linear in layers:
        with torch.device("meta"):
            layer = Conv1D(linear.out_features, linear.in_features)
        layer.weight = transposed(linear.weight)
        layer.bias = linear.bias
        setattr(parent, name, layer.train(linear.training))
    return model


def children_of(model: nn.Module, kind: type[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
    """Lists (parent, name within it, module) of the modules of a kind."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, kind)
    ]


def transposed(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)
