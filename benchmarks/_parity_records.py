"""Records of the runs of gpu_parity.py: their files, tables and curves.

gap        100 (loss / loss of bf16 from the same seed - 1)
mean, se   over the seeds; se is the standard deviation over sqrt(seeds)
"""

from __future__ import annotations

import json
import lzma
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import _gpu_timing as timing

Record = dict[str, Any]
Curves = dict[str, list[tuple[list[float], list[float]]]]  # own and the base's, of each seed
Panel = Callable[[Any, Curves, str], None]  # (axes, curves, the base's name)
RESULTS = timing.ROOT / "research" / "parity"
BF16 = "bf16"
NVFP4 = "nvfp4 keep=nvfp4_paper"  # whose variants have a table and an image of their own
MAPS = "nvfp4_by_"  # begins the names of the runs that keep some layers in bf16
BY_POSITION = f"{MAPS}position"  # beside which the inspector's map is judged
NO_VARIANTS = ("nvfp4_pow2", "nvfp4_mxfp8")  # other recipes whose names begin like nvfp4's
LAST = 100  # steps whose mean is the training loss of a run
SMOOTHED = 150  # steps whose mean is a point of a curve


# ---- Files ---------------------------------------------------------------------------------------
def write_record(path: Path, record: Record) -> None:
    """Writes a record as lines of JSON, one a field, compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt") as file:
        file.writelines(json.dumps({key: value}) + "\n" for key, value in record.items())


def read_record(path: Path) -> Record:
    """Reads a record, as write_record writes it."""
    with lzma.open(path, "rt") as file:
        return {key: value for line in file for key, value in json.loads(line).items()}


def records_in(folders: list[Path]) -> list[Record]:
    """Reads all records; refuses those of another trial or text."""
    paths = [path for folder in folders for path in sorted(folder.glob("*.jsonl.xz"))]
    records = [read_record(path) for path in paths]
    for path, record in zip(paths, records, strict=True):
        for key in ("trial", "tokens"):
            if record[key] != records[0][key]:
                sys.exit(f"{path}: expected the {key} of {paths[0]}, got {record[key]}")
        same = next(other for other in records if other["seed"] == record["seed"])
        shared = record["trial"].get("bf16_steps", 0)
        if shared and record["loss"][:shared] != same["loss"][:shared]:
            sys.exit(f"{path}: expected the first {shared} losses of {same['name']}, got others")
    return sorted(records, key=lambda record: (record["name"] != BF16, record["seed"]))


# ---- Figures -------------------------------------------------------------------------------------
def losses_of(records: list[Record], key: str) -> dict[str, dict[int, float]]:
    """Returns the losses by recipe and seed. key: val, average, or loss: the last steps' mean."""
    found: dict[str, dict[int, float]] = {}
    for record in records:
        value = record[key]
        loss = statistics.mean(value[-LAST:]) if isinstance(value, list) else value
        found.setdefault(record["name"], {})[record["seed"]] = loss
    return found


def is_variant(name: str) -> bool:
    """Tells whether a run is nvfp4 or a variant of it."""
    return name.startswith("nvfp4") and name not in NO_VARIANTS


def gaps_of(losses: dict[str, dict[int, float]], base_name: str = BF16) -> dict[str, list[float]]:
    """Returns each recipe's gaps to a base in percent, of the seeds that the base has too."""
    base = losses.get(base_name, {})
    return {
        name: [100 * (loss / base[seed] - 1) for seed, loss in sorted(runs.items()) if seed in base]
        for name, runs in losses.items()
        if name != base_name
    }


