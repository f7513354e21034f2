"""Which models have a guard of their steps, and whether it left the last step out.

inspector/guard.py makes the guards. mf.step asks here, and so does mf.GraphedStep, whose
replays call no guard.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Guard(Protocol):
    """What others call of a guard."""

    model: nn.Module  # without wrappers (names.unwrapped)
    # float32 (): 1 where a check since the last mf.step has left a step out, else 0; None: none was
    # made.
    left_out: Tensor | None
    stepped: weakref.WeakSet[nn.Module]  # models whose mf.step has read it

    def report(self) -> bool:
        """Warns of the last step, or raises, where it was left out and nobody was told."""

    def take_captured(self) -> list[Any]:
        """Returns what checks write in each replay of a graph that was just captured."""

    def send(self, written: Sequence[Any]) -> None:
        """Copies what checks have written to the host, and waits for nothing."""

    def remove(self) -> None:
        """Ends the guard, after a report of the last step."""


guards: weakref.WeakKeyDictionary[Guard, None] = weakref.WeakKeyDictionary()  # in their order


def guards_of(model: nn.Module) -> list[Guard]:
    """Returns the guards of a model, of modules in it, and of a module around it.

    Args:
        model: without wrappers.
    """
    if not guards:
        return []
    inside = {*model.modules()}
    return [g for g in [*guards] if g.model in inside or model in {*g.model.modules()}]


def was_left_out(model: nn.Module) -> Tensor | None:
    """Returns 1 where a check of a model's step has left one out, else 0; None: there was none.

    Steps of several guards are one: no history rolls where any of them is left out. A second call
    of one model ends a step without a check.
    """
    found = None
    for guard in guards_of(model):
        if guard.left_out is None or model in guard.stepped:
            continue
        guard.stepped.add(model)
        flag = guard.left_out
        found = flag if found is None else torch.maximum(found, flag.to(found.device))
    return found


def flag_on(device: torch.device, left_out: Tensor) -> Tensor:
    """Copies was_left_out's flag to a device; a GPU's copy makes nothing wait."""
    return left_out.to(device, non_blocking=device.type == "cuda")
