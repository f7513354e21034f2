"""Conversion of a model: mf.quantize_, mf.restore_, what they choose, and the report."""
