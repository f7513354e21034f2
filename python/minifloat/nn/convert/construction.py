"""Construction of converted layers: mf.nn.quantized_model_init.

A layer is converted at the end of nn.Linear.__init__, so that memory never holds two weights in
high precision. The method is replaced while any thread is in such a statement, and converts the
layers of the statements that it is called in:

    thread          of the statement alone
    asyncio task    of the statement, and tasks that it starts there: by a ContextVar
    generator       only while it runs. One that contextlib made a context manager is suspended in
                    the statement by design: its caller is in the statement.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from itertools import count
from types import FrameType
from typing import Any

from torch import nn

from ...checks import require_bool, require_int
from ...recipe import Recipe
from ..linear import adopt, make_primary, reason_against_recipe
from ..state.model_state import share_random_state
from .fast_paths import disable_fast_path

SUSPENDED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class Statement:
    """One `with mf.nn.quantized_model_init(…)`.

    Args:
        recipe: of its layers.
        keep_high_precision_init: whether to copy initial weights.
        seed: of stochastic rounding.
        frame: of the code that runs it.
    """

    def __init__(
        self, recipe: Recipe, keep_high_precision_init: bool, seed: int, frame: FrameType
    ) -> None:
        self.recipe, self.seed = recipe, seed
        self.keep_high_precision_init = keep_high_precision_init
        self.thread, self.ordinal, self.is_open = threading.get_ident(), count(), True
        self.frame = frame if frame.f_code.co_flags & SUSPENDED else None  # else it cannot leave

    def is_running(self) -> bool:
        """Tells whether the caller is within the statement."""
        if not self.is_open or self.thread != threading.get_ident():
            return False
        frame: FrameType | None = sys._getframe(1)
        while self.frame is not None and frame is not self.frame:
            if frame is None:
                return False
            frame = frame.f_back
        return True

    def convert(self, layer: nn.Linear) -> None:
        """Converts a layer whose __init__ has ended."""
        converted = adopt(layer, self.recipe, f"linear.{next(self.ordinal)}")
        make_primary(layer, ("weight",), self.recipe, self.keep_high_precision_init)
        share_random_state(layer, [converted], self.seed, None)
        disable_fast_path(layer)


CURRENT: ContextVar[Statement | None] = ContextVar("quantized_model_init", default=None)
LOCK = threading.Lock()  # of the count, and of nn.Linear.__init__
REPLACED = "_replaced_by_minifloat"  # of an nn.Linear.__init__: the one before
statements = 0  # that are open, of all threads


def replace_init(change: int) -> None:
    """Counts statements, and replaces nn.Linear.__init__ while there are any."""
    global statements
    with LOCK:
        statements += change
        current = nn.Linear.__init__
        before = getattr(current, REPLACED, None)
        if statements and before is None:
            nn.Linear.__init__ = init_of(current)  # type: ignore[method-assign]
        elif not statements and before is not None:
            nn.Linear.__init__ = before  # type: ignore[method-assign]


def init_of(original: Callable[..., None]) -> Callable[..., None]:
    """Returns an nn.Linear.__init__ that converts the layers of a running statement."""

    @wraps(original)
    def init(self: nn.Linear, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        statement = CURRENT.get()
        if type(self) is nn.Linear and statement is not None and statement.is_running():
            statement.convert(self)

    setattr(init, REPLACED, original)
    return init


def frame_of_statement() -> FrameType:
    """Returns the frame of the code that enters the caller, a generator of contextlib.

    Where that code is such a generator too, returns the frame that enters it.
    """
    frame = sys._getframe(1)
    library = contextlib.__file__
    while frame.f_back is not None:
        is_manager = frame.f_back.f_code.co_filename == library
        is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR
        if frame.f_code.co_filename != library and not (is_generator and is_manager):
            break
        frame = frame.f_back
    return frame


@contextmanager
def quantized_model_init(
    recipe: str | Recipe, *, keep_high_precision_init: bool = False, seed: int = 0
) -> Iterator[None]:
    """Builds each nn.Linear in a `with` statement as an mf.Linear with a quantized weight.

    Memory never holds the high-precision weights of more than one layer. Streams of random bits
    follow the order of construction, and each layer has a random state of its own: two statements
    that build one model need a seed each. Subclasses of nn.Linear, such as the out_proj of
    nn.MultiheadAttention, are not converted. Neither are layers that another thread builds
    meanwhile, nor those that a generator's caller builds while it is suspended in the statement.

    Args:
        recipe: of all layers.
        keep_high_precision_init: whether to keep each initial weight on the CPU, for
            weight.get_high_precision_init_val().
        seed: of stochastic rounding, 64 bits with sign.

    Returns:
        A context manager without a value.

    Raises:
        TypeError, ValueError: an argument is not as expected, the recipe reads the weight in high
            precision, or the call is inside another quantized_model_init.

    Example:
        >>> with mf.nn.quantized_model_init("mxfp8_2d"):
        ...     layer = torch.nn.Linear(64, 32)
        >>> layer
        Linear(in_features=64, out_features=32, bias=True, recipe='mxfp8_2d')
        >>> layer.weight.specs
        ('mxfp8/32x32', 'mxfp8/32x32')
    """
    recipe = Recipe(recipe)
    require_bool("keep_high_precision_init", keep_high_precision_init)
    require_int("seed", seed)
    if (why := reason_against_recipe(recipe)) is not None:
        raise ValueError(f"quantized_model_init: {why}")
    outer = CURRENT.get()
    if outer is not None and outer.is_running():
        raise ValueError("quantized_model_init: expected no other quantized_model_init around it")
    statement = Statement(recipe, keep_high_precision_init, seed, frame_of_statement())
    replace_init(1)
    CURRENT.set(statement)
    try:
        yield
    finally:
        statement.is_open = False  # in any context that has copied the variable
        if CURRENT.get() is statement:
            CURRENT.set(outer)
        replace_init(-1)
