"""Pictures of results, as SVG that is equal wherever it is written.

    blocks.svg    a training step beside torchao and Transformer Engine: parts, speed, memory

It stands on a white card, so that it can be read on a dark page of any host. docs/site.css turns
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
    attributes = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in style.items())
    return f'<path d="{points}" fill="none" stroke="{LINE}"{attributes}/>'


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


PICTURES: dict[str, Callable[[], str]] = {"blocks.svg": blocks}
