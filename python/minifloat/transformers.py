"""Hugging Face's Trainer and models: TrainingStateCallback, replace_conv1d_, restore_conv1d_.

`import minifloat` does not load this module, which needs transformers.
"""

import json
import warnings
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
)

from .checks import require_module
from .inspector.guard import StepGuard
from .nn.convert.selection import is_conv1d, reason_against_linear
from .nn.names import join
from .nn.registry import is_distributed
from .nn.state.model_state import load_training_state, step, training_state
from .nn.state.recipe_state import require_converted
from .serving.read_checkpoint import same_bytes
from .tensor.quantized_tensor import QuantizedTensor

FILE = "minifloat_training_state.safetensors"
OWN_FILES = ("pytorch_model_fsdp*", "global_step*")  # FSDP's and DeepSpeed's, loaded by themselves


class TrainingStateCallback(TrainerCallback):
    """Calls mf.step after each optimizer step, and keeps mf.training_state in checkpoints.

        Trainer(model, arguments, callbacks=[TrainingStateCallback()], train_dataset=data)

    A resumed run then continues with the same bytes. Do not call mf.step beside this callback.

    Args:
        folder: the checkpoint that training is resumed from; None: the folder checkpoint-<step> of
            the Trainer's output_dir.
        on_nonfinite: "raise" or "skip": what an mf.inspector.StepGuard does at a gradient that is
            not finite; None: there is no guard.
    """

    def __init__(
        self, folder: str | Path | None = None, *, on_nonfinite: str | None = None
    ) -> None:
        self.folder, self.on_nonfinite = folder, on_nonfinite
        self.guard: StepGuard | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: object, model: Any, **others: Any
    ) -> None:
        """Loads the state of the checkpoint that training is resumed from, and makes the guard.

        Raises:
            ValueError: no layer of the model is converted, weights of the model are not those of
                the checkpoint, or args.enable_jit_checkpoint, which saves without callbacks.
            FileNotFoundError: the checkpoint has no state of minifloat.
        """
        if getattr(args, "enable_jit_checkpoint", False):
            raise ValueError(
                "TrainingStateCallback: expected enable_jit_checkpoint=False: the Trainer saves "
                "such a checkpoint without callbacks, so it cannot be resumed to the byte"
            )
        model = require_converted("TrainingStateCallback", model)
        if state.global_step != 0:
            self.load(Path(self.folder or self.folder_of(args, state)), model)
        if self.on_nonfinite is not None:
            optimizer = others["optimizer"]
            self.guard = StepGuard(model, optimizer, on_nonfinite=self.on_nonfinite)
            self.guard.steps = state.global_step

    def on_pre_optimizer_step(self, *_: object, **others: object) -> None:
        if self.guard is not None:
            self.guard.check()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, *_: object, model: Any, **others: object
    ) -> None:
        """Ends the guard, and loads the state of the best checkpoint with load_best_model_at_end.

        Raises:
            FloatingPointError: the last step had a gradient that is not finite.
            ValueError: weights of the model are not those of the best checkpoint.

        Warns where that checkpoint has no state.
        """
        guard, self.guard = self.guard, None
        if guard is not None:
            guard.remove()  # which may have to report the last step
        # A search may end a trial before the Trainer has loaded anything, and drops its model.
        best = None if state.is_hyper_param_search else state.best_model_checkpoint
        if not args.load_best_model_at_end or best is None:
            return
        if (Path(best) / FILE).is_file():
            self.load(Path(best), require_converted("TrainingStateCallback", model))
        else:
            warnings.warn(
                f"TrainingStateCallback: {best} has no {FILE}, so the model keeps the state of the "
                "last step",
                stacklevel=2,
            )

    @staticmethod
    def load(folder: Path, model: nn.Module) -> None:
        """Loads the state of a checkpoint, once the Trainer has loaded its weights."""
        path = folder / FILE
        if not path.is_file():
            raise FileNotFoundError(
                f"TrainingStateCallback: expected {path}, which a run with this callback writes; "
                "for a checkpoint that is elsewhere, pass TrainingStateCallback(folder=...)"
            )
        require_loaded(model, folder)
        load_training_state(model, load_file(path))

    def on_step_end(self, *_: object, model: Any, **others: object) -> None:
        step(require_converted("TrainingStateCallback", model))

    def on_save(
        self, args: TrainingArguments, state: TrainerState, *_: object, model: Any, **others: object
    ) -> None:
        """Writes the state, on one process of those that write checkpoints.

        Trials of a hyperparameter search, whose folders have other names, are saved without it.
        """
        if state.is_hyper_param_search:
            return
        tensors = training_state(require_converted("TrainingStateCallback", model))  # on all ranks
        if not args.should_save:
            return
        folder = self.folder_of(args, state)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: t.cpu().contiguous() for k, t in tensors.items()}, folder / FILE)

    @staticmethod
    def folder_of(args: TrainingArguments, state: TrainerState) -> Path:
        """Returns the folder that the Trainer writes this step's checkpoint to."""
        return Path(str(args.output_dir)) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


