"""Print the requirements of `make setup` that this machine lacks, before an installation."""

from __future__ import annotations

import shutil
import sys

MINIMUM = (3, 10)


def find_problems() -> list[str]:
    """Return one line for each thing that is missing."""
    problems = []
    if sys.version_info[:2] < MINIMUM:
        expected = ".".join(map(str, MINIMUM))
        problems.append(
            f"expected Python {expected} or newer, found {sys.version.split()[0]} "
            "(make PYTHON=... chooses another)"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        problems.append(
            f"expected Python's venv with ensurepip, {error} "
            "(Debian and Ubuntu: apt install python3-venv)"
        )
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        problems.append(
            "expected a C++20 compiler, found no c++, g++ or clang++ "
            "(Debian and Ubuntu: apt install g++)"
        )
    return problems


def main() -> int:
    problems = find_problems()
    for problem in problems:
        print(f"setup: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
