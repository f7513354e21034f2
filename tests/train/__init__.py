"""Tests of `minifloat train`."""
