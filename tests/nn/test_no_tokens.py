"""Each op of layers without tokens, under every preset: results without rows, gradients of weights
that are zeros. Weights are whole, or cut over two ranks.
"""

import minifloat as mf
import pytest
import torch.distributed as dist

from tests.support import layer_cases as cases
from tests.support.layer_cases import Options
from tests.support.worlds import run_world

RANDOM = "fprop=mxfp8+sr*mxfp8+sr dgrad=nvfp4+sr*e4m3/row+sr wgrad=e4m3/tensor+sr*nvfp4+sr"
RECIPES = [*mf.presets(), RANDOM]
AGAIN = {"recompute": "weight"}


def check(make, recipe, **options):
    case = make(recipe, Options(tokens=0, **options))
    results = case.forward()
    for y in results:
        assert y.shape[0] == 0
    found = case.backward(results)
    for name, leaf in case.leaves():
        assert found[name].shape == leaf.shape, (recipe, options, name)
        assert not found[name].any(), (recipe, options, name)


@pytest.mark.parametrize(
    ("make", "forms"),
    [
        (cases.linear_case, [{}, AGAIN]),
        (cases.group_case, [{}]),
        (cases.mlp_case, [{}, AGAIN]),
        (cases.grouped_case, [{}, AGAIN]),
        (cases.experts_case, [{}, {"is_fused": True}]),
    ],
)
def test_gradients_without_tokens_are_zeros(make, forms):
    for recipe in RECIPES:
        for form in forms:
            check(make, recipe, **form)


def check_cut(rank):
    where = {"group": dist.group.WORLD.group_name, "rank": rank, "ranks": dist.get_world_size()}
    for recipe in RECIPES:
        for again in ({}, AGAIN):
            for dim in (0, 1):
                check(cases.linear_case, recipe, where=where, weight_dim=dim, **again)
                check(cases.grouped_case, recipe, where=where, weight_dim=dim, **again)
            for fused in (False, True):
                check(cases.experts_case, recipe, where=where, is_fused=fused, **again)
            check(cases.grouped_case, recipe, where=where, is_fused=True, **again)


def test_gradients_of_cut_weights_without_tokens_are_zeros():
    run_world(2, check_cut)
