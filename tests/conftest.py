"""Fixtures that several files of tests use."""

import pytest
import torch


@pytest.fixture
def torch_as_it_was():
    """Restores torch's settings that a training job in this process changes."""
    threads = torch.get_num_threads()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
