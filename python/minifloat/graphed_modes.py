"""The modes of a model in mf.GraphedStep: which modules train, which parameters have gradients."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import nn

from .private_torch import WithoutTorchFunction


class GraphedModes:
    """What `training` of each module and `requires_grad` of each parameter are now.

    Modules and parameters are listed once: a walk at each call would take most of its host time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = []
        for flag, named in (
            ("training", dict(model.named_modules())),
            ("requires_grad", dict(model.named_parameters())),
        ):
            self._kept.append((flag, named, self._read(flag, named)))

    def require(self) -> None:
        """Raises ValueError where a mode has changed since."""
        for flag, named, kept in self._kept:
            now = self._read(flag, named)
            if now != kept:
                i = next(i for i, mode in enumerate(kept) if now[i] != mode)
                raise ValueError(
                    f"GraphedStep: expected {[*named][i] or 'the model'} with {flag}={kept[i]}, as "
                    f"at the capture, got {now[i]}; set it back, or make a new GraphedStep"
                )

    @staticmethod
    def _read(flag: str, named: dict[str, Any]) -> list[bool]:
        with WithoutTorchFunction():  # a wrapper's would take microseconds
            return [*map(attrgetter(flag), named.values())]
