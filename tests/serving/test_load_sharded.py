"""mf.load_quantized_ and models that ranks shard: after it they keep the values of codes."""

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support.experts import relative_error
from tests.support.worlds import run_world

WEIGHTS = ("fp8_rowwise", "fp8_blockwise", "fp8_tensorwise", "mxfp8", "nvfp4")
RECIPES = ("bf16", "nvfp4")
WIDTH = 128


def build() -> nn.Module:
    torch.manual_seed(0)
    experts = mf.MoE(WIDTH, WIDTH, 4, 2)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH), experts)


def loaded(folder: str, recipe: str) -> nn.Module:
    model = build()
    mf.load_quantized_(model, folder, recipe, seed=1)
    return model


def outcome(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), x.grad]


def check_values(rank: int, folder: str) -> None:
    """In one process and sharded results differ by where a scale is multiplied, in float32."""
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2))
    for spec in WEIGHTS:
        for recipe in RECIPES:
            model = loaded(f"{folder}/{spec}", recipe)
            expected = outcome(model, x)
            model = loaded(f"{folder}/{spec}", recipe)
            for part in (*model, model):
                fully_shard(part)
            for result, wanted in zip(outcome(model, x), expected):
                assert relative_error(result, wanted) < 1e-6, (spec, recipe)


def test_sharded_codes_of_a_checkpoint_are_rounded_no_second_time(tmp_path):
    for spec in WEIGHTS:
        model = build()
        mf.quantize_(model, spec, keep="nothing")
        mf.export(model, tmp_path / spec, weight_only=True)
    run_world(2, check_values, str(tmp_path))


def check_refusals(rank: int, folder: str) -> None:
    for shard in (fully_shard, lambda model: mf.expert_parallel(model, dist.group.WORLD)):
        model = build()
        shard(model)
        with pytest.raises(ValueError, match=r"whole weights, got .* load before sharding"):
            mf.load_quantized_(model, folder)
        assert type(model[0]) is not mf.Linear


def test_sharded_models_are_refused(tmp_path):
    model = build()
    mf.quantize_(model, "mxfp8", keep="nothing")
    mf.export(model, tmp_path)
    run_world(2, check_refusals, str(tmp_path))
