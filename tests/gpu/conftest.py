"""Tests of the CUDA backend against the CPU's bytes.

    make test-gpu                         on a machine with a CUDA device
    pytest tests/gpu --device cpu         the CPU against itself: tests the tests

Without a CUDA device they are not collected, and the summary says so.
"""

from __future__ import annotations

import pytest
import torch

from tests.conftest import lacks_device


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    return True if lacks_device(config) else None


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Returns the device under test."""
    name = request.config.getoption("--device")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """Returns the device under test, for streams, graphs and synchronisation of CUDA."""
    if device.type != "cuda":
        pytest.skip("streams, graphs and synchronisation are CUDA's")
    return device
