"""Sharded masters of experts' weights (E, N, K): one amax an expert, cuts anywhere."""

import minifloat as mf
import pytest
import torch

from tests.distributed.zero.test_master_weights import FORMATS, check_shards
from tests.support.master_weights import (
    assert_same_weight,
    empty_weight,
    master_of,
    require_refused,
    whole_cast,
)
from tests.support.worlds import run_world

# Experts of more and fewer elements than a rank's shard; odd rows; a single expert.
SHAPES = [(5, 33, 70), (2, 48, 96), (3, 17, 31), (1, 32, 40), (7, 1, 16)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_together_have_the_bytes_of_the_whole(world_size):
    run_world(world_size, check_shards, world_size, world_size, SHAPES)


@pytest.mark.parametrize("specs", FORMATS, ids=str)
def test_each_expert_has_an_amax_of_its_own(specs):
    """Checks experts of other magnitudes, among them zeros and an Inf, against a matrix each."""
    master = torch.stack([master_of((48, 64), seed) * 2.0**seed for seed in range(4)])
    master[1] = 0
    master[2, 3, 5] = float("inf")
    weight = empty_weight((4, 48, 64), specs)
    mf.distributed.quantize_master_weights([weight], [master.flatten()], [0], None)
    mf.distributed.post_all_gather_processing([weight])
    assert_same_weight(weight, whole_cast(master, specs))
    for e in range(4):
        alone = whole_cast(master[e], specs)
        for part, matrix in (
            (weight.rowwise, alone.rowwise),
            (weight.columnwise, alone.columnwise),
        ):
            if part is not None:
                assert torch.equal(part.codes[e], matrix.codes)
                assert torch.equal(
                    part.scale[e].float().nan_to_num(), matrix.scale.float().nan_to_num()
                )


def test_delayed_scaling_has_an_active_amax_an_expert():
    master, spec = master_of((3, 20, 30), 1), "e4m3/tensor+delayed"
    active = torch.tensor([0.75, 2.0, 0.25])
    weight = mf.QuantizedTensor(mf.tensor.quantize(torch.zeros(3, 20, 30), spec, amax=active), None)
    weight.rowwise.amax.copy_(active)
    mf.distributed.quantize_master_weights([weight], [master.flatten()], [0], None)
    want = mf.tensor.quantize(master.bfloat16(), spec, amax=active)
    assert_same_weight(
        weight,
        mf.QuantizedTensor(
            mf.tensor.Quantized(want.codes, want.scale, want.amax, want.spec, want.shape), None
        ),
    )
    assert torch.equal(weight.rowwise.amax, master.bfloat16().abs().amax((1, 2)).float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start_offsets": [1]}, "within the 3072 elements"),
        ({"start_offsets": [-1]}, "within the 3072 elements"),
        ({"master_weights": [torch.zeros(48, 64).t()]}, "contiguous shards"),
        ({"master_weights": [torch.zeros(3072, dtype=torch.float64)]}, "float32 or bfloat16"),
        ({"fsdp_shard_model_weights": [torch.zeros(7, dtype=torch.uint8)]}, "expected 1536 conti"),
        ({"fsdp_shard_model_weights": [torch.zeros(1537, dtype=torch.uint8)]}, "expected 1536"),
        ({"names": ["w"], "master_weights": [torch.zeros(3072, 2)[:, 0]]}, "contiguous"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(change, message):
    require_refused((2, 32, 48), change, message)
