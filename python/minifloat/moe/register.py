"""Registers the functions of mixtures of experts that `nn` calls, in nn/registry.py."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from ..nn.names import clean_name
from ..nn.registry import NamedModules, expert_functions
from ..nn.state.guarded_steps import flag_on
from .balance import unread_losses
from .convert.experts import convert, restore, revert, select
from .layer import divided_experts
from .ranks.parallel_experts import ExpertParallel, to_host
from .router import Router


def routers_of(modules: NamedModules) -> list[tuple[str, Router]]:
    """Finds (name, router) of the routers whose counts have values, among a model's modules."""
    found = [(clean_name(fqn), module) for fqn, module in modules if isinstance(module, Router)]
    return [(name, router) for name, router in found if not router.counts.is_meta]


def end_step(
    modules: NamedModules, ranks: dist.ProcessGroup | None, left_out: Tensor | None
) -> None:
    """Ends the step of all routers, with the counts of all ranks from one all-reduce.

    Args:
        modules: (name, module) of a model.
        ranks: those with the same routers; None: this one alone.
        left_out: float32 (), 1 where the step was left out: it then counts no token, and moves no
            bias; None: it was not.
    """
    routers = [module for _, module in modules if isinstance(module, Router)]
    for router in routers:
        router.loss = None  # of a forward without gradients: unread_losses refuses others
    warn_of_dropped(divided_experts(module for _, module in modules).values())
    routers = [router for router in routers if not router.counts.is_meta]
    if not routers:
        return
    if ranks is not None:
        counts = [router.counts for router in routers]
        every = torch.cat([count.to(counts[0].device) for count in counts])
        dist.all_reduce(every, group=ranks)
        for count, new in zip(counts, every.split([count.numel() for count in counts])):
            count.copy_(new)
    for router in routers:
        if left_out is not None:
            router.counts.mul_(flag_on(router.counts.device, left_out) == 0)
        router.end_step()


def warn_of_dropped(layers: Iterable[ExpertParallel]) -> None:
    """Warns of rows that were dropped past a capacity since the step before, after one copy.

    A step that a CUDA graph captures does neither; the next step outside a graph does.
    """
    counters = {p: p.dropped for p in layers if p.dropped is not None}
    if not counters:
        return
    first = next(iter(counters.values()))
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    numbers = to_host(torch.cat([counter.to(first.device) for counter in counters.values()]))
    for (layer, counter), number in zip(counters.items(), numbers):
        counter.zero_()
        layer.step_dropped = number
    dropped = [layer for layer in counters if layer.step_dropped]
    if dropped:
        listed = ", ".join(
            f"{p.step_dropped} rows of {p.name} (capacity {p.capacity})" for p in dropped
        )
        warnings.warn(
            f"mf.step: rank {dropped[0].rank} dropped {listed}: more rows than the capacity "
            "went to one rank, and added nothing to their tokens",
            stacklevel=3,
        )


expert_functions.select = select
expert_functions.convert = convert
expert_functions.revert = revert
expert_functions.restore = restore
expert_functions.unread_losses = unread_losses
expert_functions.routers = routers_of
expert_functions.end_step = end_step
