"""The report of pretrain.py: the table and the picture, from what the Trainer has logged.

The gap of a run is to the first bf16 run, at the same step.
"""

import statistics

from matplotlib.figure import Figure

COLUMNS = (  # title, key of a row, format
    ("recipe", "name", "{}"),
    ("validation loss", "loss", "{:.4f}"),
    ("gap to bf16", "gap", "{:+.2f}%"),
    ("tokens/s", "tokens_per_s", "{:.0f}"),
    ("speed, bf16 = 1", "speed", "{:.2f}"),
    ("saved for backward, B/token", "saved_bytes", "{:.0f}"),
    ("state", "state", "{}"),
)
NOTES = """\
- validation loss: nats a token of held-out text, the same for every recipe, which runs its forward.
- gap to bf16: against `{baseline}` at the same step. A bf16 run with another seed differs by its
  initial weights and the order of its batches: its gap is the noise of this comparison.
- tokens/s: the median over the steps, without evaluations and checkpoints.
- saved for backward: bytes that the forward saves and that grow with the tokens.
"""


def losses(history, key):
    """Returns losses by step; key: "loss" or "eval_loss"."""
    return {entry["step"]: entry[key] for entry in history if key in entry}


def baseline_of(runs):
    """Chooses the run that others are compared to; None where none is in bf16."""
    return next((run for run in runs if not run.converts), None)


def gaps(found, base):
    """Returns gaps in percent, at the steps where both have a loss."""
    return {s: 100 * (loss / base[s] - 1) for s, loss in found.items() if base.get(s)}


def table_rows(results, baseline, tokens_per_step):
    """Returns a row a run, with None for what was not measured.

    Args:
        results: by run, "state", "saved_bytes" and the Trainer's "log_history".
        baseline: a run of `results`, or None.
        tokens_per_step: of one optimizer step.
    """
    rows, speeds, logs = [], {}, {run: result["log_history"] for run, result in results.items()}
    for run, log in logs.items():
        seconds = [entry["step_seconds"] for entry in log if "step_seconds" in entry]
        speeds[run] = tokens_per_step / statistics.median(seconds) if seconds else None
    for run, log in logs.items():
        validation = losses(log, "eval_loss")
        last = max(validation, default=None)
        base = losses(logs[baseline], "eval_loss") if baseline else {}
        base_speed = speeds[baseline] if baseline else None
        rows.append(
            {
                "name": run.name,
                "loss": validation.get(last),
                "gap": gaps(validation, base).get(last),
                "tokens_per_s": speeds[run],
                "speed": speeds[run] / base_speed if speeds[run] and base_speed else None,
                "saved_bytes": results[run]["saved_bytes"],
                "state": results[run]["state"],
            }
        )
    return rows


def markdown_table(rows):
    """Formats rows, padded for reading in a terminal too."""
    cells = [[title for title, _, _ in COLUMNS]]
    for row in rows:
        shown = [(row[key], form) for _, key, form in COLUMNS]
        cells.append(["-" if value is None else form.format(value) for value, form in shown])
    widths = [max(map(len, column)) for column in zip(*cells)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for first, *others in (cells[0], rule, *cells[1:]):
        padded = [first.ljust(widths[0]), *(t.rjust(w) for t, w in zip(others, widths[1:]))]
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines)


def write_report(out, setting, results, baseline, tokens_per_step):
    """Writes report.md and loss.png of the runs so far; returns the table.

    setting: lines about model, text and schedule.
    """
    rows = table_rows(results, baseline, tokens_per_step)
    table = markdown_table(rows)
    parts = ["# Training side by side", "\n".join(f"- {line}" for line in setting), table]
    parts.append(NOTES.format(baseline=baseline.name if baseline else "none"))
    recipes = (f"- **{run.name}** (seed {run.seed}): `{run.text}`" for run in results)
    parts += ["![losses and gaps](loss.png)", "## Recipes", "\n".join(recipes)]
    (out / "report.md").write_text("\n\n".join(parts) + "\n", errors="backslashreplace")
    draw(out / "loss.png", results, baseline, setting[0])
    return table


def draw(path, results, baseline, title):
    """Draws losses by step, validation with dots, training thin; gaps of equal batches alone."""
    figure = Figure(figsize=(9, 8), layout="constrained")
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    colors = iter(f"C{i}" for i in range(len(results)))
    for run, result in results.items():
        color = "black" if run == baseline else next(colors) if run.converts else "grey"
        for key, style, width in (("eval_loss", "o-", 1.6), ("loss", "-", 0.8)):
            found = losses(result["log_history"], key)
            shown = dict(color=color, linewidth=width, markersize=4)
            label = run.name if key == "eval_loss" else None
            top.plot([*found], [*found.values()], style, label=label, **shown)
            if baseline and run != baseline and (key != "loss" or run.seed == baseline.seed):
                gap = gaps(found, losses(results[baseline]["log_history"], key))
                bottom.plot([*gap], [*gap.values()], style, **shown)
    if first := [y for line in top.lines[::2] for y in line.get_ydata()[:1]]:
        top.set_ylim(top=max(first))  # without the steep beginning
    top.set(title=title, ylabel="loss, nats a token")
    top.legend(title="validation (dots), training (thin)", fontsize=9)
    bottom.axhline(0, color="black", linewidth=1)
    low, high = bottom.get_ylim()  # limited, so that a diverging run does not flatten the others
    bottom.set(ylim=(max(low, -10), min(max(high, 0.5), 15)), xlabel="step")
    bottom.set_ylabel(f"gap to {baseline.name if baseline else 'bf16'}, %")
    top.grid(alpha=0.3)
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=130)
