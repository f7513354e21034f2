"""Tests of python/minifloat/serving, with readers of its folders: the group `clients`."""