def standard_error(values: list[float]) -> float | None:
    """Returns the standard error of the mean, or None of a single value."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) / math.sqrt(len(values))


def sampling_error(record: Record, base: Record) -> float:
    """Returns the standard error of a gap in percent that the choice of validation text leaves."""
    gaps = [a - b for a, b in zip(record["parts"], base["parts"], strict=True)]
    return 100 * statistics.stdev(gaps) / math.sqrt(len(gaps)) / base["val"]


def smoothed(losses: list[float], steps: int) -> list[float]:
    """Returns the means of each `steps` losses that follow each other."""
    sums = [0.0, *accumulate(losses)]
    return [(b - a) / steps for a, b in zip(sums, sums[steps:], strict=False)]


def gaps_around(record: Record, base: Record, begin: int) -> tuple[float, float]:
    """Returns the training loss's gap in percent before step `begin`, and at the last step.

    The loss is the mean of LAST steps.
    """

    def gap(end: int) -> float:
        own, other = (statistics.mean(run["loss"][end - LAST : end]) for run in (record, base))
        return 100 * (own / other - 1)

    return gap(begin), gap(len(record["loss"]))


def training_seconds(record: Record) -> float:
    """Returns the seconds of the training steps alone, without evaluations and compilation."""
    trial = record["trial"]
    return trial["steps"] * trial["batch"] * trial["seq"] / record["tokens_per_s"]


def runs_on_one_gpu(records: list[Record]) -> dict[str, list[tuple[Record, Record]]]:
    """Returns each recipe's runs alone on bf16's kind of GPU, each with bf16's of the same seed.

    Runs under several recipes have no speed of their own.
    """
    base = {record["seed"]: record for record in records if record["name"] == BF16}
    pairs: dict[str, list[tuple[Record, Record]]] = {}
    for record in records:
        other = base.get(record["seed"])
        if record.get("shares_gpu") or "then" in record or "bf16_steps" in record["trial"]:
            continue
        if other and other["device"] == record["device"]:
            pairs.setdefault(record["name"], []).append((record, other))
    return pairs


def relative_seconds(pairs: list[tuple[Record, Record]]) -> float:
    """Returns the mean time of training over that of bf16's runs."""
    own, base = (statistics.mean(map(training_seconds, runs)) for runs in zip(*pairs, strict=True))
    return own / base


def gap_at_equal_time(record: Record, base: Record) -> float:
    """Returns the gap in percent of the training loss when the faster of two runs has ended.

    The loss is the mean of LAST steps. The slower run is cut before its rate has fallen.
    """
    ratio = training_seconds(base) / training_seconds(record)

    def loss(of: Record, share: float) -> float:
        end = round(min(share, 1.0) * len(of["loss"]))
        return statistics.mean(of["loss"][end - LAST : end])

    return 100 * (loss(record, ratio) / loss(base, 1 / ratio) - 1)


# ---- Tables --------------------------------------------------------------------------------------
def noise(losses: dict[int, float]) -> str:
    """Says the standard deviation of one recipe's losses over seeds, in percent of their mean."""
    if len(losses) < 2:
        return "one seed"
    values = list(losses.values())
    return f"{100 * statistics.stdev(values) / statistics.mean(values):.3f}%"


def percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.2f}%"


def table(losses: dict[str, dict[int, float]], base: str = BF16) -> str:
    """Formats losses and gaps as a table of the docs, the smallest gap first."""
    lines = [f"| recipe | losses | gaps to {base} | mean | se |", "|---|---|---|---|---|"]
    gaps = gaps_of(losses, base)

    def mean(name: str) -> float:
        return statistics.mean(gaps[name]) if gaps.get(name) else -math.inf

    for name in sorted(losses, key=mean):
        found = gaps.get(name, [])
        shown = ", ".join(f"{loss:.4f}" for _, loss in sorted(losses[name].items()))
        each = ", ".join(percent(gap, "+") for gap in found) or "-"
        lines.append(
            f"| `{name}` | {shown} | {each} | {percent(mean(name), '+') if found else '-'} | "
            f"{percent(standard_error(found))} |"
        )
    return "\n".join(lines)