# ---- Weights that a checkpoint has under other names -------------------------------------------


def require_loaded(model: nn.Module, folder: Path) -> None:
    """Checks that the weights of a checkpoint are the model's, so that it is the one resumed from.

    save_pretrained gives experts of some models the names and shapes of their first release. The
    Trainer loads a checkpoint by the model's names, and only warns of weights that it did not find.

    Weights that ranks share, are on meta or are codes are not compared. Each rank reads the file.

    Raises:
        ValueError: a weight of the model is not the checkpoint's.
    """
    require_adapters(model, folder)
    files = files_of(folder)
    if not files or any(True for pattern in OWN_FILES for _ in folder.glob(pattern)):
        return
    state = model.state_dict(keep_vars=True)  # where tied names have one object
    loaded = {id(tensor) for name, tensor in state.items() if name in files}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    missing = [n for n, t in state.items() if id(t) not in loaded and n not in ignored]
    with ExitStack() as stack, torch.no_grad():
        opened = {f: stack.enter_context(safe_open(f, "pt")) for f in set(files.values())}
        for name, value in state.items():
            if name in files and is_compared(value):
                require_equal(folder, name, opened[files[name]].get_tensor(name), value)
        # One module at a time: the values in the checkpoint's layout are copies.
        for _, names in groupby(missing, key=lambda name: name.rpartition(".")[0]):
            values = as_saved(model, {name: state[name].detach() for name in names})
            for name, value in values.items():
                saved = opened[files[name]].get_tensor(name) if name in files else None
                if saved is None or not same_bytes(saved.to(value), value):
                    raise ValueError(
                        f"TrainingStateCallback: expected the weights of {folder}, but the Trainer "
                        f"did not load {len(missing)} of them, such as {missing[0]}, because the "
                        f"checkpoint has other names for them; call "
                        f"{type(model).__name__}.from_pretrained({str(folder)!r}), then "
                        "mf.quantize_, and to resume train(resume_from_checkpoint=...) with this "
                        "folder"
                    )


def is_compared(value: Tensor) -> bool:
    return not (value.is_meta or is_distributed(value) or isinstance(value, QuantizedTensor))


def require_equal(folder: Path, name: str, saved: Tensor, value: Tensor) -> None:
    """Raises ValueError where a weight is not the one of a checkpoint, but for its dtype."""
    if not same_bytes(saved.to(value), value):
        raise ValueError(
            f"TrainingStateCallback: expected the weights of {folder}, got a model with another "
            f"{name}; to resume from a folder that is not in output_dir, pass "
            "TrainingStateCallback(folder=...)"
        )


def require_adapters(model: Any, folder: Path) -> None:
    """Checks PEFT's adapters, besides which a checkpoint may have no weights.

    Raises:
        ValueError: one is not the checkpoint's.
    """
    paths = [path for of in ("", "*/") for path in folder.glob(of + ADAPTER_SAFE_WEIGHTS_NAME)]
    if not paths:
        return
    from peft import PeftModel, get_peft_model_state_dict

    for path in paths if isinstance(model, PeftModel) else ():
        adapter = "default" if path.parent == folder else path.parent.name  # as PEFT names folders
        if adapter not in model.peft_config:
            continue
        saved = load_file(path)
        state = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
        for name, value in state.items():
            if name in saved and is_compared(value):
                require_equal(folder, name, saved[name], value)


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

    saved: dict[str, Tensor] = revert_weight_conversion(model, state)
    return saved


