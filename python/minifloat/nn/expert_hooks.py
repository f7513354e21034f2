"""Functions of `moe` that conversion and mf.step call. `nn` does not import `moe`.

Importing `minifloat.moe.hooks` registers them, as the package does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..recipe import Recipe
from .registration import Registration

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class ExpertChoice:
    """An experts module to convert.

    Args:
        fqn: its name.
        module: the module.
        names: its 3D parameters that products read.
        recipe: of the products.
        is_named: whether mf.quantize_'s `experts` names the parameters.
    """

    fqn: str
    module: nn.Module
    names: tuple[str, ...]
    recipe: Recipe
    is_named: bool = False


@dataclass(frozen=True)
class ExpertSelection:
    """The experts to convert, the other 3D parameters with reasons, and routers with reasons."""

    chosen: list[ExpertChoice]
    skipped: list[tuple[str, str]]
    routers: dict[nn.Module, tuple[str, str]]


@dataclass(frozen=True)
class ExpertHooks:
    """The functions for models with experts.

    select      (model, filters, experts, primary) -> what to convert
    plan_gather choice -> (plan of the weights' gathers or None, sentence for the report)
    convert     (choice, name in the whole model, plan, primary weights, delayed scaling) -> the
                new products
    revert      module: undoes one conversion, complete or not
    restore     model: undoes all
    end_step    (model, group): moves the balance of routers by this step's counts
    """

    select: Callable[..., ExpertSelection]
    plan_gather: Callable[[ExpertChoice], tuple[Any, str]]
    convert: Callable[..., list[Any]]
    revert: Callable[[nn.Module], None]
    restore: Callable[[nn.Module], None]
    end_step: Callable[[nn.Module, dist.ProcessGroup | None], None]


_REGISTRATION: Registration[ExpertHooks] = Registration("expert hooks")
register = _REGISTRATION.register


def expert_hooks() -> ExpertHooks:
    """Returns the registered functions."""
    return _REGISTRATION.functions()
