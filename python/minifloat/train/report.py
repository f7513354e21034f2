"""The report of a job, complete for a resumed job too: the table and the figure.

Both are made from metrics.jsonl and each run's result. The gap of a run is to the bf16 run with the
job's seed, else to the first bf16 run, at the same step.
"""

import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .checks import Json
from .config import RunSpec, steps_before_last
from .durable_files import write_atomically
from .model.measure import LAST, MEASURE_EVERY, active_experts

WARM_UP = 3  # first steps, left out of the speeds: they fill caches and choose kernels
WINDOW = 15  # steps that a smoothed training curve averages over

Losses = dict[int, float | None]  # by step; None where one is not finite


def series(records: Sequence[Json], run: str, kind: str, field: str) -> Losses:
    """Returns a field of a run's records by step; an empty one where they have none."""
    ours = [r for r in records if r["run"] == run and r["kind"] == kind]
    return {r["step"]: r[field] for r in ours if field in r}


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def baseline_of(runs: Sequence[RunSpec], seed: int) -> RunSpec | None:
    """Chooses the run that others are compared to: bf16 with the job's seed, else any bf16."""
    bf16 = [run for run in runs if not run.converts]
    return next((run for run in bf16 if run.seed == seed), bf16[0] if bf16 else None)


def gaps(values: Losses, base: Losses) -> Losses:
    """Returns the gaps in percent, at the steps where both have values."""
    return {
        step: 100 * (value / other - 1)
        for step, value in values.items()
        if value and (other := base.get(step))
    }


# ---- The table -----------------------------------------------------------------------------------


def table_rows(
    runs: Sequence[RunSpec],
    records: Sequence[Json],
    facts: Mapping[str, Json],
    baseline: RunSpec | None,
) -> list[Json]:
    """Returns a row a run, with None for values that were not measured.

    idle_experts: the layers and numbers of those that are active under the baseline alone.

    Args:
        records: of metrics.jsonl.
        facts: the content of result.json by run.
    """
    rows, active = {}, {}
    for run in runs:
        ours, fact = [r for r in records if r["run"] == run.name], facts.get(run.name, {})
        train = [r for r in ours if r["kind"] == "train"]
        timed = [r for r in train if r["step"] > WARM_UP] or train
        mixed = [r for r in train if "expert_load" in r]
        looks = [r["seconds"] for r in ours if r["kind"] == "inspect"]
        validation = series(ours, run.name, "eval", "val_loss")
        step, loss = max(validation.items(), default=(None, None))
        active[run.name] = active_experts(r for r in ours if r["kind"] == "experts")
        rows[run.name] = {
            "run": run.name,
            "recipe": run.recipe,
            "then": run.then,
            "keep": run.keep,
            "seed": run.seed,
            "status": fact.get("status", "not started"),
            "step": max((r["step"] for r in train), default=0),
            "validation_step": step,
            "validation_loss": loss,
            "step_ms": median([r["step_ms"] for r in timed]),
            "tokens_per_s": median([r["tokens_per_s"] for r in timed]),
            "speed_of_light_percent": median([100 * r["speed_of_light"] for r in timed]),
            "light_ms": median([r["speed_of_light"] * r["step_ms"] for r in timed]),
            "saved_bytes_per_token": fact.get("saved_total"),
            "saved_bytes_per_token_linears": fact.get("saved_linears"),
            "peak_memory_bytes": fact.get("peak"),
            "converted": fact.get("converted", 0),
            "not_finite": fact.get("not_finite", ""),
            "inspect_percent": 1e5 * sum(looks) / sum(r["step_ms"] for r in train)
            if looks
            else None,
            "expert_load": median([r["expert_load"] for r in mixed[-LAST:]]),
            "active_experts": len(active[run.name]) or None,
            "dropped_rows": sum(r["dropped_rows"] for r in mixed) if mixed else None,
        }
    name = baseline.name if baseline else ""
    losses, base_ms = series(records, name, "eval", "val_loss"), rows.get(name, {}).get("step_ms")
    for row in rows.values():
        gap = gaps({row["validation_step"]: row["validation_loss"]}, losses)
        row["gap_percent"] = gap.get(row["validation_step"])
        row["speed"] = base_ms / row["step_ms"] if base_ms and row["step_ms"] else None
        seen = active[row["run"]]
        row["idle_experts"] = sorted(active[name] - seen) if name and seen else None
    return [*rows.values()]


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


