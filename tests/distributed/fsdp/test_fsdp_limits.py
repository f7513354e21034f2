"""FSDP2 with weights gathered as codes: what is refused, by name, and what works instead."""

from itertools import product

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


class Even(nn.Module):
    """Layers whose codes two ranks can cut."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(48, 64), nn.Linear(64, 64)])

    def forward(self, x):
        return self.blocks[1](torch.relu(self.blocks[0](x)))


def converted(kind, recipe, **options):
    torch.manual_seed(0)
    model = kind()
    mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0, **options)
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
                mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0)
            assert [type(module) for module in model.modules()] == names
            options = {"gather": "compute_dtype", "keep": "nothing", "data_parallel_rank": 0}
            mf.quantize_(model, recipe, **options)
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


def halve(model):
    return {name: (0.5 * t).detach() for name, t in model.state_dict().items()}


def load_into_empty(model):
    state = halve(model)
    model.to_empty(device="cpu")
    model.load_state_dict(state)


def load_without(model):
    """Loads weights alone, and moves the model: each module's parameters are swapped twice."""
    state = {name: t for name, t in halve(model).items() if "norm" not in name}
    model.load_state_dict(state, strict=False)
    model.to("cpu")
    model.load_state_dict(halve(model))


SWAPS = {
    "load": lambda model: model.load_state_dict(halve(model)),
    "load twice": load_without,
    "to_empty": load_into_empty,
    "half the values": lambda model: model._apply(lambda t: t * 0.5),
    "bfloat16 and back": lambda model: model.bfloat16().float(),
}


def local_classes(model):
    return [type(p._local_tensor) for p in model.parameters()]


def check_swapped(rank):
    """Checks parameters whose tensors torch swaps, before the first gather and after a step."""
    kinds = (Model, {}), (Experts, {}), (Even, {"primary": True})
    for i, ((kind, options), how) in enumerate(product(kinds, SWAPS)):
        recipe, swap = RECIPES[i % len(RECIPES)], SWAPS[how]
        where = recipe, kind, options, how
        alone, model = (sharded(converted(kind, recipe, **options)) for _ in range(2))
        classes = local_classes(model)
        for steps in (0, 1):
            train(alone, steps, use_step=True)
            swap(alone)
            train(model, steps, use_step=True)
            torch.__future__.set_swap_module_params_on_conversion(True)
            swap(model)
            torch.__future__.set_swap_module_params_on_conversion(False)
            assert local_classes(model) == classes, where
        assert train(model, 2, use_step=True) == train(alone, 2, use_step=True), where
        assert_equal(whole(model), whole(alone), where)


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


def test_swapped_parameters():
    run_world(2, check_swapped)


def test_another_dtype():
    run_world(2, check_other_dtype)


# ---- scales that are loaded ----------------------------------------------------------------------


def check_loaded_scales(rank):
    for kind in (Model, Experts):
        trained = sharded(converted(kind, "fp8_delayed"))
        train(trained, use_step=True)
        state, model = mf.training_state(trained), sharded(converted(kind, "fp8_delayed"))
        others = {name: (1 + rank) * values for name, values in state.items()}
        with pytest.raises(ValueError, match="same active amaxes on all ranks, but rank 0 has"):
            mf.load_training_state(model, others)
        with pytest.raises(ValueError, match=r"missing .*amax_history"):
            mf.load_training_state(model, {} if rank else state)
        assert not any(values.any() for values in mf.training_state(model).values())
        with pytest.raises(ValueError, match="expected all ranks to begin the same exchange"):
            model(batch(0)) if rank else mf.load_training_state(model, state)
        mf.load_training_state(model, state)
        loaded = mf.training_state(model)
        assert all(torch.equal(values, loaded[name]) for name, values in state.items())


def test_ranks_load_the_same_scales():
    run_world(2, check_loaded_scales)
