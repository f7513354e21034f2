"""Layers of Megatron-Core over two ranks on GPUs: one GPU's bytes. Ranks share a GPU, or have one.

It runs where megatron-core is installed.
"""

import pytest

from tests.gpu.test_worlds import PARALLEL, require_close_layers, run_ranks

pytestmark = pytest.mark.gpu
pytest.importorskip("megatron.core")


def test_tensor_parallel_layers(device):
    """Checks each rank's operands, with and without sequence parallelism."""
    from tests.megatron.test_parallel import check_layers

    run_ranks(device, check_layers, PARALLEL, device.type, require_close_layers)
