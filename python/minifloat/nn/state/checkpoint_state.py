"""State of a converted model beside its parameters: amax histories and random counters.

    mf.training_state(model)             the tensors that a checkpoint needs beside the state dict
    mf.load_training_state(model, state)

The state dict of a converted model has the keys of nn.Linear. This state is separate, and its keys
are module names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...checks import require_module
from ..hooks import hooks
from ..names import join
from .random_state import states_of
from .recipe_state import converted, forget_weights, histories_of


def training_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies the random counters and amax histories of a model.

    Where ranks have different experts, all of them call this: they exchange the histories.

    Args:
        model: one that mf.quantize_ converted, or that has mf.Linear layers.

    Returns:
        Copies by name, the same on every data-parallel rank. "rng": int64 (seed, count), of the
        call mf.quantize_(model, …); "<name>.rng" of a module that was converted alone.
        "<name>.amax_history": float32 (6, 1 + length), a row an operand; (6, E, 1 + length) of
        the E experts of all ranks.

    Raises:
        TypeError: `model` is no module.
    """
    require_module("training_state", model)
    state = {join(fqn, "rng"): rng.get() for fqn, rng in states_of(model)}
    for fqn, layer, history in histories_of(converted(model)):
        name, kept = join(fqn, "amax_history"), layer.expert_range
        if kept is None:
            state[name] = history.clone()
        else:
            state[name] = hooks().reduce_amaxes(kept.of_all(history), kept.group)
    return state


def _require_entry(name: str, wanted: Tensor, entry: Tensor) -> None:
    """Checks that `entry` can be written to the tensor `wanted`."""
    if not isinstance(entry, Tensor):
        raise TypeError(f"load_training_state: {name}: expected a tensor, got {entry!r}")
    if entry.shape != wanted.shape or entry.dtype != wanted.dtype:
        raise ValueError(
            f"load_training_state: expected {name} as {wanted.dtype} {tuple(wanted.shape)}, "
            f"got {entry.dtype} {tuple(entry.shape)}"
        )
    if entry.is_meta or entry.layout != torch.strided:
        raise ValueError(
            f"load_training_state: {name}: expected a dense tensor with values, "
            f"got {entry.layout} on {entry.device}"
        )
    if (entry[1:] if name.split(".")[-1] == "rng" else entry).lt(0).any():
        raise ValueError(
            f"load_training_state: {name}: expected counts and amaxes of at least 0, got {entry}"
        )


@torch.no_grad()
def load_training_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads the state that training_state returned.

    Args:
        model: one that is converted with the recipe and history length of the saved one.
        state: tensors by name, of any device.

    Raises:
        TypeError, ValueError: the state is not one of this model. The model is unchanged then.
    """
    wanted = training_state(require_module("load_training_state", model))
    if not isinstance(state, Mapping):
        raise TypeError(
            f"load_training_state: expected a dict of names and tensors, got {type(state).__name__}"
        )
    missing, unknown = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    if missing or unknown:
        raise ValueError(
            f"load_training_state: expected the keys of this model's training_state; missing "
            f"{missing or 'none'}, not of this model {unknown or 'none'}"
        )
    for name, tensor in wanted.items():
        _require_entry(name, tensor, state[name])
    for fqn, rng in states_of(model):
        rng.set(state[join(fqn, "rng")])
    layers = converted(model)
    for fqn, layer, history in histories_of(layers):
        entry, kept = state[join(fqn, "amax_history")], layer.expert_range
        history.copy_(entry if kept is None else kept.own(entry))
        layer.evaluates_unscaled &= not entry[..., 0].any().item()
    forget_weights(layers)
