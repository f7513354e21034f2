"""Ctrl-C while a command of this package imports what it needs: one line, exit code 130.

Importing torch takes seconds, and an interrupt in them would print torch's own frames. Nothing is
to be tidied up then, so the process ends at once.

`minifloat/__init__.py` imports this module before all others: `minifloat` and `python -m minifloat`
both import the package before any line of theirs runs. What comes before that import, the start of
Python itself, is out of reach (some 20 ms; Python ends with a traceback of its own there).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INTERRUPTED = 130  # exit code


def end(signum: int, frame: object) -> None:
    """Ends the process without a traceback."""
    os.write(2, b"minifloat: interrupted\n")
    os._exit(INTERRUPTED)


@contextmanager
def handler(wanted: Any) -> Iterator[None]:
    """Handles Ctrl-C by `wanted` for a while, unless the caller ignores it or has its own way."""
    before = signal.getsignal(signal.SIGINT)
    if before not in (end, signal.default_int_handler):
        yield
        return
    signal.signal(signal.SIGINT, wanted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def ends_the_process() -> Any:
    """Returns a context in which Ctrl-C ends the process at once: for imports."""
    return handler(end)


def raises() -> Any:
    """Returns a context in which Ctrl-C raises KeyboardInterrupt, whatever it does outside."""
    return handler(signal.default_int_handler)


def is_the_command() -> bool:
    """Tells whether this process is `minifloat` or `python -m minifloat`."""
    if sys.argv[:1] == ["-m"]:  # Python imports the package before it sets the module's path
        words = sys.orig_argv[1:]
        at = next((i for i, word in enumerate(words) if word.startswith("-m")), len(words))
        module = "".join(words[at : at + 2]) if words[at : at + 1] == ["-m"] else words[at]
        return module.removeprefix("-m") in ("minifloat", "minifloat.cli", "minifloat.__main__")
    return bool(sys.argv) and os.path.basename(sys.argv[0]) == "minifloat"


if is_the_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end)
