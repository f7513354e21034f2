"""The package's version. Its one number is in CMakeLists.txt; a build copies it into metadata."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent  # of the sources, where this file is a link to one


def read_version(package: Path = PACKAGE) -> str:
    """Returns the version: of a source tree its CMakeLists.txt's, else the installed package's."""
    build = package.parents[1] / "CMakeLists.txt"
    text = build.read_text(encoding="utf-8") if build.is_file() else ""
    found = re.search(r"project\(minifloat VERSION ([0-9.]+)", text)
    return found[1] if found else metadata.version("minifloat")


__version__ = read_version()
