"""Tests with other libraries: the group `clients` of pyproject.toml."""
