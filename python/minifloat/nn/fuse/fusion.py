"""Fusion of norms and feed-forwards with casts, all at once, and its undoing."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn

from ..convert.selection import Fusion
from ..linear import Linear
from .mlp_patterns import fuse_mlps
from .norms import DeferringNorm, restore_norm
from .producers import fuse_norms


def fuse(model: nn.Module, layers: Container[nn.Module]) -> list[Fusion]:
    """Fuses what converted layers allow, in place, and returns the report's rows."""
    return fuse_norms(model, layers) + fuse_mlps(model, layers)


def fused_parts(model: nn.Module) -> list[Any]:
    """Returns the model's fused norms, and a FusedMlp for each of its layers."""
    norms = [module for module in model.modules() if isinstance(module, DeferringNorm)]
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    return norms + [m.fused_mlp for m in layers if m.fused_mlp is not None]


def unfuse(model: nn.Module, kept: Container[Any] = ()) -> None:
    """Undoes `fuse` in place, except for what `kept` contains."""
    for part in fused_parts(model):
        if part in kept:
            continue
        if isinstance(part, DeferringNorm):
            restore_norm(part)
            continue
        for layer in part.layers:
            layer.__dict__.pop("fused_mlp", None)
