"""Ends a training step, and saves and loads what a converted model keeps between steps.

    mf.step(model)                       ends a training step
    mf.training_state(model)             the tensors that a checkpoint needs beside the state dict
    mf.load_training_state(model, state)

That is the random state and the amax histories. They are not in the state dict, which has the keys
of nn.Linear: mf.training_state returns them by the names of modules. All stochastic layers of one
mf.quantize_ call share one random state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._native import ops
from ...checks import require_module
from ...private_torch import copy_all_
from ..names import PRODUCT, join, unwrapped
from ..registry import distributed_functions, expert_functions, stages_in
from .guarded_steps import flag_on, was_left_out
from .random_hooks import add_hooks, find_hook, hooks_of, remove_hooks, states_of
from .random_state import RngState, distributed_rank
from .recipe_state import (
    DelayedScaling,
    RecipeState,
    converted,
    converted_among,
    draw_from,
    forget_weights,
    histories_of,
)
from .shared_streams import shared_streams

# ---- a step --------------------------------------------------------------------------------------


@torch.no_grad()
def step(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Ends a training step: drops cached codes, rolls amax histories, balances experts.

    Call mf.step after opt.step(), on all ranks. Layers that were built without a name take the ones
    that they have in `model`, so that no two of them draw the same random bits from now on. The
    active amax of the next step is computed from the amaxes of this step and the steps before
    (numerics.md). The balance biases of mf.MoE move by the loads of all ranks, which one all-reduce
    adds up. Under FSDP2 ranks exchange the maxima of all sharded weights, as in
    mf.distributed.precompute_scales; nothing is cast.

    After a step that mf.inspector.StepGuard left out amax histories and balance biases stay as they
    are, and what the step counted for them is dropped.

    Ranks compare their layers first: at a model's first step, in each step that reduces anything,
    and in the step after one where a rank's layers have changed (docs/distributed.md, "Ranks agree
    by name").

    Args:
        model: one that mf.quantize_ converted, or that has mf.Linear layers. Several stages of a
            pipeline on one rank are one nn.ModuleList.
        group: the data-parallel ranks, whose amaxes are reduced to their maximum, and whose counts
            of tokens to their sum; None: all ranks, or in a pipeline those of the same stage.

    Raises:
        TypeError: `model` is no module, or `group` is no process group that has this rank. Where
            there are other ranks it is a ValueError.
        ValueError: two parts of the model draw the same random bits (mf.quantize_'s seed), or
            nobody read mf.moe.balance_loss after a forward of layers with balance="loss"; a rank is
            missing, or the layers of ranks differ. Every rank that calls raises it. Nothing has
            changed then.

    Source: delayed scaling of Transformer Engine (DelayedScaling, amax_history_len,
    amax_compute_algo, margin).

    Example:
        >>> model = mf.Linear(64, 32, recipe="fp8_delayed")
        >>> model(torch.full((2, 64), 3.0)).sum().backward()
        >>> mf.step(model)  # after opt.step()
        >>> mf.training_state(model)["amax_history"][0, :3]  # of x: active, current, last step
        tensor([3., 0., 3.])
    """
    try:
        require_module("step", model)
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "step: group: expected a process group that this rank is in, or None, "
                f"got {group!r} ({type(group).__name__})"
            )
    except TypeError as error:
        distributed_functions.raise_on_all(error, group)
    model = unwrapped(model)
    modules = list(model.named_modules())
    layers, routers = converted_among(modules), expert_functions.routers(modules)
    name_layers(layers)
    fault = shared_streams(modules) or expert_functions.unread_losses(modules)
    compared = [(name, layer) for name, layer in layers if not layer.is_of_rank]
    ranks = distributed_functions.group_of_step(model, compared, routers, group, fault)
    left_out = was_left_out(model)
    forget_weights(layers)
    _roll_histories(model, layers, ranks, left_out)
    expert_functions.end_step(modules, ranks, left_out)
    distributed_functions.exchange_scales([layer for _, layer in layers])


def _roll_histories(
    model: nn.Module,
    layers: list[tuple[str, RecipeState]],
    ranks: dist.ProcessGroup | None,
    left_out: Tensor | None,
) -> None:
    """Rolls the histories of all layers, with one call for those of one shape and rule.

    ranks: those with the same layers; None: this one alone.
    left_out: float32 (), 1 where the step was left out, so that no history rolls; None: it was not.
    """
    delayed = [(layer, history) for _, layer, history in histories_of(layers)]
    if not delayed:
        return
    distributed_functions.reshard(model)  # an evaluation leaves codes under the former scales
    if ranks is not None:
        _reduce_running(delayed, ranks)
    groups: dict[tuple[torch.device, torch.Size, DelayedScaling], list[Tensor]] = {}
    for layer, history in delayed:
        key = (history.device, history.shape, layer.delayed)
        groups.setdefault(key, []).append(history)
        if layer.evaluates_unscaled:  # an assignment to a module takes microseconds
            layer.evaluates_unscaled = False
    for (device, _, rule), histories in groups.items():
        before = None if left_out is None else torch.stack(histories)
        ops.roll_amax_histories(histories, algorithm=rule.amax_algorithm, margin=rule.margin)
        if left_out is not None and before is not None:
            before[..., 1] = 0  # this step's amaxes
            is_kept = flag_on(device, left_out) > 0
            kept = torch.where(is_kept, before, torch.stack(histories))
            copy_all_(histories, [*kept.unbind()])


