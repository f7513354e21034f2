"""mf.step, and the amax histories of delayed scaling, which it rolls once a step.

mf.step(model)      after opt.step(): the amax that the next step scales by
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checks import require_module
from .distributed_hooks import hooks
from .linear import forget_weights, histories_of
from .names import unwrapped
from .random_state import states_of


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
    reduced = hooks().reduce_amaxes(torch.cat([amaxes.reshape(-1) for amaxes in own]), group)
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
    stacks = [torch.stack(histories) for histories in alike.values()]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        _reduce_running(stacks, group)
    for (_, _, algorithm, margin), stacked, histories in zip(alike, stacks, alike.values()):
        fresh = torch.zeros_like(stacked[..., :1])
        force = in_force(stacked, algorithm, margin).unsqueeze(-1)
        rolled = torch.cat([force, fresh, stacked[..., 1:-1]], dim=-1)
        torch._foreach_copy_(histories, list(rolled.unbind()))
