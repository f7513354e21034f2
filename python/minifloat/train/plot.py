"""loss.png: the curves of every run, below them the gap of each to bf16, and experts' load."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .files import write_atomically
from .recipes import RunSpec
from .report import Curves

WINDOW = 15  # steps that a smoothed training curve averages over
TITLE_WIDTH = 90  # characters of a line


def smooth(values: Sequence[float], window: int = WINDOW) -> np.ndarray:
    """Computes the centred mean over `window` values, fewer at the ends."""
    array = np.asarray(values, dtype=float)
    kernel = np.ones(min(window, len(array)))
    return np.convolve(array, kernel, "same") / np.convolve(np.ones_like(array), kernel, "same")


def draw_losses(
    path: Path,
    runs: Sequence[RunSpec],
    curves: dict[str, Curves],
    baseline: RunSpec | None,
    title: str,
) -> None:
    """Writes the figure; runs without a single step are left out."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    has_experts = any(curves[run.name].load for run in runs)
    ratios = (3, 2, 1.5) if has_experts else (3, 2)
    size = (9, 10.5 if has_experts else 8)
    figure, panels = plt.subplots(
        len(ratios), 1, figsize=size, sharex=True, height_ratios=ratios, layout="constrained"
    )
    top, bottom = panels[:2]
    color_of = colors_of(runs, baseline, plt.get_cmap("tab10" if len(runs) <= 11 else "tab20"))
    for run in runs:
        run_curves, color = curves[run.name], color_of[run.name]
        draw_run(top, run_curves, label_of(run, curves, baseline), color)
        if baseline and run != baseline:
            draw_gap(bottom, curves[baseline.name], run_curves, color, run.seed == baseline.seed)
    limit_to_late(top, curves)
    top.set_title(textwrap.fill(title, TITLE_WIDTH))
    top.set_ylabel("loss, nats a token")
    top.legend(title="validation (dots), training (thin)", fontsize=9)
    bottom.axhline(0, color="black", linewidth=1)
    bottom.set_ylabel(f"gap to {baseline.name if baseline else 'bf16'}, %")
    if has_experts:
        draw_load(panels[2], {run.name: curves[run.name] for run in runs}, color_of)
    panels[-1].set_xlabel("step")
    limit_gap(bottom)
    for axes in panels:
        axes.grid(alpha=0.3)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=130))
    plt.close(figure)


def colors_of(runs: Sequence[RunSpec], baseline: RunSpec | None, palette: Any) -> dict[str, Any]:
    """Chooses black for the baseline, grey for bf16 of other seeds, the palette for recipes."""
    colors: dict[str, Any] = {run.name: "grey" for run in runs if not run.converts}
    recipes = [run for run in runs if run.converts]
    colors |= {run.name: palette(i % palette.N) for i, run in enumerate(recipes)}
    return colors | ({baseline.name: "black"} if baseline else {})


def label_of(run: RunSpec, curves: dict[str, Curves], baseline: RunSpec | None) -> str:
    """Formats the last validation loss and its gap: `nvfp4: 3.260 (+0.25%)`."""
    step, loss = max(curves[run.name].validation.items(), default=(0, None))
    base = curves[baseline.name].validation.get(step) if baseline else None
    text = run.name if loss is None else f"{run.name}: {loss:.3f}"
    return text if run == baseline or not loss or not base else f"{text} ({loss / base - 1:+.2%})"


def draw_run(axes: Any, run_curves: Curves, label: str, color: Any) -> None:
    """Draws the training curve, smoothed and thin, and the validation as dots on a line."""
    train = [(step, loss) for step, loss in sorted(run_curves.train.items()) if loss is not None]
    if train:
        steps, losses = zip(*train)
        axes.plot(steps, smooth(losses), color=color, linewidth=0.8, alpha=0.6)
    points = [
        (step, loss) for step, loss in sorted(run_curves.validation.items()) if loss is not None
    ]
    steps, losses = zip(*points) if points else ((), ())
    axes.plot(steps, losses, "o-", color=color, markersize=4, linewidth=1.6, label=label)


def draw_gap(axes: Any, base: Curves, run_curves: Curves, color: Any, same_batches: bool) -> None:
    """Draws the gap of the validation losses, and of the training losses of equal batches."""
    shared = [s for s in sorted(run_curves.train) if run_curves.train[s] and base.train.get(s)]
    if same_batches and shared:
        ours = smooth([run_curves.train[s] for s in shared])  # type: ignore[misc]
        theirs = smooth([base.train[s] for s in shared])  # type: ignore[misc]
        axes.plot(shared, 100 * (ours / theirs - 1), color=color, linewidth=0.8, alpha=0.6)
    points = [
        (step, 100 * (loss / base.validation[step] - 1))  # type: ignore[operator]
        for step, loss in sorted(run_curves.validation.items())
        if loss and base.validation.get(step)
    ]
    if points:
        steps, gaps = zip(*points)
        style = "o-" if same_batches else "o--"
        axes.plot(steps, gaps, style, color=color, markersize=4, linewidth=1.6)


def draw_load(axes: Any, curves: dict[str, Curves], color_of: dict[str, Any]) -> None:
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


def limit_to_late(axes: Any, curves: dict[str, Curves]) -> None:
    """Excludes the steep first tenth from the scale, where enough losses follow."""
    losses: list[float] = []
    for run_curves in curves.values():
        late = [
            v
            for s, v in sorted(run_curves.train.items())
            if v is not None and s > len(run_curves.train) / 10
        ]
        losses += [*smooth(late)] if late else []
        losses += [v for v in run_curves.validation.values() if v is not None]
    if len(losses) > 20:
        margin = 0.04 * (max(losses) - min(losses))
        axes.set_ylim(min(losses) - margin, max(losses) + margin)


def limit_gap(axes: Any) -> None:
    """Limits the scale, so that a diverging run does not flatten the others."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -10), min(max(high, 0.5), 15))
