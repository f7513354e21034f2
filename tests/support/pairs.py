"""Rows of values in which any two parameters meet in all pairs: far fewer than their product."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairs(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Returns rows, each of one value a parameter, the same ones at each call."""
    columns = [list(values) for values in parameters]
    unmet = dict.fromkeys(  # each value as its parameter and its place
        ((i, a), (j, b))
        for i, j in combinations(range(len(columns)), 2)
        for a, b in product(range(len(columns[i])), range(len(columns[j])))
    )
    rows = []
    while unmet:
        row = dict(next(iter(unmet)))
        for i, values in enumerate(columns):
            if i not in row:
                row[i] = max(
                    range(len(values)),
                    key=lambda a, i=i, row=row: sum(
                        tuple(sorted(((i, a), other))) in unmet for other in row.items()
                    ),
                )
        for met in combinations(sorted(row.items()), 2):
            unmet.pop(met, None)
        rows.append(tuple(values[row[i]] for i, values in enumerate(columns)))
    return rows
