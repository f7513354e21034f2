"""The package's dependencies: torch at the X.Y that the native library is being compiled against,
and of a build with CUDA the headers that its kernels need.

A metadata provider of scikit-build-core ([tool.scikit-build.metadata] in pyproject.toml), called in
the build environment. libtorch promises no binary compatibility between X.Y and X.Z, and loading
checks it, so a wheel asks for the torch that it was built with:

    pip install .                        torch of [build-system] requires
    pip install --no-build-isolation .   the torch already installed, 2.11 or newer

Beside nvcc pip also fetches the group cuda of pyproject.toml into the build environment:
[build-system] requires cannot depend on nvcc.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # scikit-build-core needs it there

MINIMUM = (2, 11)
PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def has_cuda() -> bool:
    """Returns whether CMake will find nvcc. Where this misses one, the build ends with an error."""
    if "MINIFLOAT_CUDA=OFF" in os.environ.get("CMAKE_ARGS", ""):
        return False
    folder = os.environ.get("CUDA_PATH")
    return bool(
        os.environ.get("CUDACXX")
        or shutil.which("nvcc")
        or (folder and shutil.which("nvcc", path=f"{folder}/bin"))
    )


def get_requires_for_dynamic_metadata(_settings: Mapping[str, Any]) -> list[str]:
    """Returns what the build environment needs beside [build-system] requires."""
    if not has_cuda():
        return []
    groups: dict[str, list[str]] = tomllib.loads(PROJECT.read_text())["dependency-groups"]
    return groups["cuda"]


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
