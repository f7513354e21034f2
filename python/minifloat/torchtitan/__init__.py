"""minifloat in torchtitan: a model converter for 0.2.x, an override for 0.3.x.

0.2.x: --job.custom_config_module=minifloat.torchtitan --model.converters=minifloat
       --minifloat.recipe=fp8_rowwise
0.3.x: --override.imports 'minifloat.torchtitan.override.quantize={"recipe": "fp8_rowwise"}'

docs/torchtitan.md says how both are used, and what works with what.
"""

from .settings import Minifloat
from .version import CONVERTER, require_version

if require_version() == CONVERTER:
    from .converter import Converter, JobConfig

    __all__ = ["Converter", "JobConfig", "Minifloat"]
else:
    from .override import quantize

    __all__ = ["Minifloat", "quantize"]
