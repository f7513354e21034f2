"""Compiled calls, for tests of what torch.compile traces: no kernels are built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compiled(run: Callable[..., Any]) -> Any:
    """Compiles a function or module whole: a break in its graph is an error."""
    return torch.compile(run, backend="aot_eager", fullgraph=True)
