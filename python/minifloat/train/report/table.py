"""The final table, from metrics.jsonl and each run's result, complete for a resumed job too.

The gap is to the bf16 run with the job's seed, else to the first bf16 run, at the same step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..checks import Json
from ..model.expert_load import LAST, active_experts
from ..model.measure import MEASURE_EVERY
from ..recipes import RunSpec

WARM_UP = 3  # first steps, left out of the speeds: they fill caches and choose kernels


@dataclass(frozen=True)
class Curves:
    """One run's records: losses by step (nats a token), and speeds of the timed steps.

    light: the latest measured time of the products alone, over the time of the step.
    load, dropped: of experts, by step. active: the experts with tokens in the last steps, None
    before the last step.
    """

    train: dict[int, float | None]
    validation: dict[int, float | None]
    step_ms: list[float]
    tokens_per_s: list[float]
    light: list[float]
    load: dict[int, float] = field(default_factory=dict)
    dropped: dict[int, float] = field(default_factory=dict)
    active: set[tuple[str, int]] | None = None

    @property
    def light_ms(self) -> float | None:
        """The median time of the products of a step alone."""
        return median([share * step_ms for share, step_ms in zip(self.light, self.step_ms)])


def curves_of(records: Sequence[Json], run: str) -> Curves:
    """Sorts the records of one run."""
    ours = [r for r in records if r["run"] == run]
    train = {r["step"]: r for r in ours if r["kind"] == "train"}
    evals = {r["step"]: r["val_loss"] for r in ours if r["kind"] == "eval"}
    tokens = [r for r in ours if r["kind"] == "experts"]
    timed = [r for step, r in train.items() if step > WARM_UP] or list(train.values())
    return Curves(
        train={step: record["loss"] for step, record in train.items()},
        validation=evals,
        step_ms=[r["step_ms"] for r in timed],
        tokens_per_s=[r["tokens_per_s"] for r in timed],
        light=[r["speed_of_light"] for r in timed],
        load={step: r["expert_load"] for step, r in train.items() if "expert_load" in r},
        dropped={step: r["dropped_rows"] for step, r in train.items() if "dropped_rows" in r},
        active=active_experts(tokens) if tokens else None,
    )


def baseline_of(runs: Sequence[RunSpec], seed: int) -> RunSpec | None:
    """Chooses the run that others are compared to: bf16 with the job's seed, else any bf16."""
    bf16 = [run for run in runs if not run.converts]
    return next((run for run in bf16 if run.seed == seed), bf16[0] if bf16 else None)


def table_rows(
    runs: Sequence[RunSpec],
    curves: Mapping[str, Curves],
    facts: Mapping[str, Json],
    baseline: RunSpec | None,
) -> list[Json]:
    """Returns a row a run, with None for values that were not measured.

    facts: the content of result.json by run.
    """
    reference = curves[baseline.name] if baseline else None
    rows = []
    for run in runs:
        run_curves = curves[run.name]
        step, loss = max(run_curves.validation.items(), default=(None, None))
        base = reference.validation.get(step) if reference and step is not None else None
        fact, light = facts.get(run.name, {}), median(run_curves.light)
        rows.append(
            {
                "run": run.name,
                "recipe": run.trained_recipe,
                "keep": run.keep,
                "seed": run.seed,
                "status": fact.get("status", "not started"),
                "step": max(run_curves.train, default=0),
                "validation_step": step,
                "validation_loss": loss,
                "gap_percent": 100 * (loss / base - 1) if loss and base else None,
                "step_ms": median(run_curves.step_ms),
                "speed": speed_of(median(run_curves.step_ms), reference),
                "tokens_per_s": median(run_curves.tokens_per_s),
                "speed_of_light_percent": None if light is None else 100 * light,
                "light_ms": run_curves.light_ms,
                "saved_bytes_per_token": fact.get("saved_total"),
                "saved_bytes_per_token_linears": fact.get("saved_linears"),
                "peak_memory_bytes": fact.get("peak"),
                "converted": fact.get("converted", 0),
                **expert_cells(run_curves, reference),
            }
        )
    return rows


def expert_cells(run_curves: Curves, reference: Curves | None) -> Json:
    """Returns the columns about experts. A dense model has none of these figures.

    idle_experts: the layers and numbers of those that are active under the baseline alone.
    """
    late = [load for _, load in sorted(run_curves.load.items())[-LAST:]]
    base = reference.active if reference else None
    active = run_curves.active
    return {
        "expert_load": median(late),
        "active_experts": None if active is None else len(active),
        "idle_experts": None if active is None or base is None else sorted(base - active),
        "dropped_rows": sum(run_curves.dropped.values()) if run_curves.dropped else None,
    }


def median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def speed_of(step_ms: float | None, reference: Curves | None) -> float | None:
    """Returns the speed of a step, that of the baseline being 1."""
    base = median(reference.step_ms) if reference else None
    return base / step_ms if step_ms and base else None


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
