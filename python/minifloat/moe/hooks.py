"""Functions of mixtures of experts that `nn` calls. Importing this module registers them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..nn.hooks import ExpertHooks, register
from ..nn.names import unwrapped
from .convert.experts import convert, plan_gather, restore, revert, select
from .layer import Experts
from .ranks.dropped import warn_of_dropped
from .router import Router


def forward_cut(*arguments: Any) -> Tensor:
    """Computes the forward of experts that ranks cut along I."""
    from .ranks.cut_forward import forward_cut  # imports torch's compiler

    return forward_cut(*arguments)


Experts.compute_cut = staticmethod(forward_cut)


def end_step(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Ends the step of all routers, with the counts of all ranks from one all-reduce."""
    modules = list(unwrapped(model).modules())
    links = [m.parallel for m in modules if isinstance(m, Experts) and m.parallel is not None]
    warn_of_dropped(links)
    routers = [module for module in modules if isinstance(module, Router)]
    routers = [router for router in routers if not router.counts.is_meta]
    if not routers:
        return
    if dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1:
        counts = [router.counts for router in routers]
        every = torch.cat([count.to(counts[0].device) for count in counts])
        dist.all_reduce(every, group=group)
        for count, new in zip(counts, every.split([count.numel() for count in counts])):
            count.copy_(new)
    for router in routers:
        router.end_step()


register(
    ExpertHooks(
        select=select,
        plan_gather=plan_gather,
        convert=convert,
        revert=revert,
        restore=restore,
        end_step=end_step,
    )
)
