"""Quantized operands as tensors: casts, products, and the tensor subclass that holds codes."""

from . import dispatch as _dispatch  # registers the ops of QuantizedTensor
from .quantized_tensor import QuantizedTensor, _rebuild_tensor

__all__ = ["QuantizedTensor", "_rebuild_tensor"]
