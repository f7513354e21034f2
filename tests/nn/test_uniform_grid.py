"""Layers on a uniform 4-bit grid: an operand by hand, training, compiled code, engines."""

import functools

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import nn

from tests.nn.test_eden_layers import train
from tests.support.loss_errors import loss_error
from tests.support.specs import UNIFORM_POW2_RECIPE, UNIFORM_RECIPE

RECIPES = [UNIFORM_RECIPE, UNIFORM_POW2_RECIPE, UNIFORM_RECIPE.replace("1x16", "1x32")]


def test_a_block_worked_by_hand():
    """amax 28 under +pow2: S = 448 / 28 = 16, and a block of amax 28 has the scale 256."""
    x = torch.zeros(1, 16)
    x[0, :6] = torch.tensor([28.0, -4.0, 6.0, 10.0, -1.9, -0.0])  # 6 and 10 are ties, in units of 4
    q = mf.tensor.quantize(x, "e1m2/1x16+pow2")
    assert q.scale.float().item() == 256
    assert q.codes[0, :3].tolist() == [0x97, 0x22, 0x88]  # 7 -1, 2 2, -0 -0: the low nibble first
    assert q.dequantize()[0, :6].tolist() == [28.0, -4.0, 8.0, 8.0, -0.0, -0.0]


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(96, 160, bias=False), nn.Linear(160, 96, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)))


def built(recipe):
    torch.manual_seed(0)
    model = FeedForward()
    if recipe:
        mf.quantize_(model, recipe, keep="nothing")
    return model


@functools.cache
def losses(recipe):
    model = built(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return train(model, optimizer, 0, 60)


@pytest.mark.parametrize("recipe", RECIPES)
def test_training(recipe):
    """The loss falls as in fp32, but for the errors that rounding adds in two products."""
    got, plain = losses(recipe), losses("")
    assert got[-1] < 0.8 * got[0]
    assert got[-1] - plain[-1] < loss_error(recipe, 2, 1.0, plain[-1], 128 * 96)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_compiled_model_has_the_bits_of_an_eager_one(recipe):
    x, g = torch.randn(64, 96), torch.randn(64, 96)
    eager, compiled = built(recipe), built(recipe)
    compiled.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        for model in (eager, compiled):
            model.zero_grad()
            model(x).backward(g)
        for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


def test_engines():
    """Codes under powers of two are FP8 products since 8.9. No tensor core reads E1M2 itself."""
    for recipe, since_ada in zip(RECIPES, ("exact", "fp4_by_fp8", "fp4_by_fp8")):
        for capability, want in (((8, 0), "exact"), ((8, 9), since_ada), ((9, 0), since_ada)):
            assert {e.name for e in mf.engines(recipe, capability)} == {want}
        for capability in ((10, 0), (10, 3), (12, 0)):
            assert {e.name for e in mf.engines(recipe, capability)} == {since_ada}
            names = {e.name for e in mf.engines(recipe, capability, experts=True)}
            assert "block_scaled_grouped" not in names


@pytest.mark.parametrize("spec", ["e1m2/1x16", "e1m2/1x32"])
def test_no_block_scaled_product_reads_its_codes(spec):
    q = mf.tensor.quantize(torch.ones(16, 64), spec)
    with pytest.raises(ValueError, match="expected an MX or NVFP4 spec, got"):
        ops.block_scaled_operand(q.codes, q.scale.view(torch.uint8), q.amax, spec, 64)
