"""The native library, loaded and checked against the running torch.

lib/libminifloat_torch.so   the operators torch.ops.minifloat.*, built against one torch X.Y
lib/libminifloat.so         the kernels that the operators call; loaded from the same folder
"""

from __future__ import annotations

from pathlib import Path

import torch

LIBRARY = Path(__file__).parent / "lib" / "libminifloat_torch.so"


def load(path: Path = LIBRARY) -> None:
    """Registers the operators.

    Raises:
        ImportError: the library is missing, or was built against another torch.
    """
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
    """Checks that two torch versions have the same X.Y: 2.11 and 2.11.0+cu130 do."""
    if built_for.split(".")[:2] != running.split(".")[:2]:
        raise ImportError(
            f"minifloat: the native library was built for torch {built_for}, this is torch "
            f"{running}; rebuild it with this torch"
        )


load()
ops = torch.ops.minifloat
