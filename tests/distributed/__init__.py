"""Tests of several processes."""
