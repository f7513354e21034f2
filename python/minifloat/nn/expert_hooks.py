"""Functions of `moe` that conversion and mf.step call. `nn` does not import `moe`.

Importing `minifloat.moe.hooks` registers them, as the package does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class ExpertHooks:
    """The functions for models with experts.

    end_step    (model, group): moves the balance of routers by this step's counts
    """

    end_step: Callable[[nn.Module, dist.ProcessGroup | None], None]


_REGISTERED: list[ExpertHooks] = []


def register(hooks: ExpertHooks) -> None:
    """Registers the functions.

    Raises:
        RuntimeError: functions are registered already.
    """
    if _REGISTERED:
        raise RuntimeError("expert hooks: expected one registration, got a second")
    _REGISTERED.append(hooks)


def expert_hooks() -> ExpertHooks:
    """Returns the registered functions."""
    return _REGISTERED[0]
