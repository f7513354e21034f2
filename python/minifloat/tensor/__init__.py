"""Quantized operands as tensors: casts, products, and the tensor subclass that holds codes."""

from . import dispatch as _dispatch  # registers the ops of QuantizedTensor
from .quantized import Quantized, amax, dequantize, quantize
from .scaled_mm import scaled_mm
from .transforms import (
    check_groups,
    group_table,
    hadamard,
    swizzle_scales,
    transpose_codes,
    unswizzle_scales,
)

__all__ = [
    "Quantized",
    "amax",
    "check_groups",
    "dequantize",
    "group_table",
    "hadamard",
    "quantize",
    "scaled_mm",
    "swizzle_scales",
    "transpose_codes",
    "unswizzle_scales",
]
