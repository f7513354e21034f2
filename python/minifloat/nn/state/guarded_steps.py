"""Which models have a guard of their steps, and whether it left the last step out.

inspector/guard.py makes the guards. mf.step asks here, and so does mf.GraphedStep, whose
replays run no hook of an optimizer.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from torch import Tensor, nn


class Guard(Protocol):
    """What others call of a guard."""

    # float32 (): 1 where the last step was left out, else 0; None: none was looked at yet.
    left_out: Tensor | None

    def report(self) -> bool:
        """Warns of the last step, or raises, where it was left out and nobody was told."""

    def send(self) -> None:
        """Copies what was found of the last step to the host, and waits for nothing."""


# Every module of a guarded model; mf.step may get a part of it, or a module around it.
guards: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Guard]] = weakref.WeakKeyDictionary()


def guard_of(model: nn.Module) -> Guard | None:
    """Returns the guard of a model, or of the first module in it that has one; None: none has.

    Args:
        model: without wrappers (names.unwrapped).
    """
    found = (guard() for module in model.modules() if (guard := guards.get(module)) is not None)
    return next((guard for guard in found if guard is not None), None) if guards else None
