"""The load of experts: the tokens of each in a step, of all ranks.

    load    the largest number of tokens of an expert over the mean of its layer; of the layer with
            the most. 1: even, the number of experts over top_k: all tokens in the same experts.

An expert is active where it had a token in the last LAST steps of a run.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from minifloat.moe.layer import Experts
from minifloat.moe.router import Router

from .fields import COUNT, Kind

LAST = 100  # steps at the end of a run whose tokens of each expert are recorded

Tokens = dict[str, list[int]]  # of each expert, by the name of the layer


def is_tokens(value: Any) -> bool:
    """Tells whether a value of a record is Tokens."""
    return isinstance(value, dict) and all(
        isinstance(counts, list) and not any(map(COUNT.refusal, counts))
        for counts in value.values()
    )


TOKENS = Kind("lists of counts by layer", is_tokens)


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


def dropped_rows(model: nn.Module) -> int | None:
    """Returns the rows that this rank dropped in the last step, after mf.step.

    None: no experts are divided over ranks.
    """
    links = links_of(model)
    return sum(link.step_dropped for link in links) if links else None


def links_of(model: nn.Module) -> list[Any]:
    """Returns the ExpertParallel of each experts module that ranks divide."""
    links = [module.parallel for module in model.modules() if isinstance(module, Experts)]
    return [link for link in links if link is not None]


def forget_dropped(model: nn.Module) -> None:
    """Drops the counts of rows that were dropped since the last step."""
    for link in links_of(model):
        if link.dropped is not None:
            link.dropped.zero_()


@contextmanager
def ignored_drops() -> Iterator[None]:
    """Ignores mf.step's warnings of dropped rows, which each step's record has.

    Enter it once a run: entering and leaving make Python repeat warnings that it shows once.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"mf\.step: rank \d+ dropped")
        yield


def load_of(tokens: Tokens) -> float:
    """Returns the largest over the mean, of the layer with the most; 1 without a token."""
    layers = [counts for counts in tokens.values() if any(counts)]
    return max((max(counts) * len(counts) / sum(counts) for counts in layers), default=1.0)


def active_experts(records: Iterable[Mapping[str, Any]]) -> set[tuple[str, int]]:
    """Returns the layers and numbers of the experts that had a token in any of the records."""
    return {
        (layer, expert)
        for record in records
        for layer, counts in record["tokens"].items()
        for expert, count in enumerate(counts)
        if count
    }
