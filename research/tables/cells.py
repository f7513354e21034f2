"""Tables of Markdown: their cells, and the names of recipes and peers in them."""

from __future__ import annotations

from collections.abc import Callable

import figures
from figures import Row

Cells = list[str]


def table(head: Cells, body: list[Cells]) -> str:
    """Formats a table of Markdown. Rows that are too short end in empty cells."""
    rows = [line + [""] * (len(head) - len(line)) for line in body]
    lines = [" | ".join(head), "|".join(["---"] * len(head)), *map(" | ".join, rows)]
    return "".join(f"|{line}|\n" if line.startswith("---") else f"| {line} |\n" for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def pivot(
    rows: list[Row],
    corner: str,
    down: Callable[[Row], str],
    across: Callable[[Row], str],
    cell: Callable[[Row], str] = lambda row: number(row["speed"]),
) -> str:
    """Formats rows as a table by two of their names, each in the order of its first row."""
    columns = list(dict.fromkeys(map(across, rows)))
    at: dict[str, dict[str, str]] = {}
    for row in rows:
        at.setdefault(down(row), {})[across(row)] = cell(row)
    body = [[name, *(cells.get(c, "") for c in columns)] for name, cells in at.items()]
    return table([corner, *columns], body)


# ---- Names ---------------------------------------------------------------------------------------
PEERS = {
    "torchao tensorwise": "torchao tensorwise",
    "torchao rowwise": "torchao rowwise",
    "torchao_tensorwise": "torchao tensorwise",
    "te bf16": "Transformer Engine, bf16",
    "te delayed": "Transformer Engine, delayed",
    "te current": "Transformer Engine, current",
    "te blocks": "Transformer Engine, blocks",
    "torchao fp8 rowwise": "torchao, FP8 by rows",
}


def label(name: str) -> str:
    """Returns a recipe's name as code, with what a run says of it after a comma."""
    if name in PEERS:
        return PEERS[name]
    recipe, comma, rest = name.partition(", ")
    return f"`{recipe}`{comma}{rest}"


def label_of(row: Row) -> str:
    return label(figures.name_of(row))


def sizes(text: str) -> str:
    """Returns 4096 x 4096 for 4096x4096."""
    return text.replace("x", " x ")
