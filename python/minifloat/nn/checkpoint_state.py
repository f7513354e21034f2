"""State beside the parameters: amax histories, rolled once a step, and random counters.

    mf.step(model)                       after opt.step(): the amax that the next step scales by
    mf.training_state(model)             what a checkpoint needs besides the model's state dict
    mf.load_training_state(model, state)

The state dict of a converted model keeps nn.Linear's keys; this state is apart, keyed by module
name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checks import require_module
from ..distributed.amaxes import reduce_amaxes
from ..distributed.fsdp.weight import precompute_scales
from .linear import Linear
from .random_state import RngState, find_hook

# Wrappers that put a name of their own between a module's and its parent's.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def clean_name(fqn: str) -> str:
    """The module's name as it was before torch.compile or activation checkpointing wrapped it."""
    return ".".join(part for part in fqn.split(".") if part not in WRAPPERS)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, out of torch.compile and DistributedDataParallel."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def join(*names: str) -> str:
    return ".".join(name for name in names if name)


def _layers(model: nn.Module) -> Iterator[Linear]:
    return (m for m in unwrapped(model).modules() if isinstance(m, Linear))


def _histories(model: nn.Module) -> Iterator[tuple[str, Linear, Tensor]]:
    for fqn, module in unwrapped(model).named_modules():
        if isinstance(module, Linear) and module.amax_history is not None:
            module.unwrap_buffers()
            yield clean_name(fqn), module, module.amax_history


def _forget_weights(model: nn.Module) -> None:
    """Weights or their scales have changed: they are quantized again."""
    for layer in _layers(model):
        for kept in (layer.weight_codes, layer.travel):
            if kept is not None:
                kept.forget()


def _rng_states(model: nn.Module) -> Iterator[tuple[str, RngState]]:
    for fqn, module in unwrapped(model).named_modules():
        hook = find_hook(module)
        if hook is not None:
            yield clean_name(fqn), hook.state


# ---- delayed scaling -----------------------------------------------------------------------------


def in_force(history: Tensor, algorithm: str, margin: int) -> Tensor:
    """The amax of the next step, (…) from history (…, 1 + length): the rule of core/scaling.h.

    The largest, or the newest, finite entry that is not zero, times 2^margin; where there is none,
    the amax in force stays.
    """
    previous, seen = history[..., 0], history[..., 1:]
    usable = seen.isfinite() & (seen != 0)
    candidates = torch.where(usable, seen, 0)
    if algorithm == "max":
        best = candidates.amax(-1)
    else:
        newest = usable.int().argmax(-1, keepdim=True)
        best = candidates.gather(-1, newest).squeeze(-1)
    scaled = (best * math.ldexp(1.0, margin)).clamp(max=torch.finfo(torch.float32).max)
    return torch.where(usable.any(-1), scaled, previous)


def _reduce_running(stacks: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """The step's own amaxes become the largest of all ranks, in one all-reduce."""
    own = [stack[..., 1] for stack in stacks]
    reduced = reduce_amaxes(torch.cat([amaxes.reshape(-1) for amaxes in own]), group)
    for amaxes, values in zip(own, reduced.split([amaxes.numel() for amaxes in own])):
        amaxes.copy_(values.view_as(amaxes))


@torch.no_grad()
def step(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Call it after opt.step(): weights have changed, and histories of delayed scaling roll.

    Under FSDP2 all weights are quantized here, as mf.precompute_scales does.
    group: the data-parallel ranks, whose amaxes are reduced together; None: all ranks.
    """
    require_module("step", model)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "step: group: expected a process group that this rank is in, or None, "
            f"got {group!r} ({type(group).__name__})"
        )
    _forget_weights(model)
    for _, rng in _rng_states(model):
        rng.is_driven = False
    _roll_histories(model, group)
    precompute_scales(unwrapped(model))


def _roll_histories(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    alike: dict[tuple, list[Tensor]] = {}
    for _, layer, history in _histories(model):
        key = (history.device, history.shape, layer.amax_algorithm, layer.margin)
        alike.setdefault(key, []).append(history)
    if not alike:
        return
    stacks = [torch.stack(histories) for histories in alike.values()]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        _reduce_running(stacks, group)
    for (_, _, algorithm, margin), stacked, histories in zip(alike, stacks, alike.values()):
        fresh = torch.zeros_like(stacked[..., :1])
        force = in_force(stacked, algorithm, margin).unsqueeze(-1)
        rolled = torch.cat([force, fresh, stacked[..., 1:-1]], dim=-1)
        torch._foreach_copy_(histories, list(rolled.unbind()))


# ---- checkpoints ---------------------------------------------------------------------------------


def training_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of random counters and amax histories, by name; the same on every data-parallel rank.

    "rng" is that of mf.quantize_(model, …); a part that was converted alone has "<name>.rng".
    """
    require_module("training_state", model)
    state = {join(fqn, "rng"): rng.get() for fqn, rng in _rng_states(model)}
    for fqn, _, history in _histories(model):
        state[join(fqn, "amax_history")] = history.clone()
    return state


def _require_entry(name: str, wanted: Tensor, entry: Tensor) -> None:
    """Requires of `entry` all that writing it needs."""
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
    """Sets what training_state returned.

    Raises:
        TypeError, ValueError: the state is not one of this model. Nothing is written then.
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
    for fqn, rng in _rng_states(model):
        rng.set(state[join(fqn, "rng")])
    for fqn, _, history in _histories(model):
        history.copy_(state[join(fqn, "amax_history")])
    _forget_weights(model)
