"""SwiGLU and its cast as one op, beside the composition of the two, for tests of both devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from minifloat._native import ops
from torch import Tensor

from tests.support.grouped_oracle import least_unit
from tests.support.same_bits import on_cpu, require_same

PARTS = ("codes", "scale", "amax", "decoded")
OUTPUTS = [f"{part}_{side}" for side in ("row", "col") for part in PARTS]
ENDS: list[tuple[list[int] | None, int]] = [
    (None, 40),
    (None, 128),
    ([40], 40),
    ([0, 0, 0], 50),
    ([0, 1, 16, 33, 33, 160], 160),
    ([127, 255, 384, 513], 513),
    ([50, 20, -7, 60, 300, 70], 128),
    ([256, 384, 384, 640], 768),
]


@dataclass(frozen=True)
class Case:
    """The inputs of a SwiGLU whose rows lie in groups, or not, and the options of both ops."""

    product: Tensor
    other: Tensor | None
    weights: Tensor
    form: dict[str, Any]

    @property
    def width(self) -> int:
        return self.product.shape[1] // (2 if self.other is None else 1)

    def on(self, device: torch.device) -> Case:
        def move(value: Any) -> Any:
            return value.to(device) if isinstance(value, Tensor) else value

        form = {name: move(value) for name, value in self.form.items()}
        return Case(move(self.product), move(self.other), move(self.weights), form)

    def cast(self, row: str, col: str, **options: Any) -> tuple[Tensor, ...]:
        tensors = self.product, self.other, self.weights
        return ops.quantize_swiglu(*tensors, row, col, **self.form, **options)

    def composition(self, row: str, col: str, **options: Any) -> tuple[Tensor, ...]:
        h = ops.swiglu(self.product, self.other, self.weights, **self.form)
        return ops.quantize(h, row, col, groups=self.form["groups"], **options)


def draw(
    offs: list[int] | None,
    rows: int,
    width: int,
    dtype: torch.dtype,
    parts: str,
    *,
    has_pairs: bool = True,
    scale: float = 1.0,
    **form: Any,
) -> Case:
    """Draws a case.   parts: "two" products, or one, "apart" or "interleaved"."""
    g = torch.Generator().manual_seed(rows + width)
    across = width if parts == "two" else 2 * width

    def matrix() -> Tensor:
        return (torch.randn(rows, across, generator=g) * scale).to(dtype)

    product, other = matrix(), matrix() if parts == "two" else None
    table = None
    if offs is not None:
        table = ops.group_table(torch.tensor(offs, dtype=torch.int32), rows)
        for t in (product, other):
            if t is not None:
                t[int(table[0, -1]) :] = float("nan")  # not read
    form["pairs"] = torch.randperm(rows, generator=g).int() if has_pairs else None
    form |= {"interleaved": parts == "interleaved", "groups": table}
    return Case(product, other, torch.rand(rows, generator=g), form)


def written(name: str, out: Tensor, spec: str, table: Tensor | None, rows: int) -> Tensor:
    """Returns the part of an output that lies in groups."""
    if table is None or not spec:
        return out
    part, side = name.split("_")
    if side == "row":
        is_of_rows = part in ("codes", "decoded") or out.dim() == 2 or "/row" in spec
        return out[: int(table[0, -1])] if is_of_rows and out.dim() else out
    if part == "amax" or out.dim() != 2 or (spec.startswith("e4m3/row") and part == "scale"):
        return out
    unit = least_unit(spec)
    length = unit * ((rows + unit - 1) // unit + table.shape[1] - 1)
    last = int(table[{16: 1, 32: 2, 64: 3, 128: 4}[unit], -1])
    return out[:, : last * out.shape[1] // length]


def require_same_cast(
    case: Case, got: tuple[Tensor, ...], want: tuple[Tensor, ...], row: str, col: str
) -> None:
    """Compares the outputs of both directions, each inside of groups."""
    table, rows = case.form["groups"], case.product.shape[0]
    for name, a, b in zip(OUTPUTS, on_cpu(got), want, strict=True):
        what = f"'{row}', '{col}' of {tuple(case.product.shape)} {case.form}: {name}"
        assert a.shape == b.shape, what
        where = (row if name.endswith("row") else col), table, rows
        require_same(written(name, a, *where), written(name, b, *where), what)