@torch.no_grad()
def drop_counts(model: nn.Module) -> None:
    """Drops the amaxes and tokens that were counted since the last mf.step, of a step given up."""
    modules = list(model.named_modules())
    for _, _, history in histories_of(converted_among(modules)):
        history[..., 1].zero_()
    for _, router in expert_functions.routers(modules):
        cast(Tensor, router.counts).zero_()


def _reduce_running(delayed: list[tuple[RecipeState, Tensor]], group: dist.ProcessGroup) -> None:
    """Replaces this step's amaxes by the largest of all ranks, in one all-reduce.

    A rank that has some experts of all has zeros for the others.
    """
    current = [history[..., 1] for _, history in delayed]
    ranges = [layer.expert_range for layer, _ in delayed]
    sent = [amaxes if r is None else r.of_all(amaxes) for r, amaxes in zip(ranges, current)]
    reduced = distributed_functions.reduce_amaxes(
        torch.cat([amaxes.reshape(-1) for amaxes in sent]), group
    )
    split = reduced.split([amaxes.numel() for amaxes in sent])
    new = [amaxes.view_as(before) for amaxes, before in zip(split, sent)]
    new = [amaxes if r is None else r.own(amaxes) for r, amaxes in zip(ranges, new)]
    copy_all_(current, new)


# ---- checkpoints ---------------------------------------------------------------------------------


def training_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies the random counters and amax histories of a model.

    Where ranks have different experts, all of them call this: they exchange the histories.

    Args:
        model: one that mf.quantize_ converted, or that has mf.Linear layers; or a part of one, such
            as a stage of a pipeline.

    Returns:
        Copies by name, the same on every data-parallel rank. "rng": int64 (seed, count), of the
        call mf.quantize_(model, …), also where `model` is a part of that model; "<name>.rng" of a
        module that was converted alone; "gradients.rng" of quantize_gradients_(model, …).
        "<name>.amax_history": float32 (6, 1 + length), a row an operand; (6, E, 1 + length) of
        the E experts of all ranks.

    Raises:
        TypeError: `model` is no module.
        ValueError: ranks have different experts, and one is missing, or has other layers; on every
            rank.

    Example:
        >>> model = mf.Linear(64, 32, recipe="nvfp4", seed=7)
        >>> y = model(torch.ones(2, 64))
        >>> mf.training_state(model)  # the seed, and the forwards so far
        {'rng': tensor([7, 1])}
    """
    name_layers(converted(require_module("training_state", model)))
    state = _state_of_rank(model)
    divided: dict[dist.ProcessGroup, list[str]] = {}  # the histories that ranks have parts of
    for fqn, layer, _ in histories_of(converted(model)):
        if layer.expert_range is not None:
            name = join(fqn, "amax_history")
            divided.setdefault(layer.expert_range.group, []).append(name)
    for group, names in divided.items():
        distributed_functions.require_same_names("mf.training_state of", names, group)
        for name in names:
            state[name] = distributed_functions.reduce_amaxes(state[name], group)
    return state


def _state_of_rank(model: nn.Module) -> dict[str, Tensor]:
    """Returns training_state's tensors, with zeros for the experts of other ranks."""
    state = {name: rng.get() for name, rng in _rng_states(model)}
    for fqn, layer, history in histories_of(converted(model)):
        kept = layer.expert_range
        state[join(fqn, "amax_history")] = history.clone() if kept is None else kept.of_all(history)
    return state


def _rng_states(model: nn.Module) -> list[tuple[str, RngState]]:
    """Lists the random states of a model by name.

    A model may be a part of a converted one. Its layers then draw from the state of the converted
    model, whose hooks are outside the part. That state is named as if the part were the model. Of
    several such states, each has the name of the first layer that draws from it.
    """
    found = [(join(fqn, "rng"), rng) for fqn, rng in states_of(model)]
    hooked, outside = [rng for _, rng in found], dict[RngState, str]()
    for fqn, layer in converted(model):
        if layer.rng_state is not None and layer.rng_state not in hooked:
            outside.setdefault(layer.rng_state, fqn)
    is_one = len(outside) == 1 and all(name != "rng" for name, _ in found)
    return found + [(join("" if is_one else fqn, "rng"), rng) for rng, fqn in outside.items()]


