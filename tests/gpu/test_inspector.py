"""The inspector's numbers on the GPU: counts are the CPU's, and sums agree."""

from __future__ import annotations

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from minifloat.inspector.nonfinite import find_nonfinite

from tests.support.llama import ModelConfig, build_model, cross_entropy
from tests.support.specs import BASES

pytestmark = pytest.mark.gpu
NAMES = ops.statistic_names()
SUMS = ("signal", "noise")


def loss_of(model, batch):
    with torch.autocast(batch.device.type, torch.bfloat16):
        logits = model(batch[:, :-1])
    return cross_entropy(logits, batch[:, 1:])


@pytest.mark.parametrize("spec", [*BASES, "nvfp4+rht", "mxfp4+sr+rht"])
def test_statistics(device, spec):
    torch.manual_seed(0)
    x = torch.randn(192, 320) * 2.0 ** torch.randint(-20, 3, (192, 1))
    x[:, 7] *= 100
    for dtype, columnwise in ((torch.float32, False), (torch.bfloat16, True)):
        rng = torch.zeros(2, dtype=torch.int64)
        a, b = (
            ops.operand_statistics([t], spec, columnwise, rng=rng.to(t.device))[0].cpu()
            for t in (x.to(dtype), x.to(dtype).to(device))
        )
        is_sum = torch.zeros(len(a), dtype=torch.bool)
        is_sum[[NAMES.index(name) for name in SUMS]] = True
        torch.testing.assert_close(b[is_sum], a[is_sum], rtol=1e-4, atol=0)
        assert torch.equal(b[~is_sum], a[~is_sum])


def test_a_model_with_experts(device):
    """Products are other engines' and sums have other orders, so errors agree to a tenth."""
    torch.manual_seed(0)
    model = build_model(ModelConfig(128, 2, 4, 2, 192, 512, 64, 4, 2, 1), 32, 1, "cpu")
    batch, found = torch.randint(0, 512, (4, 33)), []
    for where in (torch.device("cpu"), device):
        model.to(where)
        found.append(mf.inspect(model, batch.to(where), ["mxfp8", "nvfp4"], loss=loss_of))
    for a, b in zip(*(each.rows for each in found), strict=True):
        assert (a.layer, a.recipe) == (b.layer, b.recipe)
        assert b.y_error == pytest.approx(a.y_error, rel=0.1)
        assert b.dw_error == pytest.approx(a.dw_error, rel=0.1)
        for one, two in zip(a.operands, b.operands, strict=True):
            assert two.snr_db == pytest.approx(one.snr_db, abs=0.5), (a.layer, one.operand)


def test_values_that_are_not_finite(device):
    model = build_model(ModelConfig(64, 2, 2, 2, 96, 300, 32, 4, 2, 1), 32, 1, "cpu").to(device)
    mf.quantize_(model, "nvfp4")
    batch = torch.randint(0, 300, (2, 33), device=device)
    assert find_nonfinite(model, batch, loss_of) is None
    with torch.no_grad():
        model.layers[1].attention.wk.weight[0, 0] = float("nan")
    found = str(find_nonfinite(model, batch, loss_of))
    assert found.startswith("layers.1.attention.wk, weight of fprop: 1 of ")
