"""FSDP2's gathered weights: byte for byte those that one process quantizes whole."""

import re

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat.distributed.fsdp.weight_tensors import ShardedWeight
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.pairs import pairs
from tests.support.same_bits import require_same_parts, same_bytes
from tests.support.specs import written
from tests.support.worlds import run_world


def one(spec):
    return written(spec, spec)


RECIPES = [
    *(one(s) for s in ("e4m3/tensor", "e5m2/tensor", "e4m3/row", "e4m3/row+exact")),
    *(one(s) for s in ("e4m3/128x128", "mxfp8", "mxfp8/32x32", "mxfp4", "nvfp4", "nvfp4/16x16")),
    *(one(s) for s in ("e4m3/1x128", "nvfp4/16x16+pow2", "mxfp4+rht", "nvfp4+rht32")),
    *(one(s) for s in ("e1m2/1x16+rht", "e1m2/16x16+pow2", "e1m2/1x32")),
    written("mxfp8", "nvfp4/16x16"),
    written("nvfp4/16x16", "mxfp8"),
    written("nvfp4", "nvfp4+rht"),
    written("e4m3/tensor", "mxfp8"),
    written("e4m3/row", "mxfp8"),
    written("e4m3/128x128", "e4m3/tensor"),
    written("e4m3/tensor", "nvfp4"),
    written("mxfp8/32x32", "mxfp4+rht"),
]
# (N, K): even; ends inside blocks; odd; one rank empty; fewer rows than ranks
SHAPES = [(256, 96), (200, 72), (37, 50), (5, 34), (1, 16)]
WORLDS = [1, 2, 3]
CASES = pairs(RECIPES, SHAPES, WORLDS, [torch.float32, torch.bfloat16], [False, True])


class Block(nn.Module):
    """One layer alone, so that FSDP2 reshards it after forward."""

    def __init__(self, shape):
        super().__init__()
        n, k = shape
        self.layer = nn.Linear(k, n, bias=False)

    def forward(self, x):
        return self.layer(x)


def whole_weight(shape):
    torch.manual_seed(shape[0])
    weight = torch.randn(shape) * torch.randn(shape[0], 1).exp2()
    weight[0, -1] = 40.0
    return weight


def check_gathered(recipe, shape, dtype, precompute):
    """Checks the bytes of each direction that a plan gathers, before forward and backward."""
    world, where = dist.get_world_size(), (recipe, shape, dtype, precompute)
    weight = whole_weight(shape)
    model = nn.Sequential(Block(shape), nn.Identity())
    with torch.no_grad():
        model[0].layer.weight.copy_(weight)
    mf.quantize_(model, recipe)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    layer = model[0].layer
    rows, cols = layer.recipe.fprop.b, layer.recipe.dgrad.b
    values = weight.to(dtype)
    want = [mf.tensor.quantize(values, rows), mf.tensor.quantize(values, cols, columnwise=True)]

    def check(*directions):
        whole = layer.weight
        if not layer.weight_gather.is_quantized:
            assert same_bytes(whole.detach(), values), where
            return False
        assert whole.shape == shape, where
        assert whole.dtype == dtype, where
        for i in directions:
            require_same_parts((whole.rowwise, whole.columnwise)[i], want[i], where)
        return True

    seen = []
    layer.register_forward_hook(lambda *_: seen.append(check(0)))
    x = torch.randn(3, shape[1], dtype=dtype, requires_grad=True)
    for _ in range(2):
        y = model(x)
        # The rowwise codes are freed before backward, unless each gather moves both directions.
        is_both = layer.weight_gather.plan.mode == "both"
        y.register_hook(lambda g, read=(0, 1) if is_both else (1,): seen.append(check(*read)))
        y.sum().backward()
        if precompute:
            mf.distributed.precompute_scales(model)
    assert isinstance(layer.weight._local_tensor, ShardedWeight)
    cuts = {min(rank * -(-shape[0] // world), shape[0]) for rank in range(world)} - {shape[0]}
    points = max([1, *(int(n or 16) for n in re.findall(r"rht(\d*)", cols))])
    assert seen == [all(cut % points == 0 for cut in cuts)] * 4, where


def check_all(rank, of_world):
    for recipe, shape, world, dtype, precompute in CASES:
        if world == of_world:
            check_gathered(recipe, shape, dtype, precompute)


@pytest.mark.parametrize("world", WORLDS)
def test_gathered_weight_is_the_whole_one(world):
    run_world(world, check_all, world)


@pytest.mark.slow
def test_gathered_weight_of_four_ranks_is_the_whole_one():
    run_world(4, check_all, 3)
