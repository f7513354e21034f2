"""Compare the tag of a release with the project's version, and with the changelog's first heading.

usage: check_tag.py TAG

The tag v1.2.3 is right where CMakeLists.txt has `project(minifloat VERSION 1.2.3` and CHANGELOG.md
begins with `## 1.2.3 - DATE`, DATE as 2026-12-31.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def find_problems(tag: str, version: str, changelog: str) -> Iterator[str]:
    """Yield one line for each thing that does not fit the tag."""
    if tag != f"v{version}":
        yield f"expected the tag v{version} of the version in CMakeLists.txt, got {tag!r}"
    heading = next(iter(re.findall(r"^## .*$", changelog, re.MULTILINE)), "none")
    if not re.fullmatch(rf"## {re.escape(version)} - \d{{4}}-\d\d-\d\d", heading):
        yield f"CHANGELOG.md: expected the first heading '## {version} - DATE', got {heading!r}"


def main() -> int:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    package = ROOT / "python" / "minifloat"
    version = runpy.run_path(str(package / "_version.py"))["read_version"](package)
    problems = list(find_problems(sys.argv[1], version, (ROOT / "CHANGELOG.md").read_text()))
    for problem in problems:
        print(f"check_tag: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
