"""Tests of weights that FSDP2 gathers as codes."""