@torch.no_grad()
def load_training_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loads the state that training_state returned.

    Args:
        model: one that is converted with the recipe and history length of the saved one.
        state: tensors by name, of any device.

    Raises:
        TypeError, ValueError: the state is not one of this model. Of ranks that gather weights as
            codes under delayed scaling, one has such a state or another one, or is missing: a
            ValueError, on every rank. The model is unchanged then.

    Example:
        >>> model, resumed = (mf.Linear(64, 32, recipe="nvfp4", seed=7) for _ in range(2))
        >>> y = model(torch.ones(2, 64))
        >>> mf.load_training_state(resumed, mf.training_state(model))
        >>> mf.training_state(resumed)
        {'rng': tensor([7, 1])}
    """
    layers = converted(require_module("load_training_state", model))
    name_layers(layers)
    error, loaded = None, []
    try:
        require_state(_state_of_rank(model), state)
    except (TypeError, ValueError) as found:
        error = found
    for fqn, layer, history in histories_of(layers):
        entry, kept = history if error else state[join(fqn, "amax_history")], layer.expert_range
        loaded.append((layer, entry if error or kept is None else kept.own(entry)))
    distributed_functions.require_same_scales(loaded, error)
    if error is not None:
        raise error
    for name, rng in _rng_states(model):
        rng.set(state[name])
    distributed_functions.reshard(model)  # an evaluation leaves codes under the former scales
    for layer, entry in loaded:
        cast(Tensor, layer.amax_history).copy_(entry)
        layer.evaluates_unscaled &= not entry[..., 0].any().item()
    forget_weights(layers)


def require_state(wanted: Mapping[str, Tensor], state: object) -> None:
    """Raises TypeError or ValueError where a state is not like the model's own."""
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
        entry = state[name]
        if not isinstance(entry, Tensor):
            raise TypeError(f"load_training_state: {name}: expected a tensor, got {entry!r}")
        if entry.shape != tensor.shape or entry.dtype != tensor.dtype:
            raise ValueError(
                f"load_training_state: expected {name} as {tensor.dtype} {tuple(tensor.shape)}, "
                f"got {entry.dtype} {tuple(entry.shape)}"
            )
        if entry.is_meta or entry.layout != torch.strided:
            raise ValueError(
                f"load_training_state: {name}: expected a dense tensor with values, "
                f"got {entry.layout} on {entry.device}"
            )
        if (entry[1:] if name.split(".")[-1] == "rng" else entry).lt(0).any():
            raise ValueError(
                f"load_training_state: {name}: expected counts and amaxes of at least 0, "
                f"got {entry}"
            )


# ---- the random state ----------------------------------------------------------------------------


def share_random_state(
    root: nn.Module, layers: list[RecipeState], seed: int, data_parallel_rank: int | None
) -> None:
    """Gives one RngState, and the hooks that advance it, to the layers with stochastic rounding.

    All layers keep a number of their names, by which mf.step knows stages of one model. Stages of a
    library's pipeline have a state each, as they have on ranks of their own.
    """
    conversion = ops.stream("\n".join(layer.fqn for layer in layers if not layer.is_of_rank))
    for layer in layers:
        layer.conversion = conversion
    for part in stages_in(root) or [root]:
        inner = set(part.modules())
        stochastic = [m for m in layers if m.recipe.is_stochastic and m in inner]
        state = state_of(part)
        if state is None and (unused := find_hook(part)) is not None:  # of layers restored in parts
            for module in part.modules():
                remove_hooks(module, [h for h in hooks_of(module) if h.state is not unused.state])
        if not stochastic:
            continue
        state = state or RngState(seed, data_parallel_rank)
        add_hooks(part, state, stochastic)
        for layer in stochastic:
            draw_from(layer, state)


def state_of(root: nn.Module) -> RngState | None:
    """Returns the state that layers of the root draw from; None: all were restored, or none is."""
    hook = find_hook(root)
    drawn_from = [m.rng_state for m in root.modules() if isinstance(m, RecipeState)]
    return hook.state if hook is not None and hook.state in drawn_from else None


def require_same_random_state(root: nn.Module, seed: int, data_parallel_rank: int | None) -> None:
    """Checks that seed and rank equal those of an earlier mf.quantize_ of the same root."""
    rank = distributed_rank() if data_parallel_rank is None else data_parallel_rank
    states = [state for part in stages_in(root) or [root] if (state := state_of(part)) is not None]
    for name, present, value in (
        row
        for state in states
        for row in (("seed", state.seed, seed), ("data_parallel_rank", state.rank, rank))
    ):
        if value != present:
            raise ValueError(
                f"{name}: expected {present}, which this model's converted layers draw their "
                f"random bits with, got {value}"
            )


def name_layers(layers: Iterable[tuple[str, RecipeState]]) -> None:
    """Names layers and products that were built without a name as they are in a model."""
    for fqn, layer in layers:
        if fqn and not layer.is_named:
            layer.rename(fqn.removesuffix(PRODUCT))
