"""Finds which forward of a module autograd recomputes, so that it draws the same random bits again.

Autograd recomputes a forward in two ways:

    a function    a torch.autograd.Function runs layers under no_grad in its forward, and again in
                  its backward: checkpoints with use_reentrant=True, tiled MLPs, reversible blocks.
                  The node of its backward has the number that its forward had.
    a block       backward reads a saved tensor of a block that was not kept, and the block's
                  forward runs again: checkpoints with use_reentrant=False. It begins in a node of
                  the block.

Autograd numbers the nodes of each thread in the order of their creation. So a record of a forward
has the thread, the number of the next node, and the numbers of the functions around the forward.
That identifies the forward when it runs again.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ..._native import ops
from ...private_torch import (
    backward_id,
    compile_within_alone,
    current_node,
    engine,
    next_node_number,
    saved_tensor_hooks,
)

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])
FORWARDS_IN_FLIGHT = 256  # recorded forwards of one layer, which autograd may recompute
FORWARD = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
BACKWARD = BackwardCFunction.apply.__code__


def eager_alone(function: FunctionT) -> FunctionT:
    """Lets compiled code contain this function, and never be the function alone.

    torch compiles a hook of a compiled module as a function of its own. In it no draw could be
    recorded, and a checkpointed call could not be recomputed. And once torch has found no operation
    in a function, as in a hook that does nothing in evaluation, it skips the function for good.

    The function has no comprehension, whose code torch compiles by itself.
    """
    compile_within_alone(function.__code__)
    return function


@eager_alone
def functions_around() -> tuple[int, ...]:
    """Returns the numbers of the autograd functions whose forwards this thread runs now.

    Those whose backward passes may follow: under no_grad, or of inputs without gradients, none may.
    Walks up the stack to each call of torch.autograd.Function.apply. The first argument of the
    forward that it calls is the context, which has the number. A forward that has a setup_context
    beside it gets no context: its number is that of the node that this thread made last.
    """
    found: list[int] = []
    frame, inner = sys._getframe(1), None
    while frame is not None and frame.f_code is not BACKWARD:
        if frame.f_code is FORWARD and inner is not None:
            first: Any = inner.f_locals.get((*inner.f_code.co_varnames, "")[0])
            if isinstance(first, tuple):  # *args of a decorator
                first = first[0] if first else None
            if isinstance(first, BackwardCFunction):
                if first.next_functions:  # else no input needs a gradient: it has no backward
                    found.append(first._sequence_nr())
            else:
                found.append(next_node_number() - 1)
        frame, inner = frame.f_back, frame  # type: ignore[assignment]
    return tuple(found)


@eager_alone
def repeats_counted_forward() -> bool:
    """Tells whether a forward now recomputes one that ran with gradients enabled.

    torch's checkpoint computes saved tensors of a block again under hooks for saved tensors. An
    autograd function ran its forward without gradients.
    """
    if backward_id() == -1:
        return False
    return saved_tensor_hooks(True) is not None


class Forward:
    """One forward of a module.

    Args:
        rng: int64 (2), its seed and count.
        thread: that ran it, as autograd numbers threads.
        functions: the numbers of the autograd functions around it.
    """

    __slots__ = ("functions", "number", "rng", "thread")

    @eager_alone
    def __init__(self, rng: Tensor, thread: int, functions: tuple[int, ...]) -> None:
        self.rng, self.thread, self.functions = rng, thread, functions
        self.number: int = next_node_number()  # of the thread's next node


class Draws:
    """Records one module's forwards: (seed, count) of each, and its position among nodes."""

    def __init__(self) -> None:
        self.past: deque[Forward] = deque(maxlen=FORWARDS_IN_FLIGHT)

    def __reduce__(self) -> tuple[object, ...]:
        return Draws, ()  # a copied layer has no recorded forwards

    @eager_alone
    def record(self, rng: Tensor, thread: int, functions: tuple[int, ...] = ()) -> None:
        """Records a forward of this thread."""
        self.past.append(Forward(rng, thread, functions))

    @eager_alone
    def within(self, thread: int, function: int) -> list[Forward]:
        """Returns the forwards that ran within an autograd function, in their order.

        Raises:
            RuntimeError: some of them are no longer recorded.
        """
        found = []
        past = self.past.copy()  # other threads may append
        for forward in past:
            if forward.thread == thread and function in forward.functions:
                found.append(forward)
        if found and len(past) == FORWARDS_IN_FLIGHT and found[0] is past[0]:
            raise self.too_many()
        return found

    @eager_alone
    def since(self, thread: int, number: int) -> list[Forward]:
        """Returns the forwards of a thread from a place in autograd's order on."""
        found = []
        for forward in self.past.copy():
            if forward.thread == thread and forward.number >= number:
                found.append(forward)
        return found

    @eager_alone
    def last_before(self, thread: int, number: int) -> int | None:
        """Returns the number of the last forward before a node. None: no forward is recorded.

        Raises:
            RuntimeError: it is no longer recorded.
        """
        past = self.past.copy()
        for forward in reversed(past):
            if forward.thread == thread and forward.number <= number:
                return forward.number
        if len(past) == FORWARDS_IN_FLIGHT:
            raise self.too_many()
        return None

    @staticmethod
    def too_many() -> RuntimeError:
        return RuntimeError(
            f"linear: expected at most {FORWARDS_IN_FLIGHT} forwards of one layer between a "
            "checkpointed forward and its recomputation, got more: its random bits are gone"
        )


