"""mf.step, once a training step.

It rolls amax histories, balances routers, drops cached codes and exchanges FSDP2's amaxes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._native import ops
from ...checks import require_module
from ..hooks import expert_hooks, hooks
from ..names import unwrapped
from .recipe_state import (
    DelayedScaling,
    RecipeState,
    converted,
    forget_weights,
    histories_of,
)
from .shared_random_state import require_own_streams


def _reduce_running(layers: list[RecipeState], group: dist.ProcessGroup | None) -> None:
    """Replaces this step's amaxes by the largest of all ranks, in one all-reduce.

    A rank that has some experts of all has zeros for the others.
    """
    current = [layer._buffers["amax_history"][..., 1] for layer in layers]  # type: ignore[index]
    ranges = [layer.expert_range for layer in layers]
    sent = [amaxes if r is None else r.of_all(amaxes) for r, amaxes in zip(ranges, current)]
    reduced = hooks().reduce_amaxes(torch.cat([amaxes.reshape(-1) for amaxes in sent]), group)
    split = reduced.split([amaxes.numel() for amaxes in sent])
    new = [amaxes.view_as(before) for amaxes, before in zip(split, sent)]
    new = [amaxes if r is None else r.own(amaxes) for r, amaxes in zip(ranges, new)]
    torch._foreach_copy_(current, new)


@torch.no_grad()
def step(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Ends a training step: drops cached codes, rolls amax histories, balances experts.

    Call mf.step after opt.step(), on all ranks. The active amax of the next step is computed from
    the amaxes of this step and the steps before (numerics.md). The balance biases of mf.MoE move by
    the loads of all ranks, which one all-reduce adds up. Under FSDP2 ranks exchange the maxima of
    all sharded weights, as in mf.precompute_scales; nothing is cast.

    Args:
        model: one that mf.quantize_ converted, or that has mf.Linear layers.
        group: the data-parallel ranks, whose amaxes are reduced to their maximum, and whose counts
            of tokens to their sum; None: all ranks.

    Raises:
        TypeError: `model` is no module, or `group` is no process group that has this rank.
        ValueError: two parts of the model draw the same random bits (mf.quantize_'s seed).

    Source: delayed scaling of Transformer Engine (DelayedScaling, amax_history_len,
    amax_compute_algo, margin).
    """
    require_module("step", model)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "step: group: expected a process group that this rank is in, or None, "
            f"got {group!r} ({type(group).__name__})"
        )
    require_own_streams("step", model)
    layers = converted(model)
    forget_weights(layers)
    _roll_histories(layers, group)
    expert_hooks().end_step(model, group)
    hooks().precompute_scales(unwrapped(model))


def _roll_histories(layers: list[tuple[str, RecipeState]], group: dist.ProcessGroup | None) -> None:
    """Rolls the histories of all layers, with one call for those of one shape and rule."""
    groups: dict[tuple[torch.device, torch.Size, DelayedScaling], list[Tensor]] = {}
    delayed = []
    for _, layer, history in histories_of(layers):
        key = (history.device, history.shape, layer.delayed)
        groups.setdefault(key, []).append(history)
        delayed.append(layer)
        layer.evaluates_unscaled = False
    if not groups:
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        _reduce_running(delayed, group)
    for (_, _, rule), histories in groups.items():
        ops.roll_amax_histories(histories, algorithm=rule.algorithm, margin=rule.margin)
