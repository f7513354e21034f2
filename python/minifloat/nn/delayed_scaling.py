"""mf.step, and the amax histories of delayed scaling, which it rolls once a step.

mf.step(model)      after opt.step(): the amax that the next step scales by
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._native import ops
from ..checks import require_module
from .distributed_hooks import hooks
from .linear import forget_weights, histories_of
from .names import unwrapped
from .random_state import states_of


def _reduce_running(histories: list[Tensor], group: dist.ProcessGroup | None) -> None:
    """The step's own amaxes become the largest of all ranks, in one all-reduce."""
    own = [history[..., 1] for history in histories]
    reduced = hooks().reduce_amaxes(torch.cat([amaxes.reshape(-1) for amaxes in own]), group)
    parts = reduced.split([amaxes.numel() for amaxes in own])
    torch._foreach_copy_(own, [part.view_as(amaxes) for part, amaxes in zip(parts, own)])


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
    forget_weights(model)
    for _, rng in states_of(model):
        rng.is_driven = False
    _roll_histories(model, group)
    hooks().precompute_scales(unwrapped(model))


def _roll_histories(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    alike: dict[tuple, list[Tensor]] = {}
    for _, layer, history in histories_of(model):
        key = (history.device, history.shape, layer.amax_algorithm, layer.margin)
        alike.setdefault(key, []).append(history)
    if not alike:
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        _reduce_running([history for same in alike.values() for history in same], group)
    for (_, _, algorithm, margin), histories in alike.items():
        ops.roll_amax_histories(histories, algorithm=algorithm, margin=margin)
