"""The tests of the CUDA backend: the CPU's bytes are what every device must give.

    make test-gpu                         on a machine with a CUDA device
    pytest tests/gpu --device cpu         the CPU against itself: tests the tests

Without a CUDA device they are skipped, and the skip says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# The tests of several processes that run on CPUs too.
sys.path.insert(0, str(Path(__file__).parents[1] / "python"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        default="cuda",
        choices=("cuda", "cpu"),
        help="what tests/gpu compares with the CPU (cpu: itself, which tests the tests)",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--device", "cuda") != "cuda" or torch.cuda.is_available():
        return
    no_device = pytest.mark.skip(reason="gpu: torch sees no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(no_device)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test."""
    name = request.config.getoption("--device", "cuda")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The device under test, for what only CUDA has: streams, graphs, synchronisation."""
    if device.type != "cuda":
        pytest.skip("streams, graphs and synchronisation are CUDA's")
    return device
