"""Records of which random bits a module drew in which forward, for autograd's recomputation."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

FORWARDS_IN_FLIGHT = 256  # recorded forwards of one layer, which autograd may recompute


def is_in_backward() -> bool:
    """Tells whether autograd runs a backward pass in this thread."""
    return torch._C._current_graph_task_id() != -1


class Draws:
    """A record of one module's forwards: their random bits and places in autograd's order."""

    def __init__(self) -> None:
        self.last: Tensor | None = None  # RngState.current of the last forward
        self.past: deque[tuple[int, Tensor]] = deque(maxlen=FORWARDS_IN_FLIGHT)

    def __reduce__(self) -> tuple[object, ...]:
        return Draws, ()  # a copied layer has no recorded forwards

    def record(self, current: Tensor, rng: Tensor) -> None:
        """Records a forward: the state's `current`, and the same bits on the module's device."""
        self.last = current
        self.past.append((torch._C._autograd._get_sequence_nr(), rng))

    def repeated(self) -> tuple[int, Tensor] | None:
        """Finds the forward that autograd recomputes now.

        Autograd numbers its nodes in the order of their creation. Recomputation begins in the node
        that first reads a saved tensor of the checkpointed block: a node with a number after the
        layer's. With `use_reentrant=True` it begins in the checkpoint's node, with a number before.

        Returns:
            Its place in autograd's order, and (seed, count). None: no recorded forward.
        """
        node = torch._C._current_autograd_node()
        if node is None or not self.past:
            return None
        at = node._sequence_nr()
        if "Checkpoint" in type(node).__name__:
            for forward in self.past:
                if forward[0] > at:
                    return forward
            return None
        for forward in reversed(self.past):
            if forward[0] <= at:
                return forward
        if len(self.past) == FORWARDS_IN_FLIGHT:
            raise RuntimeError(
                f"linear: expected at most {FORWARDS_IN_FLIGHT} forwards of one layer between a "
                "checkpointed forward and its recomputation, got more: its random bits are gone"
            )
        return None


class Replay:
    """A call of a hooked module that autograd recomputes.

    The modules in it draw in the order of the original call, which began at `start` in autograd's
    order. So a module that it calls twice draws the bits of its first call, then of its second.
    """

    def __init__(self, start: int) -> None:
        self.start = start
        self.rest: dict[Draws, list[Tensor]] = {}  # what is left to draw, the next one last

    def next(self, draws: Draws) -> Tensor | None:
        """Returns the random bits of a module's next forward; None: it was not recorded."""
        if draws not in self.rest:
            self.rest[draws] = []
            for at, rng in reversed(draws.past):
                if at >= self.start:
                    self.rest[draws].append(rng)
        rest = self.rest[draws]
        return rest.pop() if rest else None
