"""Tensor parallelism: QuantizedColwiseParallel, cut_along_width of experts, and the sharding rules
of the pure ops.

Importing this package registers the rules with DTensor.
"""

from ...moe.ranks.width import cut_along_width
from .dtensor import QuantizedColwiseParallel

__all__ = ["QuantizedColwiseParallel", "cut_along_width"]
