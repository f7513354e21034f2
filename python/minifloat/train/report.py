"""The report of a job, complete for a resumed job too: the table and the figure.

Both are made from metrics.jsonl and each run's result. The gap of a run is to the bf16 run with the
job's seed, else to the first bf16 run, at the same step.
"""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .checks import Json
from .durable_files import write_atomically
from .model.measure import LAST, MEASURE_EVERY, active_experts
from .recipes import RunSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.typing import ColorType

WARM_UP = 3  # first steps, left out of the speeds: they fill caches and choose kernels
WINDOW = 15  # steps that a smoothed training curve averages over
TITLE_WIDTH = 90  # characters of a line

Values = npt.NDArray[np.float64]
Losses = dict[int, float | None]  # by step; None where one is not finite


@dataclass(frozen=True)
class Curves:
    """One run's records: losses by step (nats a token), and medians of the timed steps.

    speeds: as columns of the table have them. load, dropped: of experts, by step; none of a dense
    model. active: the experts with tokens in the last steps, None before the last step.
    """

    train: Losses
    validation: Losses
    speeds: dict[str, float | None]
    load: dict[int, float]
    dropped: dict[int, float]
    active: set[tuple[str, int]] | None


def median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def curves_of(records: Sequence[Json], run: str) -> Curves:
    """Sorts the records of one run."""
    ours = [r for r in records if r["run"] == run]
    train = {r["step"]: r for r in ours if r["kind"] == "train"}
    tokens = [r for r in ours if r["kind"] == "experts"]
    timed = [r for step, r in train.items() if step > WARM_UP] or list(train.values())
    mixed = {step: r for step, r in train.items() if "expert_load" in r}
    return Curves(
        train={step: r["loss"] for step, r in train.items()},
        validation={r["step"]: r["val_loss"] for r in ours if r["kind"] == "eval"},
        speeds={
            "step_ms": median(r["step_ms"] for r in timed),
            "tokens_per_s": median(r["tokens_per_s"] for r in timed),
            "speed_of_light_percent": median(100 * r["speed_of_light"] for r in timed),
            "light_ms": median(r["speed_of_light"] * r["step_ms"] for r in timed),
        },
        load={step: r["expert_load"] for step, r in mixed.items()},
        dropped={step: r["dropped_rows"] for step, r in mixed.items()},
        active=active_experts(tokens) if tokens else None,
    )


def baseline_of(runs: Sequence[RunSpec], seed: int) -> RunSpec | None:
    """Chooses the run that others are compared to: bf16 with the job's seed, else any bf16."""
    bf16 = [run for run in runs if not run.converts]
    return next((run for run in bf16 if run.seed == seed), bf16[0] if bf16 else None)


def gaps(values: Losses, base: Losses) -> Losses:
    """Returns the gaps in percent, at the steps where both have values."""
    both = ((step, value, base.get(step)) for step, value in values.items())
    return {step: 100 * (value / other - 1) for step, value, other in both if value and other}


# ---- The table -----------------------------------------------------------------------------------


def table_rows(
    runs: Sequence[RunSpec],
    curves: Mapping[str, Curves],
    facts: Mapping[str, Json],
    baseline: RunSpec | None,
) -> list[Json]:
    """Returns a row a run, with None for values that were not measured.

    idle_experts: the layers and numbers of those that are active under the baseline alone.

    Args:
        facts: the content of result.json by run.
    """
    base = curves[baseline.name] if baseline else None
    rows = []
    for run in runs:
        ours, fact = curves[run.name], facts.get(run.name, {})
        step, loss = max(ours.validation.items(), default=(None, None))
        validation_gaps = gaps(ours.validation, base.validation) if base else {}
        base_ms, step_ms = base.speeds["step_ms"] if base else None, ours.speeds["step_ms"]
        idle = None
        if base and base.active is not None and ours.active is not None:
            idle = sorted(base.active - ours.active)
        rows.append(
            {
                "run": run.name,
                "recipe": run.recipe,
                "keep": run.keep,
                "seed": run.seed,
                "status": fact.get("status", "not started"),
                "step": max(ours.train, default=0),
                "validation_step": step,
                "validation_loss": loss,
                "gap_percent": None if step is None else validation_gaps.get(step),
                "speed": base_ms / step_ms if base_ms and step_ms else None,
                **ours.speeds,
                "saved_bytes_per_token": fact.get("saved_total"),
                "saved_bytes_per_token_linears": fact.get("saved_linears"),
                "peak_memory_bytes": fact.get("peak"),
                "converted": fact.get("converted", 0),
                "expert_load": median([ours.load[s] for s in sorted(ours.load)[-LAST:]]),
                "active_experts": None if ours.active is None else len(ours.active),
                "idle_experts": idle,
                "dropped_rows": sum(ours.dropped.values()) if ours.dropped else None,
            }
        )
    return rows


