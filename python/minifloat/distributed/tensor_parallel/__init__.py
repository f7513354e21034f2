"""Tensor parallelism: of linear layers, of experts along their hidden width, and of pure ops.

Importing this package registers the sharding rules of the pure ops with DTensor.
"""

from .dtensor import QuantizedColwiseParallel
from .experts import cut_along_width

__all__ = ["QuantizedColwiseParallel", "cut_along_width"]
