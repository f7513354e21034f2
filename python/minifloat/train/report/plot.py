"""loss.png: the curves of every run, below them the gap of each to bf16, and experts' load."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..durable_files import write_atomically
from ..recipes import RunSpec
from .table import Curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import ColorType

WINDOW = 15  # steps that a smoothed training curve averages over
TITLE_WIDTH = 90  # characters of a line

Values = npt.NDArray[np.float64]


def smooth(values: Sequence[float] | Values, window: int = WINDOW) -> Values:
    """Computes the centred mean over `window` values, fewer at the ends."""
    array = np.asarray(values, dtype=float)
    kernel = np.ones(min(window, len(array)))
    return np.convolve(array, kernel, "same") / np.convolve(np.ones_like(array), kernel, "same")


def draw(axes: Axes, values: Mapping[int, float | None], style: str, color: ColorType) -> None:
    """Draws values by step, training curves smoothed and thin, without those that are None."""
    steps = [step for step in sorted(values) if values[step] is not None]
    found = np.array([values[step] for step in steps], dtype=float)
    if "o" in style:
        axes.plot(steps, found, style, color=color, markersize=4, linewidth=1.6)
    elif steps:
        axes.plot(steps, smooth(found), style, color=color, linewidth=0.8, alpha=0.6)


def gaps(
    values: Mapping[int, float | None], base: Mapping[int, float | None]
) -> dict[int, float | None]:
    """Returns the gaps in percent, at the steps where both have values."""
    both = ((step, value, base.get(step)) for step, value in values.items())
    return {step: 100 * (value / other - 1) for step, value, other in both if value and other}


def draw_losses(
    path: Path,
    runs: Sequence[RunSpec],
    curves: Mapping[str, Curves],
    baseline: RunSpec | None,
    title: str,
) -> None:
    """Writes the figure; runs without a single step are left out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    has_experts = any(curves[run.name].load for run in runs)
    figure, panels = plt.subplots(
        3 if has_experts else 2,
        1,
        figsize=(9, 10.5 if has_experts else 8),
        sharex=True,
        height_ratios=(3, 2, 1.5) if has_experts else (3, 2),
        layout="constrained",
    )
    top, bottom = panels[:2]
    palette = plt.get_cmap("tab10" if len(runs) <= 11 else "tab20")
    converted = [run for run in runs if run.converts]
    base = curves[baseline.name] if baseline else None
    color_of: dict[str, ColorType] = {}
    for run in runs:
        color = color_of[run.name] = (
            palette(converted.index(run) % palette.N)
            if run.converts
            else ("black" if run == baseline else "grey")
        )
        ours = curves[run.name]
        draw(top, ours.train, "-", color)
        draw(top, ours.validation, "o-", color)
        top.lines[-1].set_label(label_of(run, ours, base))
        if base and baseline and run != baseline:
            is_same_batches = run.seed == baseline.seed
            if is_same_batches:
                draw(bottom, gaps(ours.train, base.train), "-", color)
            style = "o-" if is_same_batches else "o--"
            draw(bottom, gaps(ours.validation, base.validation), style, color)
    limit_to_late(top, [curves[run.name] for run in runs])
    top.set_title(textwrap.fill(title, TITLE_WIDTH))
    top.set_ylabel("loss, nats a token")
    top.legend(title="validation (dots), training (thin)", fontsize=9)
    bottom.axhline(0, color="black", linewidth=1)
    bottom.set_ylabel(f"gap to {baseline.name if baseline else 'bf16'}, %")
    low, high = bottom.get_ylim()  # limited, so that a diverging run does not flatten the others
    bottom.set_ylim(max(low, -10), min(max(high, 0.5), 15))
    if has_experts:
        draw_load(panels[2], {run.name: curves[run.name] for run in runs}, color_of)
    panels[-1].set_xlabel("step")
    for axes in panels:
        axes.grid(alpha=0.3)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=130))
    plt.close(figure)


def label_of(run: RunSpec, curves: Curves, base: Curves | None) -> str:
    """Formats the last validation loss and its gap: `nvfp4: 3.260 (+0.25%)`."""
    step, loss = max(curves.validation.items(), default=(0, None))
    other = base.validation.get(step) if base else None
    text = run.name if loss is None else f"{run.name}: {loss:.3f}"
    return text if curves is base or not loss or not other else f"{text} ({loss / other - 1:+.2%})"


def draw_load(axes: Axes, curves: Mapping[str, Curves], color_of: Mapping[str, ColorType]) -> None:
    """Draws the load of experts, and dashed, on the right scale, the dropped rows of a step."""
    right = axes.twinx()
    for name, run_curves in curves.items():
        if run_curves.load:
            steps, loads = zip(*sorted(run_curves.load.items()))
            axes.plot(steps, smooth(loads), color=color_of[name], linewidth=1)
            steps, rows = zip(*sorted(run_curves.dropped.items()))
            right.plot(steps, rows, "--", color=color_of[name], linewidth=1)
    axes.set_ylim(bottom=1)
    axes.set_ylabel("experts' load,\nlargest over mean")
    right.set_ylim(0, max(right.get_ylim()[1], 1))
    right.set_ylabel("dropped rows (dashed)")


def limit_to_late(axes: Axes, curves: Sequence[Curves]) -> None:
    """Excludes the steep first tenth from the scale, where enough losses follow."""
    losses: list[float] = []
    for each in curves:
        steps = [step for step in sorted(each.train) if step > len(each.train) / 10]
        late = [loss for step in steps if (loss := each.train[step]) is not None]
        losses += [*smooth(late)] if late else []
        losses += [loss for loss in each.validation.values() if loss is not None]
    if len(losses) > 20:
        margin = 0.04 * (max(losses) - min(losses))
        axes.set_ylim(min(losses) - margin, max(losses) + margin)
