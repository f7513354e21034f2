"""The load of experts: the tokens of each in a step, of all ranks.

    load    the largest number of tokens of an expert over the mean of its layer; of the layer with
            the most. 1: even, the number of experts over top_k: all tokens in the same experts.

An expert is active where it had a token in the last LAST steps of a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ...moe.router import Router
from ..checks import COUNT, Json, kind

LAST = 100  # steps at the end of a run whose tokens of each expert are recorded

Tokens = dict[str, list[int]]  # of each expert, by the name of the layer

TOKENS = kind(
    "lists of counts by layer",
    lambda value: (
        isinstance(value, dict)
        and all(
            isinstance(counts, list) and not any(map(COUNT, counts)) for counts in value.values()
        )
    ),
)


def read_tokens(model: nn.Module) -> Tokens:
    """Returns the tokens of the last step, after mf.step: one copy from the device."""
    routers = {
        name.removesuffix(".router"): module
        for name, module in model.named_modules()
        if isinstance(module, Router)
    }
    if not routers:
        return {}
    counts = torch.stack([router.step_counts for router in routers.values()])
    return dict(zip(routers, counts.tolist()))


def load_of(tokens: Tokens) -> float:
    """Returns the largest over the mean, of the layer with the most; 1 without a token."""
    layers = [counts for counts in tokens.values() if any(counts)]
    return max((max(counts) * len(counts) / sum(counts) for counts in layers), default=1.0)


def active_experts(records: Iterable[Json]) -> set[tuple[str, int]]:
    """Returns the layers and numbers of the experts that had a token in any of the records."""
    return {
        (layer, expert)
        for record in records
        for layer, counts in record["tokens"].items()
        for expert, count in enumerate(counts)
        if count
    }


@contextmanager
def ignored_drops() -> Iterator[None]:
    """Ignores mf.step's warnings of dropped rows, which each step's record has.

    Enter it once a run: entering and leaving make Python repeat warnings that it shows once.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"mf\.step: rank \d+ dropped")
        yield
