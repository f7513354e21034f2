"""Records of which random bits a module drew in which forward, for autograd's recomputation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., object])
FORWARDS_IN_FLIGHT = 256  # recorded forwards of one layer, which autograd may recompute


def eager_alone(function: Function) -> Function:
    """Lets compiled code contain this function, and never be the function alone.

    torch compiles a hook of a compiled module as a function of its own. In it no draw could be
    recorded, and a checkpointed call could not be recomputed. And once torch has found no operation
    in a function, as in a hook that does nothing in evaluation, it skips the function for good.

    The function has no comprehension, whose code torch compiles by itself.
    """
    dynamo = torch._C._dynamo.eval_frame  # torch._dynamo itself takes seconds to import
    alone, called = dynamo._FrameAction.SKIP, dynamo._FrameAction.DEFAULT
    strategy = dynamo._FrameExecStrategy(alone, called)
    dynamo.set_code_exec_strategy(function.__code__, strategy)
    return function


@eager_alone
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

    @eager_alone
    def record(self, current: Tensor, rng: Tensor) -> None:
        """Records a forward: the state's `current`, and the same bits on the module's device."""
        self.last = current
        self.past.append((torch._C._autograd._get_sequence_nr(), rng))

    @eager_alone
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

    @eager_alone
    def __init__(self, start: int) -> None:
        self.start = start
        self.rest: dict[Draws, list[Tensor]] = {}  # what is left to draw, the next one last

    @eager_alone
    def next(self, draws: Draws) -> Tensor | None:
        """Returns the random bits of a module's next forward; None: it was not recorded."""
        if draws not in self.rest:
            self.rest[draws] = []
            for at, rng in reversed(draws.past):
                if at >= self.start:
                    self.rest[draws].append(rng)
        rest = self.rest[draws]
        return rest.pop() if rest else None
