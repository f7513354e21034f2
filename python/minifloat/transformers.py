"""Hugging Face's Trainer and models: TrainingStateCallback, replace_conv1d_, restore_conv1d_.

`import minifloat` does not load this module, which needs transformers.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.pytorch_utils import Conv1D
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from .checks import require_module
from .nn.checkpoint_state import load_training_state, training_state
from .nn.delayed_scaling import step
from .nn.recipe_state import require_converted

FILE = "minifloat_training_state.safetensors"
OWN_FILES = ("pytorch_model_fsdp*", "global_step*")  # FSDP's and DeepSpeed's, loaded by themselves


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
            ValueError: no layer of the model is converted, or weights of the model are not those of
                the checkpoint.
            FileNotFoundError: the checkpoint has no state of minifloat.
        """
        model = require_converted("TrainingStateCallback", model)
        if state.global_step == 0:
            return
        folder = self.folder or self.folder_of(args, state)
        path = folder / FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"TrainingStateCallback: expected {path}, which a run with this callback writes; "
                "for a checkpoint that is elsewhere, pass TrainingStateCallback(folder=...)"
            )
        require_loaded(model, folder)
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


# ---- Weights that a checkpoint has under other names -------------------------------------------


def require_loaded(model: nn.Module, folder: Path) -> None:
    """Checks that the weights of a checkpoint that the Trainer cannot load are the model's.

    save_pretrained gives experts of some models the names and shapes of their first release. The
    Trainer loads a checkpoint by the model's names, and only warns of weights that it did not find.

    Raises:
        ValueError: such a weight of the model is not the checkpoint's.
    """
    files = files_of(folder)
    if not files or any(True for pattern in OWN_FILES for _ in folder.glob(pattern)):
        return
    state = model.state_dict(keep_vars=True)  # where tied names have one object
    loaded = {id(tensor) for name, tensor in state.items() if name in files}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    missing = [n for n, t in state.items() if id(t) not in loaded and n not in ignored]
    with ExitStack() as stack, torch.no_grad():
        opened = {f: stack.enter_context(safe_open(f, "pt")) for f in set(files.values())}
        # One module at a time: the values in the checkpoint's layout are copies.
        for _, names in groupby(missing, key=lambda name: name.rpartition(".")[0]):
            values = as_saved(model, {name: state[name].detach() for name in names})
            for name, value in values.items():
                saved = opened[files[name]].get_tensor(name) if name in files else None
                if saved is None or not torch.equal(saved.to(value), value):
                    raise ValueError(
                        f"TrainingStateCallback: expected the weights of {folder}, but the Trainer "
                        f"did not load {len(missing)} of them, such as {missing[0]}, because the "
                        f"checkpoint has other names for them; call "
                        f"{type(model).__name__}.from_pretrained({str(folder)!r}), then "
                        "mf.quantize_, then train(resume_from_checkpoint=...) with this folder"
                    )


def files_of(folder: Path) -> dict[str, Path]:
    """Returns the file of each tensor of a checkpoint; none where no safetensors are there."""
    index, whole = folder / SAFE_WEIGHTS_INDEX_NAME, folder / SAFE_WEIGHTS_NAME
    if index.is_file():
        weights = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in weights.items()}
    if not whole.is_file():
        return {}
    with safe_open(whole, "pt") as file:
        return dict.fromkeys(file.keys(), whole)


def as_saved(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights by the names, and in the shapes, that save_pretrained writes."""
    if not isinstance(model, PreTrainedModel):
        return state
    from transformers.core_model_loading import revert_weight_conversion  # version 5

    return revert_weight_conversion(model, state)


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
