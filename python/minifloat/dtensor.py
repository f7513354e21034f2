"""Tensor parallelism: QuantizedColwiseParallel, cut_along_width of experts, and the sharding rules
of the pure ops.

Importing this module registers the rules with DTensor.
"""

from .distributed.tensor_parallel.dtensor import QuantizedColwiseParallel
from .moe.cut_experts import cut_along_width

__all__ = ["QuantizedColwiseParallel", "cut_along_width"]
