"""Pictures of results, as SVG that is equal wherever it is written.

    blocks.svg    a training step beside torchao and Transformer Engine: parts, speed, memory
    host.svg      speeds under FSDP2, where the host is late and where it is not

They stand on white cards, so that they can be read on a dark page of any host. docs/site.css turns
pictures dark on the site.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import figures
from figures import BF16, Row

SANS = "system-ui, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
BOLD = {"font_size": "15", "font_weight": "bold"}
INK, GRAY, LINE = "#1f2328", "#59636e", "#8c959f"


# ---- SVG -----------------------------------------------------------------------------------------
def text(x: float, y: float, words: str, anchor: str = "start", **style: str) -> str:
    """Returns a line of text whose middle is at y. style: attributes, with _ for -"""
    given = {"fill": INK, "font_size": "13", **style}
    attributes = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in given.items())
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" dominant-baseline="central"'
        f"{attributes}>{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str, **style: str) -> str:
    attributes = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
    size = f'width="{width:g}" height="{height:g}"'
    return f'<rect x="{x:g}" y="{y:g}" {size} fill="{fill}"{attributes}/>'


def path(points: str, **style: str) -> str:
    given = {"stroke": LINE, **style}
    attributes = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in given.items())
    return f'<path d="{points}" fill="none"{attributes}/>'


def picture(width: int, height: int, title: str, parts: list[str]) -> str:
    """Returns an SVG on a white card. title: what a reader hears who does not see it"""
    hatch = (
        '<pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><path d="M0 0V6" stroke="#fff" stroke-width="3" '
        'stroke-opacity="0.55"/></pattern>'
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" role="img" font-family="{SANS}">',
        f"<title>{escape(title)}</title>",
        f"<defs>{hatch}</defs>",
        box(0, 0, width, height, "#ffffff", rx="8"),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


# ---- A training step -----------------------------------------------------------------------------
KINDS = ("products", "attention", "casts", "optimizer", "the rest")
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#999999")
LEGEND = ("GEMMs", "attention", "casts", "optimizer", "the rest")


def step_rows() -> list[Row]:
    """Returns the rows of a step that were profiled, the fastest first, each recipe once."""
    rows: dict[str, Row] = {}
    for run in figures.STEPS:
        for row in figures.steps_in(run):
            if row["kinds"]:
                rows.setdefault(row["name"], row)
    return sorted(rows.values(), key=lambda row: -row["speed"])


def peer_name(name: str) -> str:
    return name.replace("te ", "Transformer Engine ") if name.startswith("te ") else name


def blocks() -> str:
    rows, left, top, high, pitch = step_rows(), 210, 74, 19, 26
    longest = max(sum(row["kinds"].values()) for row in rows)
    scale = 500 / longest  # pixels a ms
    width, height = 880, top + pitch * len(rows) + 44
    parts = [text(16, 22, "Four Llama3-8B blocks on an H200: ms of a step's kernels", **BOLD)]
    x = float(left)
    for kind, color in zip(LEGEND, COLORS):
        parts += [box(x, 42, 12, 12, color), text(x + 18, 48, kind)]
        x += 40 + 7 * len(kind)
    parts += [
        box(x, 42, 12, 12, GRAY),
        box(x, 42, 12, 12, "url(#hatch)"),
        text(x + 18, 48, "peers"),
    ]
    parts.append(text(width - 16, 48, "speed, peak GiB", "end", font_weight="bold"))
    for i, row in enumerate(rows):
        y, x, name = top + pitch * i, float(left), row["name"]
        is_base, is_peer = name == BF16, name.startswith(("te ", "torchao "))
        weight = {"font_weight": "bold"} if is_base else {}
        if is_base:
            parts.append(box(8, y - 4, width - 16, pitch, "#eaeef2", rx="4"))
        parts.append(text(left - 10, y + high / 2, peer_name(name), "end", **weight))
        for kind, color in zip(KINDS, COLORS):
            length = scale * row["kinds"].get(kind, 0.0)
            parts.append(box(round(x, 1), y, round(length, 1), high, color))
            x += length
        if is_peer:
            parts.append(box(left, y, round(x - left, 1), high, "url(#hatch)"))
        figure = f"{row['speed']:.2f}, {row['peak_gib']:.1f}"
        parts.append(text(width - 16, y + high / 2, figure, "end", **weight))
    bottom = top + pitch * len(rows)
    for ms in range(0, int(longest) + 1, 25):
        x = round(left + scale * ms, 1)
        parts.append(path(f"M{x} {bottom}V{bottom + 5}"))
        parts.append(text(x, bottom + 16, str(ms), "middle", fill=GRAY, font_size="12"))
    note = "speed: bf16's time over the recipe's"
    parts.append(text(width - 16, 22, note, "end", fill=GRAY, font_size="12"))
    return picture(width, height, "Parts, speed and memory of a training step", parts)


# ---- A step under FSDP2, by the host -------------------------------------------------------------
SMALL = {"fill": GRAY, "font_size": "12"}
ALONE, GRAPHED = "gpu_fsdp_alone", "gpu_fsdp_alone_graph"  # one rank of several, of gpu_fsdp.py
LINES = (  # name, run, recipe, dashes
    ("fp8_tensorwise as a CUDA graph", GRAPHED, "fp8_tensorwise", "6 4"),
    ("fp8_tensorwise", ALONE, "fp8_tensorwise", "none"),
    ("torchao tensorwise", ALONE, "torchao_tensorwise", "none"),
)


def host() -> str:
    """Draws speeds over the tokens of a step: with few the host takes as long as the device."""
    base = sorted(figures.rows_of(ALONE, recipe=BF16), key=lambda row: row["seq"])
    left, right, top, bottom, low, high = 100, 640, 66, 306, 0.5, 1.5
    at = {row["seq"]: left + 60 + 140 * i for i, row in enumerate(base)}

    def y(speed: float) -> float:
        return round(bottom - (bottom - top) * (speed - low) / (high - low), 1)

    parts = [
        text(16, 22, "A step under FSDP2 on an H200: speed over tokens a GPU", **BOLD),
        text(16, 46, "speed: bf16's time over the recipe's", **SMALL),
    ]
    for tenths in range(6, 15, 2):
        height = y(tenths / 10)
        parts.append(path(f"M{left} {height}H{right}", stroke_width="2" if tenths == 10 else "0.5"))
        parts.append(text(left - 8, height, f"{tenths / 10:g}", "end", **SMALL))
    for i, label in enumerate(("tokens", "host, bf16", "device, bf16")):
        parts.append(text(left - 8, bottom + 16 + 18 * i, label, "end", **SMALL))
    for row in base:
        labels = (str(row["seq"]), f"{row['host_ms']:.0f} ms", f"{row['device_ms']:.0f} ms")
        for i, label in enumerate(labels):
            parts.append(text(at[row["seq"]], bottom + 16 + 18 * i, label, "middle", **SMALL))
    for i, ((name, run, recipe, dashes), color) in enumerate(zip(LINES, COLORS)):
        rows = sorted(figures.rows_of(run, recipe=recipe), key=lambda row: row["seq"])
        route = "L".join(f"{at[row['seq']]} {y(row['speed'])}" for row in rows)
        style = {"stroke": color, "stroke_width": "2.5", "stroke_dasharray": dashes}
        parts.append(path(f"M{route}", **style))
        parts.append(path(f"M{right + 16} {top + 26 * i + 14}h28", **style))
        parts.append(text(right + 52, top + 26 * i + 14, name))
    return picture(960, 372, "Speeds under FSDP2 over the tokens of a step", parts)


PICTURES: dict[str, Callable[[], str]] = {"blocks.svg": blocks, "host.svg": host}
