"""Ctrl-C while a command of this package imports what it needs: one line, exit code 130.

Importing torch takes seconds, and an interrupt during the import would print torch's frames. No
work is lost then, so the process ends at once.

`minifloat/__init__.py` imports this module before all others: `minifloat` and `python -m minifloat`
both import the package first. Python itself starts in 20 to 50 ms, and Ctrl-C in that time still
prints a traceback. This module imports little, so that its handler is set early.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130  # exit code


def end(signum: int, frame: object) -> None:
    """Ends the process without a traceback."""
    os.write(2, b"minifloat: interrupted\n")
    os._exit(INTERRUPTED)


def is_the_command() -> bool:
    """Tells whether this process is `minifloat` or `python -m minifloat`."""
    if sys.argv[:1] == ["-m"]:  # Python imports the package before it sets the module's path
        args = iter(sys.orig_argv[1:])
        module = next((arg[2:] for arg in args if arg.startswith("-m")), "") or next(args, "")
        return module in ("minifloat", "minifloat.cli", "minifloat.__main__")
    return bool(sys.argv) and os.path.basename(sys.argv[0]) == "minifloat"


def in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def handled(by: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Makes `by` handle Ctrl-C inside, unless the caller ignores or handles it.

    Python sets handlers in the main thread alone: in another thread the main one keeps its own.
    """
    before = signal.getsignal(signal.SIGINT)
    is_free = before in (end, signal.default_int_handler) and in_main_thread()
    if is_free:
        signal.signal(signal.SIGINT, by)
    try:
        yield
    finally:
        if is_free:
            signal.signal(signal.SIGINT, before)


if is_the_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end)