COLUMNS = (  # title, key, format
    ("recipe", "run", "{}"),
    ("validation loss", "validation_loss", "{:.4f}"),
    ("gap to bf16", "gap_percent", "{:+.2f}%"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("speed, bf16 = 1", "speed", "{:.2f}"),
    ("of speed of light", "speed_of_light_percent", "{:.0f}%"),
    ("saved for backward, B/token", "saved_bytes_per_token", "{:.0f}"),
    ("of it in linears", "saved_bytes_per_token_linears", "{:.0f}"),
    ("peak memory, MB", "peak_memory_bytes", "{:.0f}"),
    ("state", "status", "{}"),
)
EXPERT_COLUMNS = (
    ("experts' load", "expert_load", "{:.2f}"),
    ("active", "active_experts", "{}"),
    ("idle beside bf16", "idle_experts", "{}"),
    ("dropped rows", "dropped_rows", "{:.0f}"),
)


def cell(row: Json, key: str, form: str, last_step: int) -> str:
    value = row[key]
    if value is None:
        return "-"
    if key == "peak_memory_bytes":
        value /= 1e6
    if key == "idle_experts":
        value = len(value)
    text = form.format(value)
    if key == "validation_loss" and row["validation_step"] != last_step:
        text += f" (step {row['validation_step']})"
    return text


def has_experts(rows: Sequence[Json]) -> bool:
    return any(row["expert_load"] is not None for row in rows)


def markdown_table(rows: Sequence[Json], last_step: int) -> str:
    """Formats the table, padded for reading in a terminal too."""
    columns = [*COLUMNS[:-1], *(EXPERT_COLUMNS if has_experts(rows) else ()), COLUMNS[-1]]
    lines = [[title for title, _, _ in columns]]
    lines += [[cell(row, key, form, last_step) for _, key, form in columns] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]

    def joined(line: Sequence[str]) -> str:
        numbers = (text.rjust(width) for text, width in zip(line[1:], widths[1:]))
        return "| " + " | ".join([line[0].ljust(widths[0]), *numbers]) + " |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(map(joined, (lines[0], rule, *lines[1:])))


NOTES = """\
- validation loss: nats a token, on {validation_tokens} tokens of held-out text, the same for
  every recipe, with the recipe's own forward.
- gap to bf16: against `{baseline}` at the same step. A bf16 run with another seed differs by its
  initial weights and the order of its batches: its gap is the noise of this comparison.
- tokens/s, speed, of speed of light: medians over the steps.
- of speed of light: the time that the matrix products of a step take alone, on this model's
  shapes, over the time of the step. It is measured every {measure_every} steps, between two of
  them, so other work on the machine slows both alike{light}.
- saved for backward: bytes a token that the forward saves, and those saved inside linear layers
  and experts; what does not grow with the tokens is left out.
- peak memory: {memory_note}.
"""

EXPERT_NOTES = """\
- experts' load: the tokens of the expert with the most over the mean of its layer, in the layer
  where that is largest; the median of the last {last} steps. 1 is even.
- active: experts with a token in the last {last} steps, of {experts} in {mixtures} layers.
- idle beside bf16: experts without one that are active under `{baseline}`{idle}.
- dropped rows: pairs of token and expert past a capacity, in all steps.
"""


def describe_idle(rows: Sequence[Json]) -> str:
    """Lists the idle experts of each run; an empty text where there are none."""
    texts = [
        f"{row['run']}: " + ", ".join(f"{layer} expert {number}" for layer, number in idle)
        for row in rows
        if (idle := row["idle_experts"])
    ]
    return f" ({'; '.join(texts)})" if texts else ""


def describe_light(rows: Sequence[Json], flops: float) -> str:
    """Describes the median speed of light of the runs; an empty text before a first step."""
    light_ms = median([row["light_ms"] for row in rows if row["light_ms"]])
    if light_ms is None:
        return ""
    return f": {light_ms:.0f} ms, {flops / light_ms / 1e6:.0f} GFLOP/s, the median of the runs"


def markdown_report(facts: Json, rows: Sequence[Json]) -> str:
    """Formats report.md. `facts` is the job's part of report.json."""
    lines = [f"# {facts['title']}", "", *(f"- {line}" for line in facts["setting"]), ""]
    light = describe_light(rows, facts["step_flops"])
    notes = NOTES.format(**facts, light=light, measure_every=MEASURE_EVERY)
    if has_experts(rows):
        notes += EXPERT_NOTES.format(**facts, last=LAST, idle=describe_idle(rows))
    lines += [markdown_table(rows, facts["steps"]), "", notes]
    lines += ["![losses and gaps](loss.png)", "", "## Recipes", ""]
    for row in rows:
        count = "as it is"
        if row["converted"]:
            kept = f"`keep={row['keep']}`"
            count = f"{kept}, {row['converted']} {facts['layers']} converted"
        lines.append(f"- **{row['run']}** (seed {row['seed']}): `{row['recipe']}`; {count}")
    if facts["skipped_files"]:
        lines += ["", "## Files left out", ""]
        lines += [f"- {name}: {why}" for name, why in facts["skipped_files"][:20]]
        if len(facts["skipped_files"]) > 20:
            lines.append(f"- and {len(facts['skipped_files']) - 20} more")
    return "\n".join(lines) + "\n"


# ---- The figure ----------------------------------------------------------------------------------


def smooth(values: Sequence[float] | Values, window: int = WINDOW) -> Values:
    """Computes the centred mean over `window` values, fewer at the ends."""
    array = np.asarray(values, dtype=float)
    kernel = np.ones(min(window, len(array)))
    return np.convolve(array, kernel, "same") / np.convolve(np.ones_like(array), kernel, "same")


def draw(axes: Axes, values: Losses, style: str, color: ColorType) -> None:
    """Draws values by step, training curves smoothed and thin, without those that are None."""
    steps = [step for step in sorted(values) if values[step] is not None]
    found = np.array([values[step] for step in steps], dtype=float)
    if "o" in style:
        axes.plot(steps, found, style, color=color, markersize=4, linewidth=1.6)
    elif steps:
        axes.plot(steps, smooth(found), style, color=color, linewidth=0.8, alpha=0.6)


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
    heights = (3, 2, 1.5) if has_experts else (3, 2)
    figure, panels = plt.subplots(
        len(heights),
        figsize=(9, 1.6 * sum(heights)),
        sharex=True,
        height_ratios=heights,
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
    gap = (
        gaps(curves.validation, base.validation).get(step) if base and curves is not base else None
    )
    text = run.name if loss is None else f"{run.name}: {loss:.3f}"
    return text if gap is None else f"{text} ({gap:+.2f}%)"


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
