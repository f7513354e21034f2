"""Sharded experts over NCCL: weights gathered as codes, and experts cut along I.

pytest tests/gpu/test_sharded_experts.py                  a GPU each, or shared GPUs
pytest tests/gpu/test_sharded_experts.py --device cpu     the same over gloo: tests the tests
"""

from __future__ import annotations

import math

import pytest

from tests.distributed.fsdp.test_fsdp_experts import RECIPES as GATHERED
from tests.distributed.fsdp.test_fsdp_experts import check_bytes, check_expert_parallel
from tests.gpu.test_worlds import RANKS, run_ranks
from tests.moe.test_cut_experts import (
    RECIPES,
    check_layer,
    check_operands,
    check_primary,
    check_reuse,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("experts", [5, 2])
def test_gathered_experts_are_the_whole_ones(device, experts):
    run_ranks(device, check_bytes, experts, GATHERED, device.type)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2)], ids=["2 x 1", "1 x 2", "2 x 2"])
def test_gathers_under_expert_parallelism(device, sizes):
    """Checks meshes of (FSDP2, expert parallelism)."""
    run_ranks(device, check_expert_parallel, 3, sizes, device.type, ranks=math.prod(sizes))


def test_operands_of_cut_experts_are_parts_of_the_whole_ones(device):
    run_ranks(device, check_operands, RANKS, device.type)


def test_layers_of_cut_experts(device):
    run_ranks(device, check_layer, RECIPES, device.type)


@pytest.mark.parametrize("check", [check_primary, check_reuse])
def test_weights_of_cut_experts(device, check):
    run_ranks(device, check, device.type)
