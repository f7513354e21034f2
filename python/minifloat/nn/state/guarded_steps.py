"""Which models have a guard of their steps, and whether it left the last step out.

inspector/guard.py makes the guards. mf.step asks here, and so does mf.GraphedStep, whose
replays call no guard.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor, nn


class Guard(Protocol):
    """What others call of a guard."""

    # float32 (): 1 where a step was left out since the last mf.step, else 0; None: none was read.
    left_out: Tensor | None

    def report(self) -> bool:
        """Warns of the last step, or raises, where it was left out and nobody was told."""

    def send(self) -> None:
        """Copies what was found of the last step to the host, and waits for nothing."""

    def remove(self) -> None:
        """Ends the guard, after a report of the last step."""


# Every module of a guarded model; mf.step may get a part of it, or a module around it.
guards: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Guard]] = weakref.WeakKeyDictionary()


def guards_of(model: nn.Module) -> list[Guard]:
    """Returns the guards of a model and of the modules in it.

    Args:
        model: without wrappers (names.unwrapped).
    """
    if not guards:
        return []
    found = (guard() for module in model.modules() if (guard := guards.get(module)) is not None)
    return [*dict.fromkeys(guard for guard in found if guard is not None)]


def take_left_out(model: nn.Module) -> Tensor | None:
    """Returns 1 where a guard has left a step out since the last call, else 0; None: has read none.

    Steps of several guards are one: their model's histories do not roll where one is left out.
    """
    found = None
    for guard in guards_of(model):
        flag, guard.left_out = guard.left_out, None
        if flag is not None:
            found = flag if found is None else torch.maximum(found, flag.to(found.device))
    return found
