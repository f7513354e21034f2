"""Quantized weights from masters that ZeRO shards over ranks."""
