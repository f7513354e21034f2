"""The native library for the running torch.

lib/libminifloat_torch_X.Y.so   the operators torch.ops.minifloat.*, built against torch X.Y
lib/libminifloat.so             the kernels that the operators call; loaded from the same folder
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import torch

from ._version import __version__
from .private_torch import tag_compiled_code

FOLDER = Path(__file__).parent / "lib"
PREFIX = "libminifloat_torch_"


def torches(folder: Path = FOLDER) -> list[str]:
    """Lists each torch X.Y for which the folder has a library, from the oldest."""
    found = [library.stem.removeprefix(PREFIX) for library in folder.glob(f"{PREFIX}*.so")]
    return sorted(found, key=lambda version: [int(part) for part in version.split(".")])


def load(folder: Path = FOLDER, torch_version: str = torch.__version__) -> None:
    """Registers the operators that were built for torch X.Y: "2.11" for 2.11.0+cu130.

    Raises:
        ImportError: no library is there, none for this torch, or it does not load.
    """
    path = folder / f"{PREFIX}{'.'.join(torch_version.split('.')[:2])}.so"
    if not path.exists():
        found = torches(folder)
        if not found:
            raise ImportError(
                f"minifloat: expected the native library {path}, found none; build it with `make "
                "build` in the source tree, or install the package with `pip install .` there"
            )
        raise ImportError(
            f"minifloat: expected torch {' or '.join(found)}, for which this package was built, "
            f"got {torch_version}; build it for this torch, in the source tree: `pip install "
            "scikit-build-core cmake ninja && pip install --no-build-isolation .`; where nvcc is, "
            "`pip install --no-deps --group cuda` first"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        cause = error.__cause__ or error
        raise ImportError(
            f"minifloat: {path} does not load under torch {torch_version} ({cause})"
        ) from error
    tag_compiled_code(tag_of(path))


def tag_of(library: Path) -> str:
    """Names a build of the operators: torch reads no compiled code that another build wrote."""
    return f"minifloat-{__version__}-{sha256(library.read_bytes()).hexdigest()[:16]}"


load()
ops = torch.ops.minifloat
