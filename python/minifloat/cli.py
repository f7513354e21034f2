"""`minifloat`: one subcommand a module, each of which adds its own parser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from minifloat.train import command as train_command
from minifloat.train.config import TrainError

COMMANDS = (train_command,)
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `minifloat ARGV`; returns the exit code (1: an expected failure, 2: wrong usage)."""
    parser = argparse.ArgumentParser(
        prog="minifloat", description="Training in 8- and 4-bit floating point."
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (TrainError, OSError) as error:
        print(f"minifloat {arguments.command}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"minifloat {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
