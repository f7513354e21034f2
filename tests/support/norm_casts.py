"""Normalisations and their casts as one op, beside the composition, for tests of both devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from minifloat._native import ops
from torch import Tensor

from tests.support.same_bits import require_all_same

KINDS = ["rms", "rms_rounded", "layer"]
PARTS = [f"{part}_{s}" for s in ("row", "col") for part in ("codes", "scale", "amax", "decoded")]


@dataclass(frozen=True)
class Case:
    """The inputs of a normalisation."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    kind: str
    eps: float

    def __str__(self) -> str:
        added = "" if self.residual is None else " + residual"
        return f"{self.kind} of {tuple(self.x.shape)} {self.x.dtype}{added}"

    def on(self, device: torch.device) -> Case:
        moved = [
            None if t is None else t.to(device)
            for t in (self.x, self.residual, self.weight, self.bias)
        ]
        return Case(*moved, self.kind, self.eps)  # type: ignore[arg-type]

    @property
    def rest(self) -> tuple[Any, ...]:
        return self.weight, self.bias, self.kind, self.eps

    def norm(self) -> Tensor:
        if self.residual is None:
            return ops.norm(self.x, *self.rest)
        return ops.add_norm(self.x, self.residual, *self.rest)[1]

    def cast(self, row: str, col: str, **options: Any) -> tuple[Tensor, ...]:
        """Returns the sum, or x, and the eight tensors of the cast."""
        if self.residual is None:
            return (self.x, *ops.quantize_norm(self.x, *self.rest, row, col, **options))
        return ops.quantize_add_norm(self.x, self.residual, *self.rest, row, col, **options)

    def composition(self, row: str, col: str, **options: Any) -> tuple[Tensor, ...]:
        """Returns the same from the values."""
        total = self.x if self.residual is None else self.x + self.residual
        y = ops.norm(total, *self.rest)
        return (total, *ops.quantize(y.view(-1, y.shape[-1]), row, col, **options))

    def operands(self, recipe: str, **options: Any) -> list[Tensor]:
        if self.residual is None:
            return ops.norm_operands(self.x, *self.rest, recipe, **options)
        return ops.add_norm_operands(self.x, self.residual, *self.rest, recipe, **options)


def draw(
    kind: str,
    lead: tuple[int, ...],
    cols: int,
    dtype: torch.dtype,
    *,
    has_residual: bool = False,
    has_parameters: bool = True,
    parameters: torch.dtype | None = None,
    scale: float = 1.0,
) -> Case:
    """Draws a case.   parameters: the dtype of weight and bias; None: x's"""
    g = torch.Generator().manual_seed(cols + 7 * len(lead))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    x = (random(*lead, cols) * scale + 0.25).to(dtype)
    residual = random(*lead, cols).to(dtype) if has_residual else None
    weight = bias = None
    if has_parameters:
        weight = (1 + random(cols) / 4).to(parameters or dtype)
        bias = random(cols).to(parameters or dtype) if kind == "layer" else None
    return Case(x, residual, weight, bias, kind, 1e-5)


def require_same_outputs(got: tuple[Tensor, ...], want: tuple[Tensor, ...], what: str) -> None:
    """Compares the sum and the outputs of both directions."""
    names = ["sum", *PARTS]
    named = (dict(zip(names, outputs, strict=True)) for outputs in (got, want))
    require_all_same(*named, what)
