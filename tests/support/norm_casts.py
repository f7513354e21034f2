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
    weight: Tensor | None
    bias: Tensor | None
    kind: str
    eps: float

    def __str__(self) -> str:
        return f"{self.kind} of {tuple(self.x.shape)} {self.x.dtype}"

    def on(self, device: torch.device) -> Case:
        given = (self.x, self.weight, self.bias)
        moved = [None if t is None else t.to(device) for t in given]
        return Case(*moved, self.kind, self.eps)  # type: ignore[arg-type]

    @property
    def rest(self) -> tuple[Any, ...]:
        return self.weight, self.bias, self.kind, self.eps

    def norm(self) -> Tensor:
        return ops.norm(self.x, *self.rest)

    def cast(self, row: str, col: str, **options: Any) -> tuple[Tensor, ...]:
        """Returns the eight tensors of the cast."""
        return ops.quantize_norm(self.x, *self.rest, row, col, **options)

    def composition(self, row: str, col: str, **options: Any) -> tuple[Tensor, ...]:
        """Returns the same from the values."""
        y = self.norm()
        return ops.quantize(y.view(-1, y.shape[-1]), row, col, **options)

    def operands(self, recipe: str, **options: Any) -> list[Tensor]:
        return ops.norm_operands(self.x, *self.rest, recipe, **options)


def draw(
    kind: str,
    lead: tuple[int, ...],
    cols: int,
    dtype: torch.dtype,
    *,
    has_parameters: bool = True,
    parameters: torch.dtype | None = None,
    scale: float = 1.0,
) -> Case:
    """Draws a case.   parameters: the dtype of weight and bias; None: x's"""
    g = torch.Generator().manual_seed(cols + 7 * len(lead))

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g)

    x = (random(*lead, cols) * scale + 0.25).to(dtype)
    weight = bias = None
    if has_parameters:
        weight = (1 + random(cols) / 4).to(parameters or dtype)
        bias = random(cols).to(parameters or dtype) if kind == "layer" else None
    return Case(x, weight, bias, kind, 1e-5)


def require_same_outputs(got: tuple[Tensor, ...], want: tuple[Tensor, ...], what: str) -> None:
    """Compares the outputs of both directions."""
    named = (dict(zip(PARTS, outputs, strict=True)) for outputs in (got, want))
    require_all_same(*named, what)
