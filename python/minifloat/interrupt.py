"""Ctrl-C while a command of this package imports what it needs: one line, exit code 130.

Importing torch takes seconds, and an interrupt during the import would print torch's frames. No
work is lost then, so the process ends at once.

`minifloat/__init__.py` imports this module before all others: `minifloat` and `python -m minifloat`
both import the package first. Python itself starts in 20 to 50 ms, and Ctrl-C in that time still
prints a traceback. This module imports little, so that its handler is set early.
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130  # exit code


def end(signum: int, frame: object) -> None:
    """Ends the process without a traceback."""
    os.write(2, b"minifloat: interrupted\n")
    os._exit(INTERRUPTED)


def is_the_command() -> bool:
    """Tells whether this process is `minifloat` or `python -m minifloat`."""
    if sys.argv[:1] == ["-m"]:  # Python imports the package before it sets the module's path
        args = sys.orig_argv[1:]
        at = next((i for i, arg in enumerate(args) if arg.startswith("-m")), len(args))
        module = "".join(args[at : at + 2] if args[at : at + 1] == ["-m"] else args[at : at + 1])
        return module in ("-mminifloat", "-mminifloat.cli", "-mminifloat.__main__")
    return bool(sys.argv) and os.path.basename(sys.argv[0]) == "minifloat"


class Handled:
    """A context in which `wanted` handles Ctrl-C, unless the caller ignores or handles it."""

    def __init__(self, wanted: object) -> None:
        self.wanted, self.before = wanted, signal.getsignal(signal.SIGINT)

    def __enter__(self) -> None:
        if self.before in (end, signal.default_int_handler):
            signal.signal(signal.SIGINT, self.wanted)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        if self.before in (end, signal.default_int_handler):
            signal.signal(signal.SIGINT, self.before)


def ends_the_process() -> Handled:
    """Returns a context in which Ctrl-C ends the process at once: for imports."""
    return Handled(end)


def raises() -> Handled:
    """Returns a context in which Ctrl-C raises KeyboardInterrupt, whatever it does outside."""
    return Handled(signal.default_int_handler)


if is_the_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, end)