def speed_table(records: list[Record]) -> str:
    """Formats the time of training and the gap at equal time, of runs on bf16's kind of GPU."""
    lines = ["| recipe | seeds | seconds of training | of bf16's | gap at equal time |"]
    lines.append("|---|---|---|---|---|")
    rows = []
    for name, found in runs_on_one_gpu(records).items():
        seconds = statistics.mean(training_seconds(record) for record, _ in found)
        ratio = relative_seconds(found)
        gaps = [gap_at_equal_time(*pair) for pair in found]
        error = standard_error(gaps)
        shown = percent(statistics.mean(gaps), "+") + (f" ± {error:.2f}%" if error else "")
        shown = "-" if name == BF16 else shown
        rows.append((ratio, f"| `{name}` | {len(found)} | {seconds:.0f} | {ratio:.2f} | {shown} |"))
    return "\n".join([*lines, *(line for _, line in sorted(rows))])


def end_table(records: list[Record]) -> str:
    """Formats what the last steps in another recipe change in the training loss's gap to bf16.

    Runs whose first steps differ compare by the change. Beside it is that of the run of the same
    seed without such an end.
    """
    lines = [f"| run | last steps | gap before | at the end | change | `{NVFP4}`'s |"]
    lines.append("|---|---|---|---|---|---|")
    runs = {(record["name"], record["seed"]): record for record in records}
    for record in records:
        base, plain = (runs.get((name, record["seed"])) for name in (BF16, NVFP4))
        if "then" not in record or base is None:
            continue
        begin = round((100 - record["percent"]) * len(record["loss"]) / 100)
        if begin < LAST:
            continue
        before, end = gaps_around(record, base, begin)
        values: list[float | None] = [before, end, end - before, None]
        if plain is not None:
            before, end = gaps_around(plain, base, begin)
            values[-1] = end - before
        shown = " | ".join(percent(value, "+") for value in values)
        name = f"`{record['name']}`, seed {record['seed']}"
        lines.append(f"| {name} | {record['percent']}% | {shown} |")
    return "\n".join(lines)


def print_tables(records: list[Record]) -> None:
    """Prints the tables that have rows; of variants, where what they are compared with has run."""
    for key in ("val", "average", "loss"):
        losses = losses_of(records, key)
        print(f"{key}; bf16 over seeds: {noise(losses.get(BF16, {}))}\n{table(losses)}\n")
        if NVFP4 in losses:
            variants = {name: runs for name, runs in losses.items() if is_variant(name)}
            print(f"{key}; variants of nvfp4\n{table(variants, NVFP4)}\n")
        if BY_POSITION in losses:
            maps = {name: runs for name, runs in losses.items() if name.startswith(MAPS)}
            print(f"{key}; layers kept in bf16\n{table(maps, BY_POSITION)}\n")
    for text in (end_table(records), speed_table(records)):
        if text.count("\n") > 1:  # a title and a rule
            print(f"{text}\n")
    base = {record["seed"]: record for record in records if record["name"] == BF16}
    print("| run | GPU | tokens/s | peak GiB | seconds | sampling error of the gap |")
    print("|---|---|---|---|---|---|")
    for record in records:
        other = base.get(record["seed"] if record["name"] != BF16 else min(base))
        error = sampling_error(record, other) if other not in (None, record) else None
        gpu = record["device"] + (", shared" if record.get("shares_gpu") else "")
        print(
            f"| `{record['name']}`, seed {record['seed']} | {gpu} | "
            f"{record['tokens_per_s']:,} | {record['peak_gib']} | {record['seconds']} | "
            f"{'-' if error is None else f'{error:.3f}%'} |"
        )


# ---- Curves --------------------------------------------------------------------------------------
def draw_losses(axes: Any, curves: Curves, base_name: str) -> None:
    """Draws mean training losses."""
    for i, (name, runs) in enumerate(curves.items()):
        draw_mean(axes, i, name, [own for own, _ in runs], ".3f")
    axes.set(ylabel="training loss, nats a token", ylim=(1.7, 3.0))


