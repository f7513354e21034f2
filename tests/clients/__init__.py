"""Tests with other libraries: what requirements-clients.txt lists."""
