"""Tensor parallelism: QuantizedColwiseParallel, and the sharding rules of the pure ops.

Importing this module registers the rules with DTensor.
"""

from .distributed.tensor_parallel.dtensor import QuantizedColwiseParallel

__all__ = ["QuantizedColwiseParallel"]