class Replay:
    """The forwards that autograd recomputes now, in the order in which they first ran.

    A module that was called several times draws the bits of its first call, then of its second.

    Args:
        thread: that ran the forwards, as autograd numbers threads.
        number: of the autograd function that ran them, or of the first forward of a block.
        is_function: whether a function ran them.
    """

    @eager_alone
    def __init__(self, thread: int, number: int, is_function: bool) -> None:
        self.thread, self.number, self.is_function = thread, number, is_function
        self.rest: dict[Draws, list[Forward]] = {}  # what is left to draw, the next one last

    @eager_alone
    def next(self, draws: Draws) -> Tensor | None:
        """Returns the random bits of a module's next forward; None: it was not recorded."""
        if draws not in self.rest:
            find = draws.within if self.is_function else draws.since
            self.rest[draws] = find(self.thread, self.number)[::-1]
        rest = self.rest[draws]
        if not rest:
            return None
        rng = rest.pop().rng
        if self.is_function:
            self.record_again(draws, rng)
        return rng

    @eager_alone
    def record_again(self, draws: Draws, rng: Tensor) -> None:
        """Records a recomputed forward where a function or block around it is recomputed in turn.

        Those are new in autograd's order, and so is the thread on a GPU.
        """
        functions = () if torch.is_grad_enabled() else functions_around()
        if functions or saved_tensor_hooks(True) is not None:
            draws.record(rng, ops.autograd_threads.default()[0], functions)


class Replays:
    """The autograd functions that backward passes recompute now."""

    def __init__(self) -> None:
        self.of_functions: dict[tuple[int, int, int], Replay] = {}

    def _forget(self, key: tuple[int, int, int]) -> None:
        del self.of_functions[key]

    @eager_alone
    def find(self, draws: Draws) -> Replay | None:
        """Finds what the node whose backward pass runs now recomputes; None: nothing.

        A function may call a module again and again, as tiled MLPs do with slices of their input.
        So its replay is kept until the backward pass ends.

        draws: of the module that is called.
        """
        node = current_node()
        if node is None or not draws.past:
            return None
        number = node._sequence_nr()
        _, thread = ops.autograd_threads.default()
        key = backward_id(), thread, number
        replay = self.of_functions.get(key)
        is_function = isinstance(node, BackwardCFunction)
        if replay is None and is_function and draws.within(thread, number):
            replay = self.of_functions[key] = Replay(thread, number, is_function=True)
            engine.queue_callback(partial(self._forget, key))
        if replay is not None:
            return replay
        start = draws.last_before(thread, number)
        return None if start is None else Replay(thread, start, is_function=False)
