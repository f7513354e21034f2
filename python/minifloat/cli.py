"""The command `minifloat`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from minifloat.train import command as train_command
from minifloat.train import interrupt
from minifloat.train.checks import TrainError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `minifloat ARGV`.

    Returns:
        The exit code. 1: an expected failure, 2: wrong usage, 130: interrupted.
    """
    try:
        with interrupt.handled(by=signal.default_int_handler):  # which raises it
            return run_command(argv)
    except KeyboardInterrupt:
        print("minifloat: interrupted", file=sys.stderr)
        return interrupt.INTERRUPTED


class PrintCmakePrefix(argparse.Action):
    """Prints the folder of the installed package, and ends."""

    def __init__(self, **arguments: object) -> None:
        super().__init__(nargs=0, **arguments)  # type: ignore[arg-type]

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        prefix = Path(__file__).parent
        config = prefix / "lib/cmake/minifloat/minifloatConfig.cmake"
        if not config.exists():  # a source tree, whose package `cmake --install` makes
            parser.exit(
                1,
                f"minifloat: error: expected an installed package with {config}, found none; "
                "use `pip install .`, or `cmake --install build/default --prefix DIR`\n",
            )
        print(prefix)
        parser.exit()


def run_command(argv: Sequence[str] | None) -> int:
    """Parses ARGV and runs its command; an expected failure is one message and exit code 1."""
    for stream in (sys.stdout, sys.stderr):  # a file name, or ×, must not end a job
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(
        prog="minifloat", description="Training in 8- and 4-bit floating point."
    )
    parser.add_argument(
        "--cmake-prefix",
        action=PrintCmakePrefix,
        help="print what CMAKE_PREFIX_PATH needs for find_package(minifloat)",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train_command.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    try:
        return train_command.run(arguments)
    except (TrainError, OSError) as error:
        print(f"minifloat {arguments.command}: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
