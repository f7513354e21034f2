"""Tensor and sequence parallel: a cast gives a shard the whole's bytes, and layers follow."""

import pytest
import torch
import torch.distributed as dist
from minifloat._native import ops
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from tests.support.parallel_layers import (
    Recorded,
    assert_close,
    check_layers,
    check_operands,
    run_layer,
)
from tests.support.specs import BLOCKS_RECIPE, EDEN_RECIPE, ROWS_RECIPE
from tests.support.whole_layers import Case
from tests.support.worlds import run_world

RECIPES = [
    "fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_blockwise", "mxfp8",
    "mxfp8_2d", "mxfp4", "nvfp4", "nvfp4_pow2", "mxfp8_nvfp4", "nvfp4_mxfp8", "bf16",
    "fprop=nvfp4+sr+rht*nvfp4+rht dgrad=e4m3/row+sr*mxfp8+sr wgrad=e4m3/row+exact*mxfp4",
    EDEN_RECIPE, BLOCKS_RECIPE, ROWS_RECIPE,
]  # fmt: skip


def check_precisions(rank):
    """Checks bf16 inputs, autocast, and NaN or Inf in one rank's shard."""
    world, mesh = dist.get_world_size(), init_device_mesh("cpu", (dist.get_world_size(),))
    for recipe in ("fp8_tensorwise", "fp8_rowwise", "mxfp8", "nvfp4"):
        for dim, x_placement in ((0, Shard(1)), (1, Shard(2))):
            case, where = Case(recipe, torch.bfloat16), (recipe, dim)
            got, _ = run_layer(case, mesh, dim, x_placement)
            assert [t.dtype for t in got] == [torch.bfloat16] * 2 + [torch.float32] * 2, where
            assert_close(got, case.alone()[0], case, world, where)

            with torch.autocast("cpu", torch.bfloat16):
                cast = run_layer(Case(recipe), mesh, dim, x_placement)[0][0]
            assert torch.equal(cast, got[0]), where  # a repetition (exact_sums.py)

            case = Case(recipe, poisoned=True)
            want, _ = case.alone()
            with Recorded() as recorded:
                got, _ = run_layer(case, mesh, dim, x_placement)
            check_operands(case, recorded, dim, rank, world, where)
            for a, b in zip(got, want):
                assert torch.equal(a.isfinite(), b.isfinite()), where
                assert not b.isfinite().all(), where


@pytest.mark.parametrize("world", [2, 4])
def test_layer_is_one_process(world):
    run_world(world, check_layers, RECIPES)


def test_layer_in_bf16_and_not_finite():
    run_world(2, check_precisions)


@pytest.mark.parametrize(
    ("spec", "columnwise", "dim", "multiple"),
    [
        ("bf16", False, 1, 1),
        ("e4m3/tensor", False, 1, 1),
        ("e4m3/tensor+sr", False, 1, 16),  # one call of Philox
        ("e4m3/tensor+sr", True, 1, 1),
        ("e4m3/128x128", False, 0, 128),
        ("e4m3/128x128", True, 1, 128),
        ("mxfp8", False, 0, 1),
        ("mxfp8", False, 1, 32),
        ("mxfp8", True, 0, 32),
        ("nvfp4/16x16", False, 0, 16),
        ("nvfp4+rht64", True, 0, 64),
        ("nvfp4+eden", True, 0, 128),
    ],
)
def test_shards_split_no_block_transform_or_draw(spec, columnwise, dim, multiple):
    assert ops.shard_multiple(spec, columnwise, dim) == multiple


@pytest.mark.parametrize(
    ("x_fprop", "x_wgrad", "unit"),
    [
        ("e4m3/tensor", "e4m3/tensor", 1),
        ("mxfp8", "mxfp8", 32),
        ("nvfp4", "nvfp4+rht64", 64),
        ("bf16", "mxfp8", 0),
        ("mxfp8+sr", "mxfp8", 0),  # random bits depend on the row's place in the whole x
        ("mxfp8", "mxfp8+sr", 0),
    ],
)
def test_tokens_may_be_cut(x_fprop, x_wgrad, unit):
    transform = "+rht64" if "rht64" in x_wgrad else ""
    recipe = f"fprop={x_fprop}*mxfp8 dgrad=mxfp8*mxfp8 wgrad=mxfp8{transform}*{x_wgrad}"
    assert ops.token_unit(recipe) == unit
