"""Calls of experts of other libraries, with which their forward is compared (same_forward.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...nn.convert.replica import seeded

MOST_SLOTS = 4
LAYOUTS = ("tokens (T, D)", "tokens (B, S, D)", "tokens (B, S, D) and routing (B, S, k)")


class Call(Protocol):
    """A way to call experts."""

    def arguments(self, count: int, magnitude: float, dim: int, experts: int) -> list[Tensor]:
        """Returns arguments of a call with `count` tokens (…, D) of a magnitude, in float32."""

    def others(self, experts: int) -> Iterator[tuple[str, Call]]:
        """Yields other ways to call experts that take this one, and how they differ from it."""


def tokens(count: int, dim: int, magnitude: float) -> Tensor:
    """Returns tokens (T, D) of one magnitude; for 0, of six magnitudes in turn.

    The large ones reach the limits of activations that clamp.
    """
    x = seeded((count, dim), 1)
    if magnitude:
        return x * magnitude
    scales = torch.tensor([2.0**-10, 0.25, 1.0, 4.0, 16.0, 2.0**10], dtype=torch.float32)
    return x * scales[torch.arange(count) % len(scales)][:, None]


class CountedCall(NamedTuple):
    """A call of torchtitan's experts: rows, and how many of them each expert has.

    The last three rows belong to no expert. The second expert has none.
    """

    def arguments(self, count: int, magnitude: float, dim: int, experts: int) -> list[Tensor]:
        counts = torch.full((experts,), count // experts)
        counts[1:2] = 0
        counts[0] += count - int(counts.sum())
        return [tokens(count + 3, dim, magnitude), counts]

    def others(self, experts: int) -> Iterator[tuple[str, Call]]:
        return iter(())


class ProjectionCall(NamedTuple):
    """A call of Hugging Face's experts: tokens, the experts of each, and their weights.

    Args:
        slots: k; 0: tokens alone, of which each expert has equally many, one expert after another.
        swap: whether the weights precede the experts.
        layout: 0: x (T, D), experts and weights (T, k); 1: x (B, S, D); 2: all three (B, S, …). B
            is 2 for an even number of tokens, else 1.
    """

    slots: int = 2
    swap: bool = False
    layout: int = 0

    def arguments(self, count: int, magnitude: float, dim: int, experts: int) -> list[Tensor]:
        slots = min(self.slots, experts)
        count = count if slots else -(-count // experts) * experts
        batch, x = 2 - count % 2, tokens(count, dim, magnitude)
        numbers = torch.arange(count)
        # Distinct experts in all slots of a token.
        steps = [1 + (numbers + slot) % max(experts - 1, 1) for slot in range(slots - 1)]
        first = numbers * 3 % experts
        indices = torch.stack([first, *[(first + step) % experts for step in steps]], 1)
        routing = [indices, (seeded((count, slots), 2).abs() + 1) / 4][:: -1 if self.swap else 1]
        if self.layout == 2:
            routing = [t.view(batch, -1, slots) for t in routing]
        x = x.view(batch, -1, dim) if self.layout else x
        return [x, *(routing if slots else [])]

    def others(self, experts: int) -> Iterator[tuple[str, Call]]:
        for layout in {0, 1, 2 if self.slots else 0} - {self.layout}:
            yield LAYOUTS[layout], self._replace(layout=layout)
        if self.slots:
            for slots in {*range(1, 1 + min(experts, MOST_SLOTS))} - {self.slots}:
                yield f"{slots} slots", self._replace(slots=slots)
            yield "tokens alone", ProjectionCall(slots=0)


PROJECTION_CALLS = (
    *(ProjectionCall(2, swap, layout) for swap in (False, True) for layout in (0, 1, 2)),
    ProjectionCall(0),
)
