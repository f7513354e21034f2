"""Tests of quantized operands: casts, products, and the tensor subclass that holds codes."""
