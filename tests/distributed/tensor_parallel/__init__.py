"""Tests of layers that torch's parallel styles shard."""
