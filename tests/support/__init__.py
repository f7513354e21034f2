"""Oracles, worlds of several processes, exact sums, the op fuzzer and tiny models."""
