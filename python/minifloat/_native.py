"""The native library: found, loaded, and checked against the torch that runs.

lib/libminifloat_torch.so   the operators torch.ops.minifloat.*, built against one torch X.Y
lib/libminifloat.so         what they call; the loader finds it beside the first
"""

from __future__ import annotations

from pathlib import Path

import torch

LIBRARY = Path(__file__).parent / "lib" / "libminifloat_torch.so"


def release(version: str) -> str:
    """X.Y of a torch version: 2.11 of 2.11.0+cu130."""
    return ".".join(version.split("+")[0].split(".")[:2])


def load(path: Path = LIBRARY) -> None:
    """Registers the operators; ImportError where the library is missing or of another torch."""
    if not path.exists():
        raise ImportError(
            f"minifloat: expected the native library at {path}; build it with `make build` in the "
            "source tree, or install the package with `pip install .`"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        cause = error.__cause__ or error
        raise ImportError(
            f"minifloat: {path} does not load under torch {torch.__version__} ({cause}); it works "
            "with the torch X.Y that it was built against: rebuild it with this torch"
        ) from error
    require_torch(torch.ops.minifloat.built_for_torch(), torch.__version__)


def require_torch(built_for: str, running: str) -> None:
    if release(built_for) != release(running):
        raise ImportError(
            f"minifloat: the native library was built for torch {built_for}, this is torch "
            f"{running}; rebuild it with this torch"
        )


load()
ops = torch.ops.minifloat
