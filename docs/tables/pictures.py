"""Pictures of results, as SVG that is equal wherever it is written.

    blocks.svg    a training step beside torchao and Transformer Engine: parts, speed, memory
    choose.svg    from a GPU and a purpose to a recipe; below, which sizes of layers pay

Both stand on a white card, so that they can be read on a dark page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import figures
from figures import BF16, Row

SANS = "system-ui, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
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


# ---- Which recipe? -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Wish:
    """A purpose, and the recipe for it. Without one any recipe will do."""

    purpose: str
    recipe: str = ""
    record: str = ""  # where the loss is not that of the recipe's own record
    shown: str = ""  # where the recipe's name does not say all


NVFP4 = {
    "recipe": "nvfp4",
    "record": "nvfp4 (keep nvfp4_paper) then=mxfp8",
    "shown": 'nvfp4, keep="nvfp4_paper", then mxfp8',
}
# GPUs, a note, their capabilities, purposes.
MACHINES: tuple[tuple[str, str, tuple[tuple[int, int], ...], tuple[Wish, ...]], ...] = (
    (
        "H100, H200",
        "trained and tested on",
        (figures.HOPPER,),
        (
            Wish("Speed at bf16's loss", "fp8_tensorwise"),
            Wish("More speed, by scales of earlier steps", "fp8_delayed"),
            Wish("A scale a token and feature: outliers", "fp8_rowwise"),
            Wish("Least memory, fewest bits between GPUs", "mxfp4"),
            Wish("Blackwell's MXFP8, for its numerics", "mxfp8"),
            Wish("NVIDIA's NVFP4, with the least loss in FP4", **NVFP4),
        ),
    ),
    (
        "B200, B300, RTX 50",
        "compiled, never run on",
        ((10, 0), (10, 3), (12, 0)),
        (Wish("Speed at bf16's loss", "mxfp8"), Wish("FP4", **NVFP4)),
    ),
    (
        "RTX 40, L4, L40",
        "compiled, never run on",
        ((8, 9),),
        (Wish("Speed at bf16's loss", "fp8_tensorwise"),),
    ),
    (
        "A100, RTX 30, CPU",
        "no GEMMs of codes",
        ((8, 0), (8, 6), figures.CPU),
        (Wish("To see what a recipe costs in loss"),),
    ),
)
SIZES = ("1024x1024", "1024x4096", "2048x2048", "4096x2048", "4096x4096", "4096x14336", "8192x8192")
RECIPES = ("fp8_tensorwise", "fp8_rowwise", "mxfp4", "nvfp4_pow2")
ROW, GAP = 40, 8


def name_of(wish: Wish) -> str:
    return wish.shown or wish.recipe or "any recipe"


def words_of(wish: Wish, capabilities: tuple[tuple[int, int], ...]) -> str:
    """Returns what was measured of a recipe on Hopper, and on other GPUs its loss alone."""
    if not wish.recipe:
        return "emulated, so no faster than bf16"
    loss = f"loss {figures.gaps()[wish.record or wish.recipe]}"
    if figures.HOPPER in capabilities and wish.record:  # other layers than a step was timed with
        return f"not timed; {loss}"
    if figures.HOPPER in capabilities:
        row = figures.step_of(wish.recipe)
        return f"speed {row['speed']:.2f}, {row['peak_gib']:.1f} GiB, {loss}"
    if not all(figures.is_native(wish.recipe, capability) for capability in capabilities):
        raise ValueError(f"{wish.recipe}: expected a recipe that is native on {capabilities}")
    return f"{loss}; speed unknown"


def wish_rows(parts: list[str], top: int) -> int:
    """Adds the boxes of GPUs, purposes and recipes from `top` on; returns where they end."""
    for gpus, note, capabilities, wishes in MACHINES:
        height = len(wishes) * (ROW + GAP) - GAP
        middle = top + height / 2
        parts.append(box(12, top, 156, height, "#eaeef2", rx="6"))
        parts.append(text(90, middle - 9, gpus, "middle", font_weight="bold"))
        parts.append(text(90, middle + 10, note, "middle", fill=GRAY, font_size="12"))
        for i, wish in enumerate(wishes):
            y = top + i * (ROW + GAP)
            at = y + ROW / 2
            parts.append(path(f"M168 {middle:g}H180V{at:g}H192", stroke_width="1.5"))
            parts.append(box(192, y, 294, ROW, "#f6f8fa", rx="6", stroke=LINE))
            parts.append(text(202, at, wish.purpose))
            parts.append(path(f"M486 {at:g}H508", stroke_width="1.5", marker_end="url(#tip)"))
            parts.append(box(512, y, 340, ROW, "#dbeafe", rx="6", stroke="#0072b2"))
            parts.append(text(522, at - 9, name_of(wish), font_family=MONO, font_weight="bold"))
            words = words_of(wish, capabilities)
            parts.append(text(522, at + 10, words, fill=GRAY, font_size="12"))
        top += height + 2 * GAP
    return top


def color_of(speed: float) -> str:
    """Returns blue where a recipe is faster than bf16 by 5%, orange where it is slower by 5%."""
    if speed >= 1.05:
        return "#bcdcf5" if speed < 1.35 else "#8cc2ee"
    return "#ededed" if speed > 0.95 else "#f9cfa6"


def size_grid(parts: list[str], top: int) -> int:
    """Adds the speeds by layer size, and of FSDP2 by tokens; returns where they end."""
    cells: dict[tuple[str, str], float] = {}
    for run in sorted((figures.DOCS / "results").glob("gpu_linear*.json")):
        for row in figures.rows_of(run.stem):
            tokens, _, size = row["shape"].partition("x")
            if tokens == "16384":
                cells[row["layer"], size] = row["speed"]
    columns = [(size, size.replace("x", " x ")) for size in SIZES]
    for seq in (2048, 8192):
        rows = figures.rows_of("gpu_fsdp", seq=seq)
        cells |= {(row["recipe"], str(seq)): row["speed"] for row in rows}
        columns.append((str(seq), str(seq)))
    left, wide = 142, 77
    last = left + wide * len(SIZES) + 16
    parts.append(text(left, top, "a layer of K x N, 16384 tokens", font_size="12", fill=GRAY))
    parts.append(text(last, top, "FSDP2: tokens a GPU", font_size="12", fill=GRAY))
    for i, (key, title) in enumerate(columns):
        x = left + wide * i + 16 * (i >= len(SIZES))
        parts.append(text(x + wide / 2 - 2, top + 20, title, "middle", font_size="11"))
        for j, recipe in enumerate(RECIPES):
            y, speed = top + 32 + 30 * j, cells.get((recipe, key))
            fill = "#ffffff" if speed is None else color_of(speed)
            parts.append(box(x, y, wide - 4, 26, fill, rx="3", stroke="#d0d7de"))
            shown = "-" if speed is None else f"{speed:.2f}"
            parts.append(text(x + wide / 2 - 2, y + 13, shown, "middle"))
    for j, recipe in enumerate(RECIPES):
        parts.append(text(132, top + 45 + 30 * j, recipe, "end", font_family=MONO))
    return top + 32 + 30 * len(RECIPES)


def choose() -> str:
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{LINE}"/></marker></defs>'
    )
    parts = [tip]
    for x, title in ((12, "1. Your GPU"), (192, "2. What for"), (512, "3. Take")):
        parts.append(text(x, 24, title, **BOLD))
    end = wish_rows(parts, 46)
    note = "4. Look at your sizes: bf16's time over the recipe's, on H200s. Orange stays in bf16."
    parts.append(text(12, end + 16, note, **BOLD))
    end = size_grid(parts, end + 46)
    return picture(864, end + 16, "From a GPU, a purpose and sizes to a recipe", parts)


PICTURES: dict[str, Callable[[], str]] = {"blocks.svg": blocks, "choose.svg": choose}
