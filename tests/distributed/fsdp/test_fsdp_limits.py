"""FSDP2 with weights gathered as codes: what is refused, by name, and what works instead."""

import minifloat as mf
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support.sharded_models import Model, assert_equal, batch, built, sharded, train, whole
from tests.support.worlds import run_world

RECIPES = ("nvfp4", "mxfp8", "fp8_tensorwise")


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = mf.MoE(48, 32, 4, 2)
        self.blocks = [self.moe]

    def forward(self, x):
        return self.moe(x)


def converted(kind, recipe, **options):
    torch.manual_seed(0)
    model = kind()
    mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0, verbose=False, **options)
    return model


# ---- conversion after fully_shard ----------------------------------------------------------------


def check_conversion_after(rank):
    for recipe in RECIPES:
        for kind, name in ((Model, "blocks.0.up"), (Experts, "moe.experts")):
            alone = converted(kind, recipe)
            torch.manual_seed(0)
            model = sharded(kind())
            names = [type(module) for module in model.modules()]
            with pytest.raises(ValueError, match=rf"not sharded, got {name} after fully_shard"):
                mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0, verbose=False)
            assert [type(module) for module in model.modules()] == names
            options = {"gather": "compute_dtype", "keep": "nothing", "data_parallel_rank": 0}
            mf.quantize_(model, recipe, verbose=False, **options)
            assert train(model, use_step=True) == train(alone, use_step=True), recipe
            assert_equal(whole(model), whole(alone), recipe)


def test_conversion_after_fully_shard():
    run_world(2, check_conversion_after)


# ---- smaller meshes ------------------------------------------------------------------------------


def check_smaller_mesh(rank):
    for recipe in RECIPES:
        for kind in (Model, Experts):
            model = sharded(converted(kind, recipe), reshard_after_forward=2)
            limit = "reshard_after_forward: expected True or False .* gather='compute_dtype'"
            with pytest.raises(ValueError, match=limit):
                model(batch(0))
        alone = built(recipe)
        model = converted(Model, recipe, gather="compute_dtype")
        sharded(model, reshard_after_forward=2)
        assert train(model) == train(alone), recipe
        assert_equal(whole(model), whole(alone), recipe)


def test_a_smaller_mesh():
    run_world(4, check_smaller_mesh)


# ---- parameters that are replaced ----------------------------------------------------------------


def replace_by_to(model):
    model.to(torch.float32)


def replace_by_load(model):
    model.load_state_dict(dict(model.state_dict()), assign=True)


def check_replaced(rank):
    """Checks parameters that are replaced after gathers, in one dtype."""
    for recipe in RECIPES:
        for kind in (Model, Experts):
            alone, model = converted(kind, recipe), sharded(converted(kind, recipe))
            for replace in (replace_by_to, replace_by_load):
                assert train(model, 2, use_step=True) == train(alone, 2, use_step=True), recipe
                assert_equal(whole(model), whole(alone), (recipe, replace))
                replace(model)
            assert train(model, 2, use_step=True) == train(alone, 2, use_step=True), recipe
            gathers = [getattr(module, "weight_gather", None) for module in model.modules()]
            assert any(gather is not None and gather.is_quantized for gather in gathers), recipe


def check_other_dtype(rank):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for recipe in RECIPES:
        for kind in (Model, Experts):
            model = sharded(converted(kind, recipe))
            train(model, 1)
            model.to(torch.bfloat16)
            for _ in range(2):
                with pytest.raises(ValueError, match=r"expected shards of torch\.float32"):
                    model(batch(0, dtype=torch.bfloat16))
            alone = converted(kind, recipe).bfloat16()
            model = sharded(converted(kind, recipe), mp_policy=policy)
            x = batch(0, dtype=torch.bfloat16)
            model(x).sum().backward()
            model.to(torch.bfloat16)
            assert torch.equal(model(x), alone(x)), recipe


def test_replaced_parameters():
    run_world(2, check_replaced)


def test_another_dtype():
    run_world(2, check_other_dtype)