def markdown_table(rows: Sequence[Json], last_step: int) -> str:
    """Formats the table, padded for reading in a terminal too."""
    has_experts = any(row["expert_load"] is not None for row in rows)
    columns = [*COLUMNS[:-1], *(EXPERT_COLUMNS if has_experts else ()), COLUMNS[-1]]
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
  and experts; what does not grow with the tokens is left out; of two recipes the larger.
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
    lines = ["# Training side by side", "", *(f"- {line}" for line in facts["setting"]), ""]
    light = describe_light(rows, facts["step_flops"])
    notes = NOTES.format(**facts, light=light, measure_every=MEASURE_EVERY)
    if any(row["expert_load"] is not None for row in rows):
        notes += EXPERT_NOTES.format(**facts, last=LAST, idle=describe_idle(rows))
    lines += [markdown_table(rows, facts["steps"]), "", notes]
    lines += ["![losses and gaps](loss.png)", "", "## Recipes", ""]
    for row in rows:
        count = f"`keep={row['keep']}`, {row['converted']} {facts['layers']} converted"
        count = count if row["converted"] else "as it is"
        count += f"; not finite: {row['not_finite']}" if row["not_finite"] else ""
        if row["inspect_percent"] is not None:
            count += f"; the inspector took {row['inspect_percent']:.2f}% of the steps' time"
        recipes = f"`{row['recipe']}`"
        if row["then"]:
            recipes += f", from step {steps_before_last(facts['steps']) + 1} `{row['then']}`"
        lines.append(f"- **{row['run']}** (seed {row['seed']}): {recipes}; {count}")
    if facts["skipped_files"]:
        lines += ["", "## Files left out", ""]
        lines += [f"- {name}: {why}" for name, why in facts["skipped_files"][:20]]
        if len(facts["skipped_files"]) > 20:
            lines.append(f"- and {len(facts['skipped_files']) - 20} more")
    return "\n".join(lines) + "\n"


# ---- The figure ----------------------------------------------------------------------------------


def smooth(values: Sequence[float], window: int = WINDOW) -> npt.NDArray[np.float64]:
    """Computes the centred mean over `window` values, fewer at the ends."""
    kernel = np.ones(min(window, len(values)))
    counts = np.convolve(np.ones(len(values)), kernel, "same")
    return np.convolve(np.array(values, dtype=float), kernel, "same") / counts


def draw(axes: Axes, values: Losses, style: str, color: str) -> None:
    """Draws values by step, without those that are None; without dots, smoothed and thin."""
    found = {step: value for step, value in sorted(values.items()) if value is not None}
    if "o" in style:
        axes.plot([*found], [*found.values()], style, color=color, markersize=4, linewidth=1.6)
    elif found:
        axes.plot([*found], smooth([*found.values()]), style, color=color, linewidth=0.8, alpha=0.6)


def draw_losses(
    path: Path,
    runs: Sequence[RunSpec],
    records: Sequence[Json],
    baseline: RunSpec | None,
    title: str,
) -> None:
    """Writes the figure of runs that have a step."""
    train = {run: series(records, run.name, "train", "loss") for run in runs}
    validation = {run: series(records, run.name, "eval", "val_loss") for run in runs}
    has_experts = any("expert_load" in r for r in records)
    heights = (3, 2, 1.5) if has_experts else (3, 2)
    figure = Figure(figsize=(9, 1.6 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), sharex=True, height_ratios=heights)
    top, bottom = panels[:2]
    color_of = {run: "black" if run == baseline else "grey" for run in runs}
    color_of |= {run: f"C{i}" for i, run in enumerate(run for run in runs if run.converts)}
    for run in runs:
        draw(top, validation[run], "o-", color_of[run])
    _, high = top.get_ylim()
    for run, line in zip(runs, list(top.lines)):
        draw(top, train[run], "-", color_of[run])
        step, loss = max(validation[run].items(), default=(0, None))
        label = run.name if loss is None else f"{run.name}: {loss:.3f}"
        if baseline and run != baseline:
            base = series(records, baseline.name, "eval", "val_loss")
            style, found = "o--", gaps(validation[run], base)
            if run.seed == baseline.seed:
                base = series(records, baseline.name, "train", "loss")
                draw(bottom, gaps(train[run], base), "-", color_of[run])
                style = "o-"
            draw(bottom, found, style, color_of[run])
            label += f" ({found[step]:+.2f}%)" if step in found else ""
        line.set_label(label)
    if any(len(found) > 1 for found in validation.values()):
        top.set_ylim(top=high)  # without the steep beginning
    top.set_title(textwrap.fill(title, 90))
    top.set_ylabel("loss, nats a token")
    top.legend(title="validation (dots), training (thin)", fontsize=9)
    bottom.axhline(0, color="black", linewidth=1)
    bottom.set_ylabel(f"gap to {baseline.name if baseline else 'bf16'}, %")
    low, high = bottom.get_ylim()  # limited, so that a diverging run does not flatten the others
    bottom.set_ylim(max(low, -10), min(max(high, 0.5), 15))
    if has_experts:
        draw_load(panels[2], records, color_of)
    panels[-1].set_xlabel("step")
    for axes in panels:
        axes.grid(alpha=0.3)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=130))


def draw_load(axes: Axes, records: Sequence[Json], color_of: Mapping[RunSpec, str]) -> None:
    """Draws the load of experts, and dashed, on the right scale, the dropped rows of a step."""
    right = axes.twinx()
    for run, color in color_of.items():
        draw(axes, series(records, run.name, "train", "expert_load"), "-", color)
        draw(right, series(records, run.name, "train", "dropped_rows"), "--", color)
    axes.set_ylim(bottom=1)
    axes.set_ylabel("experts' load,\nlargest over mean")
    right.set_ylim(0, max(right.get_ylim()[1], 1))
    right.set_ylabel("dropped rows (dashed)")
