"""Tests of the operators themselves: what they refuse, and which engine multiplies."""
