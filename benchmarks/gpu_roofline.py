"""A figure and Markdown tables of the GPU's casts and layers beside their bounds.

    python benchmarks/gpu_roofline.py [--png build/gpu_roofline.png] [--markdown [PAGE]]

Reads the results of gpu_casts.py and gpu_linear.py; measures nothing.

    casts     minimum bytes / time, as a fraction of a device copy of the same run: 100% is a copy
    layers    time / the time of torch's bf16 layer, beside the floor: the bare products and the
              fewest bytes of the casts at the speed of a copy

--markdown prints the tables, or, with a page, replaces the text between the two comments that name
this script. To update a page's tables after a run:

    python benchmarks/gpu_roofline.py --markdown research/measured/casts.md

The figure has the bars of both scripts; tables of pages have none.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- gpu_roofline.py -->", "<!-- /gpu_roofline.py -->"
BASE = "torch bf16"

Row = dict[str, Any]  # of the JSON

# The families of the figure, from the top; a kernel belongs to the first whose pattern it matches.
FAMILIES = {
    "with extras": r".*(decoded too|fp32 in)",
    "amax": "amax",
    "peers": "torchao",
    "RHT alone": "RHT",
    "FP8": "e[45]m[23]/(tensor|row)",
    "FP8, 128-blocks": "e4m3/",
    "MX": "mx",
    "NVFP4, RHT": r"nvfp4.*\+rht",
    "NVFP4": "nvfp4",
    "decoding, layouts": "",
}
ORDER = [
    "amax", "FP8", "FP8, 128-blocks", "MX", "NVFP4", "NVFP4, RHT", "RHT alone", "decoding, layouts",
    "with extras", "peers",
]  # fmt: skip
COLORS = {"rowwise": "#0072b2", "columnwise": "#d55e00", "both": "#009e73", "": "#555555"}
SHAPE_COLORS = ["#0072b2", "#009e73", "#d55e00", "#7b5ea7", "#555555"]


def read(path: Path) -> dict[str, Any]:
    if not path.exists():
        script = path.stem + ".py"
        sys.exit(
            f"gpu_roofline.py: expected {path}, it is not there; benchmarks/{script} writes it"
        )
    return json.loads(path.read_text())


def shapes_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(row["shape"] for row in rows))


# ---- Names ---------------------------------------------------------------------------------------


def family_of(name: str) -> str:
    return next(family for family, pattern in FAMILIES.items() if re.match(pattern, name))


def split_name(name: str) -> tuple[str, str]:
    """Splits `mxfp8: both, fp32 in` into (`mxfp8, fp32 in`, `both`)."""
    specs = re.fullmatch(r"(.*): rowwise \+ (.*): columnwise", name)
    if specs:
        return f"{specs[1]} | {specs[2]}", "both"
    side = re.search(r": (rowwise|columnwise|both)", name)
    return (name.replace(side[0], ""), side[1]) if side else (name, "")


# ---- Tables --------------------------------------------------------------------------------------


def percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f}%"


def missed(value: float, bar: float | None) -> bool:
    return bar is not None and value < bar


def table(head: list[str], body: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *body]
    return [*("| " + " | ".join(line).rstrip() + " |" for line in lines), ""]


def ceilings(rows: list[Row]) -> str:
    """Returns the copies that the rows were compared with: one for each size of an input."""
    speeds = {round(row["tb_s"] / row["of_ceiling"], 2): None for row in rows}
    return ", ".join(f"{speed:.2f}" for speed in speeds)


def casts_table(rows: list[Row]) -> list[str]:
    """Formats a line a kernel: the first shape in full, the others as time and fraction."""
    first, *others = shapes_of(rows)
    at = {(row["name"], row["shape"]): row for row in rows}
    head = ["kernel", f"µs at {first}", "TB/s", "of copy"]
    head += [f"{shape}: µs, of copy" for shape in others]
    body = []
    for name in dict.fromkeys(row["name"] for row in rows):
        row = at.get((name, first))
        line = [name.replace(": rowwise + ", ": rowwise, "), "", "", ""]
        if row:
            line[1:] = [f"{row['us']:.1f}", f"{row['tb_s']:.2f}", percent(row["of_ceiling"])]
        for shape in others:
            other = at.get((name, shape))
            line.append(f"{other['us']:.1f}, {percent(other['of_ceiling'])}" if other else "")
        body.append(line)
    here = [row for row in rows if row["shape"] == first]
    note = (
        "Device copies of the run, one a size of input, in the table's order: "
        f"{ceilings(here)} TB/s."
    )
    return [*table(head, body), *textwrap.wrap(note, 100), ""]


def layers_table(rows: list[Row]) -> list[str]:
    head = ["layer", "ms", "speed, bf16 = 1", "floor, ms", "above it", "kept", "peak MiB"]
    lines = []
    for shape in shapes_of(rows):
        body = []
        for row in (row for row in rows if row["shape"] == shape):
            floor = row["floor_ms"]
            body.append(
                [
                    row["layer"],
                    f"{row['ms']:.3f}",
                    f"{row['speed']:.2f}",
                    "" if floor is None else f"{floor:.3f}",
                    "" if floor is None else percent(row["ms"] / floor - 1),
                    "" if row["saved"] is None else f"{row['saved']:.3f}",
                    f"{row['peak_mib']:.0f}",
                ]
            )
        lines += [f"M x K x N = {shape}:", "", *table(head, body)]
    return lines


def host_table(rows: list[Row]) -> list[str]:
    """Formats a line a recipe, with the weight quantized in each step and with cached codes."""
    at = {row["layer"]: row for row in rows}
    names = [name for name in at if not name.endswith(", weight cached")]
    whats = list(rows[0]["us"])

    def cell(name: str, what: str) -> str:
        row = at.get(name)
        return f"{row['us'][what]:.1f} ({row['of nn.Linear'][what]:.1f}x)" if row else ""

    head = ["layer", *whats, *(f"{what}, weight cached" for what in whats)]
    body = [
        [name, *(cell(full, what) for full in (name, f"{name}, weight cached") for what in whats)]
        for name in names
    ]
    title = "Host time of a 128 x 128 layer with 128 rows, µs (times nn.Linear's):"
    return [title, "", *table(head, body)]


def markdown(casts: dict[str, Any], linear: dict[str, Any]) -> str:
    lines = [f"{casts['device']}, torch {casts['torch']}.", "", *casts_table(casts["rows"])]
    lines += [*layers_table(linear["rows"]), *host_table(linear["host"])]
    return "\n".join(lines)


def replace_in(page: Path, text: str) -> None:
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"gpu_roofline.py: expected {BEGIN} and {END} in {page}")
    page.write_text(f"{before}{BEGIN}\n{text}{END}{after}", encoding="utf-8")


# ---- Figure --------------------------------------------------------------------------------------


def kernels_by_family(rows: list[Row]) -> list[tuple[str, list[str]]]:
    labels: dict[str, dict[str, None]] = {family: {} for family in ORDER}
    for row in rows:
        labels[family_of(row["name"])][split_name(row["name"])[0]] = None
    return [(family, list(names)) for family, names in labels.items() if names]


def draw_casts(axes: Any, rows: list[Row]) -> None:
    """Draws a line a kernel: a dot for each direction, hollow under its bar, which is the tick."""
    y_of: dict[str, int] = {}
    for i, (family, labels) in enumerate(kernels_by_family(rows)):
        first = len(y_of)
        y_of |= {label: first + j for j, label in enumerate(labels)}
        if i % 2:
            axes.axhspan(first - 0.5, len(y_of) - 0.5, color="black", alpha=0.05, linewidth=0)
        axes.text(1.01, (first + len(y_of) - 1) / 2, family, transform=axes.get_yaxis_transform(),
                  va="center", fontsize=9)  # fmt: skip
    for row in rows:
        label, side = split_name(row["name"])
        place = {"rowwise": -0.2, "columnwise": 0.0, "both": 0.2, "": 0.0}[side]
        y, x, color = y_of[label] + place, 100 * row["of_ceiling"], COLORS[side]
        fill = "white" if missed(row["of_ceiling"], row["bar"]) else color
        axes.plot(x, y, "o", markersize=5.5, color=color, markerfacecolor=fill, zorder=3)
        if row["bar"]:
            axes.plot(100 * row["bar"], y, "|", color=color, markersize=7, markeredgewidth=1.6)
        if row["goal"]:
            axes.plot(100 * row["goal"], y, "|", color=color, markersize=7, alpha=0.45)
    axes.axvline(100, color="black", linewidth=1)
    axes.set_yticks(range(len(y_of)), labels=list(y_of), fontsize=8.5)
    axes.set_ylim(len(y_of) - 0.5, -0.5)
    axes.set_xlabel("minimum bytes / time, % of a device copy of the same run")
    axes.grid(axis="x", alpha=0.3)
    for side, color in COLORS.items():
        axes.plot([], [], "o", color=color, label=side or "no direction")
    axes.plot([], [], "o", color="black", markerfacecolor="white", label="under its bar")
    axes.plot([], [], "|", color="black", markersize=8, markeredgewidth=1.6, label="bar")
    axes.plot([], [], "|", color="black", markersize=8, alpha=0.45, label="goal")
    axes.legend(fontsize=8.5, loc="lower left")


def draw_layers(axes: Any, rows: list[Row]) -> None:
    """Draws time over bf16's, a bar a shape; black ticks are floors, red ones are limits."""
    shapes = shapes_of(rows)
    names = [n for n in dict.fromkeys(row["layer"] for row in rows) if n != BASE]
    base = {row["shape"]: row["ms"] for row in rows if row["layer"] == BASE}
    height = 0.8 / len(shapes)
    for row in rows:
        if row["layer"] == BASE:
            continue
        at = shapes.index(row["shape"])
        y = names.index(row["layer"]) - 0.4 + (at + 0.5) * height
        time = row["ms"] / base[row["shape"]]
        axes.barh(y, time, 0.92 * height, color=SHAPE_COLORS[at % len(SHAPE_COLORS)], zorder=2)
        text = f"{row['speed']:.2f}x"
        axes.text(0.012, y, text, va="center", fontsize=min(9, 5 + 20 * height / 3), color="white")
        marks = {"black": row["floor_ms"] and row["floor_ms"] / base[row["shape"]],
                 "#cc0000": row["bar"] and 1 / row["bar"]}  # fmt: skip
        for color, x in marks.items():
            if x:
                axes.plot([x, x], [y - height / 2, y + height / 2], color=color, lw=1.8, zorder=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), labels=names, fontsize=9)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("forward + backward, time over torch bf16's of the same run (white: speed)")
    axes.grid(axis="x", alpha=0.3)
    for at, shape in enumerate(shapes):
        axes.barh(0, 0, color=SHAPE_COLORS[at % len(SHAPE_COLORS)], label=shape)
    axes.plot([], [], color="black", lw=1.8, label="floor")
    axes.plot([], [], color="#cc0000", lw=1.8, label="bar")
    axes.legend(fontsize=8.5, title="M x K x N", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def draw(path: Path, casts: dict[str, Any], linear: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shape = shapes_of(casts["rows"])[0]
    kernels = [row for row in casts["rows"] if row["shape"] == shape]
    lines = sum(len(labels) for _, labels in kernels_by_family(kernels))
    layers = len(linear["rows"]) - len(shapes_of(linear["rows"]))
    heights = (0.24 * lines + 1, max(0.14 * layers, 2.6) + 1)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, sum(heights)), height_ratios=heights, layout="constrained"
    )
    top.set_title(f"Casts, {shape}: {casts['device']}", fontsize=11)
    bottom.set_title("Linear layers, eager", fontsize=11)
    draw_casts(top, kernels)
    draw_layers(bottom, linear["rows"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
    print(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    build = ROOT / "build"
    parser.add_argument("--casts", type=Path, default=build / "gpu_casts.json")
    parser.add_argument("--linear", type=Path, default=build / "gpu_linear.json")
    parser.add_argument("--png", type=Path, default=build / "gpu_roofline.png", help="the figure")
    parser.add_argument(
        "--markdown", nargs="?", const="-", help="print the tables, or renew them in this page"
    )
    args = parser.parse_args()
    casts, linear = read(args.casts), read(args.linear)
    draw(args.png, casts, linear)
    if args.markdown == "-":
        print(markdown(casts, linear))
    elif args.markdown:
        replace_in(Path(args.markdown), markdown(casts, linear))
        print(args.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