def draw_gaps(axes: Any, curves: Curves, base_name: str) -> None:
    """Draws mean gaps to a base, and between which values those of the seeds are."""
    late = [0.0]  # gaps of the last four fifths: early ones would hide them
    for i, (name, runs) in enumerate(curves.items()):
        if name == base_name:
            continue
        each = [[100 * (a / b - 1) for a, b in zip(*pair, strict=True)] for pair in runs]
        ranges = [(min(values), max(values)) for values in zip(*each, strict=True)]
        late += [value for pair in ranges[len(ranges) // 5 :] for value in pair]
        line = draw_mean(axes, i, name, each, "+.2f", "%")
        bounds = zip(*ranges, strict=True)
        axes.fill_between(line.get_xdata(), *bounds, alpha=0.12, color=line.get_color())
    axes.set(ylabel=f"gap to {base_name} of the same seeds, %")
    axes.set(ylim=(min(late) - 1, max(late) + 1))
    axes.axhline(0, color="gray", linewidth=0.8)


def draw_mean(
    axes: Any, place: int, name: str, runs: list[list[float]], digits: str, unit: str = ""
) -> Any:
    """Draws the mean of runs, in the color of a recipe's place; returns the line."""
    import matplotlib

    mean = [statistics.mean(values) for values in zip(*runs, strict=True)]
    steps = range(SMOOTHED // 2, SMOOTHED // 2 + len(mean))
    seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
    color = matplotlib.colormaps["tab20"](2 * place % 20 + place // 10)
    label = f"{name}, {seeds}: {mean[-1]:{digits}}{unit}"
    (line,) = axes.plot(steps, mean, label=label, linewidth=1, color=color)
    return line


def draw_curves(
    records: list[Record],
    base_name: str,
    path: Path,
    panels: Sequence[Panel] = (draw_losses, draw_gaps),
) -> None:
    """Draws panels below each other, by step, of runs beside a base's of the same seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    base = {r["seed"]: smoothed(r["loss"], SMOOTHED) for r in records if r["name"] == base_name}
    found: Curves = {}
    for record in records:
        if record["seed"] in base:
            pair = smoothed(record["loss"], SMOOTHED), base[record["seed"]]
            found.setdefault(record["name"], []).append(pair)
    names = sorted(found, key=lambda name: statistics.mean(a[-1] / b[-1] for a, b in found[name]))
    curves = {name: found[name] for name in names}
    figure, drawn = plt.subplots(
        len(panels),
        1,
        figsize=(12, 4.5 * len(panels)),
        sharex=True,
        layout="constrained",
        squeeze=False,
    )
    for draw, axes in zip(panels, drawn[:, 0], strict=True):
        draw(axes, curves, base_name)
        title = f"mean of {SMOOTHED} steps; of the last ones"
        axes.legend(title=title, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        axes.grid(alpha=0.3)
    drawn[-1, 0].set(xlabel="step")
    figure.suptitle("Means over seeds; shaded: from the lowest to the highest seed")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_images(records: list[Record], trial: str, folder: Path) -> None:
    """Draws parity.png, of the recipes, and parity_nvfp4.png, of nvfp4's variants.

    Of a trial with a name it draws parity_NAME.png, of runs under one recipe, and
    parity_NAME_ends.png, of those with a last part: the gaps alone, since not all have all seeds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    both = (BF16, NVFP4)
    if trial:
        recipes = [r for r in records if "then" not in r]
        ends = [r for r in records if "then" in r or r["name"] in both]
        draw_curves(recipes, BF16, folder / f"parity_{trial}.png", [draw_gaps])
        if any("then" in r for r in ends):
            draw_curves(ends, BF16, folder / f"parity_{trial}_ends.png", [draw_gaps])
        return
    recipes = [r for r in records if r["name"] in both or not is_variant(r["name"])]
    variants = [r for r in records if r["name"] in both or is_variant(r["name"])]
    draw_curves(recipes, BF16, folder / "parity.png")
    draw_curves(variants, NVFP4, folder / "parity_nvfp4.png")
