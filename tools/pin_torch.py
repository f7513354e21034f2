"""The package's dependencies: torch at the X.Y that the native library is being compiled against.

A metadata provider of scikit-build-core ([tool.scikit-build.metadata] in pyproject.toml), called in
the build environment. libtorch promises no binary compatibility between X.Y and X.Z, and loading
checks it, so a wheel asks for the torch that it was built with:

    pip install .                        torch of [build-system] requires
    pip install --no-build-isolation .   the torch already installed, 2.11 or newer
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

MINIMUM = (2, 11)


def dynamic_metadata(field: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the requirements; `settings["others"]` are those that do not depend on the build."""
    if field != "dependencies":
        raise RuntimeError(f"pin_torch: expected the field dependencies, got {field}")
    try:
        found = version("torch")
    except PackageNotFoundError:
        raise RuntimeError(
            "pin_torch: expected torch in the build environment, found none; "
            "install torch first, or build without --no-build-isolation"
        ) from None
    major, minor = found.split(".")[:2]
    if (int(major), int(minor)) < MINIMUM:
        raise RuntimeError(f"pin_torch: expected torch 2.11 or newer, found {found}")
    return [f"torch=={major}.{minor}.*", *settings.get("others", [])]
