"""Tests of codes cast from the shards of master weights."""
