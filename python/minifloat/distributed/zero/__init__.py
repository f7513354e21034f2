"""Quantized weights from sharded masters, as ZeRO keeps them."""
