"""The result of mf.inspect: a row a layer and recipe, as tables, a heat map, JSON and a recipe map.

docs/inspector.md defines each number and says how the recipe map ranks layers.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, BinaryIO

from ..nn.convert.selection import display
from ..recipe import Recipe, RecipeMap

NOT_CALLED = "not called by this batch"
GLOB_SIGNS = frozenset("*?;")  # of a recipe map


@dataclass(frozen=True)
class OperandRow:
    """What one cast did to one operand of a layer.

    Args:
        operand: its name, such as "x/fprop" (the op operand_names lists them); "x" of errors.
        spec: of the cast, or the name of a Rule. A rule has neither codes nor scales, so what is
            said of them is NaN, and `scales` is empty.
        elements: their number.
        snr_db: 10 log10 of the sum of squares over that of the error; inf where it is exact.
        saturated: the share of elements past the largest code of their block.
        flushed: the share of elements that are not 0 and became 0.
        zero_scales: the share of scales that are 0.
        channels: columns of the matrix, features of x and W, output features of g.
        outlier_channels: those whose norm is over 4 times the median channel's.
        nonfinite: elements that are Inf or NaN.
        amax: the largest magnitude that was cast.
        scales: the histogram: exponent of two, rounded down -> scales. -127 has all smaller ones,
            128 has NaN.
    """

    operand: str
    spec: str
    elements: int
    snr_db: float
    saturated: float
    flushed: float
    zero_scales: float
    channels: int
    outlier_channels: int
    nonfinite: int
    amax: float
    scales: dict[int, int] = field(hash=False)


@dataclass(frozen=True)
class LayerRow:
    """One weight under one recipe.

    Args:
        layer: the name of its row in the report of mf.quantize_.
        module: the name that a recipe map matches; an experts module has several layers.
        recipe: the recipe's text.
        operations: multiplications of its forward in this batch.
        y_error, dx_error, dw_error: |result - exact| / |exact|, Frobenius norms, of the output, the
            input's gradient and the weight's gradient.
        loss_first: Σ g · (y_q - y), what the error of y adds to the loss, to first order, nats.
        loss_second: T/2 Σ_t (g_t · (y_q - y)_t)², its second order, T tokens.
        operands: those that the recipe casts.
    """

    layer: str
    module: str
    recipe: str
    operations: int
    y_error: float
    dx_error: float
    dw_error: float
    loss_first: float
    loss_second: float
    operands: tuple[OperandRow, ...]


@dataclass(frozen=True)
class Inspection:
    """What mf.inspect found.

    Args:
        rows: a layer's rows follow each other, in the order of the model.
        skipped: (name, reason) of weights that were not inspected, or of a module that has them.
        heads: names of modules that mf.quantize_ keeps by its default policy.
        loss: of the batch.
        tokens: T, the rows of x that the loss is a mean over.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)
        >>> model, loss = torch.nn.Sequential(*layers), lambda model, x: model(x).square().mean()
        >>> found = mf.inspect(model, torch.randn(128, 64), ["nvfp4"], loss=loss)
        >>> found.recipe_map(share=0.5)  # for mf.quantize_: half of the operations in bf16
        RecipeMap('*: nvfp4; 0: bf16')
    """

    rows: tuple[LayerRow, ...]
    skipped: tuple[tuple[str, str], ...]
    heads: tuple[str, ...]
    loss: float
    tokens: int

    @property
    def recipes(self) -> list[str]:
        """The recipes that were tried, in order."""
        return list(dict.fromkeys(row.recipe for row in self.rows))

    def table(self) -> str:
        """Returns a line a layer and recipe: dB of the operands, errors, the effect on the loss.

        The last lines have each recipe's whole effect, without the heads: the mean of its errors,
        weighted by operations, and the sum of its effects on the loss.
        """
        names = operand_names_of(self.rows)
        titles = ["layer", "recipe", *(f"{name} dB" for name in names)]
        titles += ["y %", "dx %", "dW %", "loss, 1st", "loss, 2nd"]
        lines = []
        for row in self.rows:
            by_name = {each.operand: each for each in row.operands}
            cells = [decibels(by_name[n].snr_db) if n in by_name else "-" for n in names]
            lines.append([display(row.layer), row.recipe, *cells, *effects_of([row])])
        for recipe in self.recipes:
            rows = [r for r in self.rows if r.recipe == recipe and r.module not in self.heads]
            if rows:
                lines.append([ALL, recipe, *("-" for _ in names), *effects_of(rows)])
        text = markdown([titles, *lines])
        if self.skipped:
            text += "\n\nnot inspected:\n"
            text += "\n".join(f"- {display(name)}: {reason}" for name, reason in self.skipped)
        return text

    def operand_table(self) -> str:
        """Returns a line an operand: what its cast did, and the range of its scales."""
        lines = [
            [display(row.layer), each.operand, *cells_of(each)]
            for row in self.rows
            for each in row.operands
        ]
        return markdown([["layer", "operand", *TITLES], *lines])

    def plot(self, path: str | os.PathLike[str] | BinaryIO) -> None:
        """Writes a heat map of dB, layers by operands, a panel a recipe; needs matplotlib."""
        from matplotlib.figure import Figure

        names, recipes = operand_names_of(self.rows), self.recipes
        layers = list(dict.fromkeys(row.layer for row in self.rows))
        size = (4 + 2.6 * len(recipes), 1.8 + 0.19 * len(layers))
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, max(len(recipes), 1), sharey=True, squeeze=False)[0]
        for axes, recipe in zip(panels, recipes):
            grid = [[math.nan] * len(names) for _ in layers]
            for row in self.rows:
                for each in row.operands if row.recipe == recipe else ():
                    grid[layers.index(row.layer)][names.index(each.operand)] = each.snr_db
            finite = sorted(db for line in grid for db in line if math.isfinite(db)) or [0.0]
            # One operand of a head may have far more than all others.
            ends = {"vmin": finite[0], "vmax": finite[len(finite) * 95 // 100]}
            image = axes.imshow(grid, aspect="auto", cmap="viridis", **ends)
            axes.set_title(recipe if len(recipe) < 24 else recipe[:21] + "...", fontsize=9)
            axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
            axes.set_yticks(range(len(layers)), [display(n) for n in layers], fontsize=7)
            figure.colorbar(image, ax=axes, label="signal to noise, dB", extend="max")
        figure.savefig(path, format="png", dpi=110)

    def json(self) -> str:
        """Returns everything as JSON; numbers that are not finite become null."""
        return json.dumps(jsonable(self)) + "\n"

    def recipe_map(self, share: float = 0.9, low: str = "nvfp4", high: str = "bf16") -> RecipeMap:
        """Returns the map that gives `low` to a share of the operations, and the rest `high`.

        Layers stay in `high` in the order of the loss that `low` is predicted to add there, to
        second order and beyond what `high` adds, for each operation that `low` would take over.

        Args:
            share: of the inspected operations besides those of heads, 0 to 1.
            low: a recipe that was inspected.
            high: another one, or "bf16", which adds no error.

        Returns:
            "*: low; name: high; …". Layers that this batch did not call get `high` too. Others that
            `skipped` lists are not ranked: `*` applies to them. Heads are left to the `keep` of
            mf.quantize_.

        Raises:
            TypeError: `share` is no number, or `low` or `high` no str.
            ValueError: `share` is out of range, a recipe was not inspected in every layer, or the
                name of a layer has '*', '?', ';' or spaces around it.
        """
        if not isinstance(share, (int, float)):
            raise TypeError(f"recipe_map: expected a share from 0 to 1, got {share!r}")
        if not 0 <= share <= 1:
            raise ValueError(f"recipe_map: expected a share from 0 to 1, got {share!r}")
        low, high = Recipe(low).text, Recipe(high).text
        modules = dict.fromkeys(row.module for row in self.rows if row.module not in self.heads)
        pairs = {(row.module, row.recipe) for row in self.rows}
        tried = [r for r in self.recipes if all((module, r) in pairs for module in modules)]
        for name, recipe in (("low", low), ("high", high)):
            if recipe not in tried and (name == "low" or recipe != "bf16"):
                expected = f"one of {', '.join(tried)}" if tried else "a recipe"
                raise ValueError(
                    f"recipe_map: {name}: expected {expected}, inspected in every layer, "
                    f"got {recipe}"
                )
        harm, operations = dict.fromkeys(modules, 0.0), dict.fromkeys(modules, 0)
        for row in self.rows:
            if row.module in modules and row.recipe == low:
                harm[row.module] += row.loss_second
                operations[row.module] += row.operations
            elif row.module in modules and row.recipe == high:
                harm[row.module] -= row.loss_second
        room = (1 - share) * sum(operations.values()) * (1 + 1e-9)
        skipped = [name for name, reason in self.skipped if reason == NOT_CALLED]
        kept = {name for name in skipped if name not in self.heads}
        for name in sorted(modules, key=lambda n: harm_of(harm[n], operations[n]), reverse=True):
            if operations[name] <= room:
                room -= operations[name]
                kept.add(name)
        if "" in kept:  # the model is one layer
            return RecipeMap(f"*: {high}")
        names = [name for name in [*modules, *skipped] if name in kept]
        if other := [n for n in names if not GLOB_SIGNS.isdisjoint(n) or n != n.strip(" ")]:
            raise ValueError(
                "recipe_map: expected names of modules without '*', '?', ';' and spaces around "
                f"them, which a map reads otherwise, got {', '.join(map(repr, other))}"
            )
        return RecipeMap("; ".join([f"*: {low}", *(f"{name}: {high}" for name in names)]))


def harm_of(loss: float, operations: int) -> float:
    """Returns the predicted loss an operation; a layer that is not finite has the most."""
    return loss / max(operations, 1) if math.isfinite(loss) else math.inf


def operand_names_of(rows: Sequence[LayerRow]) -> list[str]:
    """Returns the names of the operands that some row has."""
    return list(dict.fromkeys(each.operand for row in rows for each in row.operands))


ALL = "all, without heads"


def effects_of(rows: Sequence[LayerRow]) -> list[str]:
    """Returns errors of y, dx and dW, and the loss of both orders, of layers together as text."""
    operations = sum(row.operations for row in rows)
    errors = [(row.y_error, row.dx_error, row.dw_error) for row in rows]
    weights = [row.operations / max(operations, 1) for row in rows]
    means = [sum(w * e for w, e in zip(weights, of_rows)) for of_rows in zip(*errors)]
    first, second = sum(r.loss_first for r in rows), sum(r.loss_second for r in rows)
    return [*(f"{100 * mean:.2f}" for mean in means), f"{first:+.1e}", f"{second:.1e}"]


TITLES = ["spec", "dB", "saturated", "flushed to 0", "zero scales"]
TITLES += ["outlier channels", "not finite", "amax", "scales 2^n: least, median, most"]


def cells_of(row: OperandRow) -> list[str]:
    """Returns the numbers of an operand as text, in the order of TITLES."""
    return [
        row.spec,
        decibels(row.snr_db),
        *map(percent, (row.saturated, row.flushed, row.zero_scales)),
        f"{row.outlier_channels} of {row.channels}",
        str(row.nonfinite),
        f"{row.amax:.2e}",
        range_of(row.scales),
    ]


def percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.3f}%"


def decibels(value: float) -> str:
    return f"{value:.1f}"


def range_of(scales: dict[int, int]) -> str:
    """Returns the least, the median and the largest exponent of a histogram."""
    if not scales:
        return "-"
    seen, half = 0, sum(scales.values()) / 2
    for median in sorted(scales):
        seen += scales[median]
        if seen >= half:
            break
    return f"{min(scales)}, {median}, {max(scales)}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """Formats a table whose first line has the titles, padded for a terminal."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def joined(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0]), *(t.rjust(w) for t, w in zip(line[1:], widths[1:]))]
        return "| " + " | ".join(cells) + " |"

    return "\n".join(map(joined, (lines[0], rule, *lines[1:])))


def jsonable(value: Any) -> Any:
    """Returns dataclasses as dicts, and null for numbers that JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {str(key): jsonable(each) for key, each in value.items()}
    return [jsonable(each) for each in value] if isinstance(value, (list, tuple)) else value
