"""The numerics lab on the GPU: values have the CPU's bits, and errors agree."""

from __future__ import annotations

import minifloat as mf
import pytest
import torch

from tests.support.same_bits import require_same

pytestmark = pytest.mark.gpu


def power_of_two(blocks):
    scale = mf.lab.round_to(blocks.abs().amax(-1, keepdim=True), "e8m0", "up")
    return scale * mf.lab.round_to(4 * blocks / scale, "e2m1") / 4


@pytest.mark.parametrize("grid", ["e2m1", "e4m3", "e5m2", "e8m0", torch.arange(8.0)])
def test_rounding(device, grid):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    for rounding in ("nearest", "up", "down"):
        got = mf.lab.round_to(x.float().to(device), grid, rounding)
        require_same(got.cpu(), mf.lab.round_to(x.float(), grid, rounding), (grid, rounding))


@pytest.mark.parametrize("rule", ["nvfp4+sr", mf.lab.Rule(power_of_two, (16, 16))])
def test_values_and_errors(device, rule):
    x = torch.randn(72, 200, generator=torch.Generator().manual_seed(0))
    for columnwise in (False, True):
        options = {"columnwise": columnwise, "seed": 3}
        want, got = (mf.lab.fake_quantize(t, rule, **options) for t in (x, x.to(device)))
        require_same(got.cpu(), want)
        (a,), (b,) = (mf.lab.errors(t, rule, **options).rows for t in (x, x.to(device)))
        assert b.snr_db == pytest.approx(a.snr_db, abs=1e-3)
        assert (b.flushed, b.amax) == (a.flushed, a.amax)