# ---- GPT-2's layers ------------------------------------------------------------------------------


def replace_conv1d_(model: nn.Module) -> nn.Module:
    """Makes each Conv1D of a model an nn.Linear of the same values, in place.

    mf.quantize_ can convert such layers. Call this before it, and build the optimizer after it. A
    layer stays the same object, so hooks, attributes, mode and ties of layers stay. Weights are
    transposed copies, one for all layers that share one. To save the model in its own format, call
    mf.restore_ and restore_conv1d_. A layer whose forward is not Conv1D's is left as it is, and
    mf.quantize_'s report says why.

    Args:
        model: one of transformers, such as GPT-2, whose Conv1D layers have weights (K, N).

    Returns:
        The model.

    Raises:
        TypeError: `model` is no module.
        ValueError: a module that is not replaced shares a weight. The model is unchanged then.
    """
    require_module("replace_conv1d_", model)
    layers = [m for m in model.modules() if is_conv1d(m) and reason_against_linear(m) is None]
    for tied in layers_by_weight("replace_conv1d_", model, layers):
        weight = transposed(tied[0].weight)
        for layer in tied:
            layer.in_features, layer.out_features, layer.weight = layer.nx, layer.nf, weight
            layer.conv1d_class = type(layer)
            layer.__class__ = nn.Linear
            del layer.nx, layer.nf
    return model


def restore_conv1d_(model: nn.Module) -> nn.Module:
    """Undoes replace_conv1d_ in place, with the present values.

    Args:
        model: one that replace_conv1d_ returned, after mf.restore_ where it is converted.

    Returns:
        The model.

    Raises:
        TypeError: `model` is no module.
        ValueError: a layer is converted, or a module that was not replaced shares a weight. The
            model is unchanged then.
    """
    require_module("restore_conv1d_", model)
    named: dict[str, Any] = {n: m for n, m in model.named_modules() if "conv1d_class" in vars(m)}
    for name, layer in named.items():
        if type(layer) is not nn.Linear:
            raise ValueError(
                "restore_conv1d_: expected layers that mf.restore_ has restored and that are not "
                f"parametrized, but {name} is a {type(layer).__name__}"
            )
    for tied in layers_by_weight("restore_conv1d_", model, [*named.values()]):
        weight = transposed(tied[0].weight)
        for layer in tied:
            layer.nx, layer.nf, layer.weight = layer.in_features, layer.out_features, weight
            layer.__class__ = layer.conv1d_class
            del layer.conv1d_class, layer.in_features, layer.out_features
    return model


def layers_by_weight(caller: str, model: nn.Module, layers: list[Any]) -> list[list[Any]]:
    """Returns the layers, those together that share one weight.

    Raises:
        ValueError: another module of the model has a weight too, which would not be transposed.
    """
    groups: dict[int, list[Any]] = {}
    for layer in layers:
        groups.setdefault(id(layer.weight), []).append(layer)
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            is_own = key == "weight" and module in groups.get(id(parameter), ())
            if id(parameter) in groups and not is_own:
                raise ValueError(
                    f"{caller}: expected weights that Conv1D layers alone have, but one of them is "
                    f"{join(name, key)} too; give that module a copy, "
                    "nn.Parameter(weight.detach().clone())"
                )
    return list(groups.values())


def transposed(weight: nn.Parameter) -> nn.Parameter:
    """Returns a transposed copy with the gradient, the attributes and the hooks of a weight."""
    new = nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)
    if weight.grad is not None:
        new.grad = weight.grad.t().contiguous()
    new.__dict__.update(weight.__dict__)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if found := getattr(weight, hooks):
            setattr(new, hooks, found)  # the dict itself, so that handles still remove hooks
    return new
