"""The versions of torchtitan that minifloat.torchtitan works with."""

from __future__ import annotations

import importlib.metadata

import torch

CONVERTER, OVERRIDE = (0, 2), (0, 3)  # (major, minor): a model converter, an override
OLDEST_TORCH = {CONVERTER: (2, 11), OVERRIDE: (2, 12)}
EXPECTED = "torchtitan 0.2.x with torch 2.11 or later, or 0.3.x with torch 2.12 or later"


def require_version() -> tuple[int, int]:
    """Finds the installed torchtitan.

    Returns:
        (major, minor), CONVERTER or OVERRIDE.

    Raises:
        ImportError: torchtitan is not installed, or it or torch is of another version.
    """
    try:
        installed = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"minifloat.torchtitan: expected {EXPECTED}, got none") from error
    found = version_of(installed)
    is_new_enough = version_of(torch.__version__) >= OLDEST_TORCH.get(found, (0, 0))
    if found not in OLDEST_TORCH or not is_new_enough:
        raise ImportError(
            f"minifloat.torchtitan: expected {EXPECTED}, got torchtitan {installed} with torch "
            f"{torch.__version__}"
        )
    return found


def version_of(text: str) -> tuple[int, int]:
    """Returns (major, minor) of a version; (-1, -1) of a text that is none."""
    numbers = text.split(".")[:2]
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        return -1, -1
    return int(numbers[0]), int(numbers[1])
