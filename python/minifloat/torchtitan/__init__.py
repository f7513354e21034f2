"""minifloat in torchtitan: a model converter for 0.2.x, an override for 0.3.x.

0.2.x: --job.custom_config_module=minifloat.torchtitan --model.converters=minifloat
       --minifloat.recipe=fp8_rowwise
0.3.x: --override.imports 'minifloat.torchtitan.override.quantize={"recipe": "fp8_rowwise"}'

docs/torchtitan.md says how both are used, and what works with what.
"""

import importlib.metadata

import torch

from .shared import Minifloat

CONVERTER, OVERRIDE = "0.2", "0.3"  # versions of torchtitan
OLDEST_TORCH = {CONVERTER: [2, 11], OVERRIDE: [2, 12]}
EXPECTED = "torchtitan 0.2.x with torch 2.11 or later, or 0.3.x with torch 2.12 or later"


def require_version() -> str:
    """Returns CONVERTER or OVERRIDE, whichever torchtitan is installed.

    Raises:
        ImportError: torchtitan is not installed, or it or torch is of another version.
    """
    try:
        installed = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError(f"minifloat.torchtitan: expected {EXPECTED}, got none") from error
    found, own = ".".join(installed.split(".")[:2]), torch.__version__.split(".")[:2]
    if found not in OLDEST_TORCH or [*map(int, own)] < OLDEST_TORCH[found]:
        raise ImportError(
            f"minifloat.torchtitan: expected {EXPECTED}, got torchtitan {installed} with torch "
            f"{torch.__version__}"
        )
    return found


if require_version() == CONVERTER:
    from .converter import Converter, JobConfig

    __all__ = ["Converter", "JobConfig", "Minifloat"]
else:
    from .override import quantize

    __all__ = ["Minifloat", "quantize"]
