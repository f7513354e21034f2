"""Operands that are kept between reads: a weight's codes, an input that siblings share."""
