"""The handlers of ops on a QuantizedTensor, which dispatch.py registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload

Op = OpOverload[..., Any]
Handler = Callable[..., Any]
OTHERS = "others"  # the key of the handler of all ops that have none
HANDLERS: dict[object, Handler] = {}


def handles(*funcs: object) -> Callable[[Handler], Handler]:
    """Registers a handler of these ops. It may return NotImplemented, to run on the values."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(funcs, handler))
        return handler

    return register
