"""Quantized operands as tensors: casts, products, and the tensor subclass that holds codes."""

from . import dispatch as _dispatch  # registers the ops of QuantizedTensor
