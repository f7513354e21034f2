"""The Python tests, laid out as python/minifloat is."""
