"""Tests of the CUDA backend against the CPU's bytes.

    make test-gpu                         on a machine with a CUDA device
    pytest tests/gpu --device cpu         the CPU against itself: tests the tests

Without a CUDA device they are skipped, and the skip says so.
"""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device") != "cuda" or torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="gpu: torch sees no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)


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
