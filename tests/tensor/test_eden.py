"""MS-EDEN's mean over the signs of its transform and its scales' random bits: 10,000 seeds.

A mean of N draws differs from its expectation by its standard error, the draws' deviation / sqrt N.
z is the difference in standard errors: of independent normal z, one of 1,000 is past 3.3, and one
of 1.7 million past 5. Seeds are fixed, so a run repeats.
"""

import minifloat as mf
import numpy as np
import pytest
import torch
from minifloat._native import ops

from tests.support import oracle

SEEDS, K = 4_000, 256  # 1,000 find that a correction is absent, by 10 errors
EDEN = "nvfp4+eden"


def operand(kind: str, seed: int) -> torch.Tensor:
    """Draws (4, K); `outlier`: one element of each row is 8 times the others' deviation."""
    x = torch.randn(4, K, generator=torch.Generator().manual_seed(seed))
    if kind == "outlier":
        x[torch.arange(4), torch.tensor([0, 37, 128, 255])] = 8.0
    return x


def signs(seed: int, stream: int) -> np.ndarray:
    return np.tile(oracle.eden_signs(oracle.mix_seed(seed, 0), stream), K // 128)


def back(y: torch.Tensor, of: np.ndarray) -> torch.Tensor:
    """Undoes the transform: signs times a symmetric orthogonal matrix, in fp32."""
    n = 128
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (y.unflatten(1, (-1, n)) @ h / n**0.5).flatten(1) * torch.from_numpy(of).float()


def eden(x: torch.Tensor, seed: int, stream: int) -> torch.Tensor:
    values = mf.tensor.dequantize(mf.tensor.quantize(x, EDEN, seed=seed, stream=stream))
    return back(values, signs(seed, stream))


def nearest(x: torch.Tensor, seed: int, stream: int) -> torch.Tensor:
    """The same transform, and no correction."""
    of = signs(seed, stream)
    y = torch.from_numpy(oracle.hadamard(x.numpy(), 128, of[:128]))
    return back(mf.tensor.dequantize(mf.tensor.quantize(y, "nvfp4")), of)


def z_scores(draws: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    error = draws.double().std(0) / len(draws) ** 0.5
    return (draws.double().mean(0) - want.double()) / error


def projections(draws: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns the projection of each draw on x over x's length: 1 where it is x."""
    return (draws.double() * x).sum(-1) / (x.double() * x).sum(-1)


def is_unbiased(z: torch.Tensor) -> bool:
    """Whether no z is past 5 and their mean square is that of n normals, within 5 errors."""
    n = z.numel()
    return bool(z.abs().max() < 5 and z.square().mean() < 1 + 5 * (2 / n) ** 0.5)


@pytest.mark.parametrize("kind", ["normal", "outlier"])
def test_the_mean_over_seeds_is_x(kind):
    x = operand(kind, 1)
    draws = torch.stack([eden(x, seed, 6) for seed in range(SEEDS)])
    assert is_unbiased(z_scores(draws, x))
    assert is_unbiased(z_scores(projections(draws, x), torch.ones(4)))


def test_without_the_correction_it_is_not():
    x = operand("normal", 1)
    draws = torch.stack([nearest(x, seed, 6) for seed in range(1000)])
    assert not is_unbiased(z_scores(draws, x))
    assert (z_scores(projections(draws, x), torch.ones(4)) < -10).all()


@pytest.mark.parametrize("kind", ["normal", "outlier"])
def test_the_mean_over_seeds_of_a_product(kind):
    a, b = operand(kind, 2), operand("normal", 3)
    want = a.double() @ b.double().t()
    draws = []
    for seed in range(SEEDS):
        sides = [mf.tensor.quantize(x, EDEN, seed=seed, stream=s) for x, s in ((a, 8), (b, 9))]
        draws.append(mf.tensor.scaled_mm(*sides, out_dtype=torch.float32))
    assert is_unbiased(z_scores(torch.stack(draws), want))


def test_streams_of_a_pair_share_signs_and_no_scale_bits():
    x = operand("normal", 4)
    first, second, other = (mf.tensor.quantize(x, EDEN, seed=5, stream=s) for s in (10, 11, 12))
    assert torch.equal(first.codes, second.codes)
    assert not torch.equal(first.scale.view(torch.uint8), second.scale.view(torch.uint8))
    assert not torch.equal(first.codes, other.codes)


def test_the_error_is_less_than_that_of_stochastic_rounding():
    """Relative squared errors of normal values: 0.0098, and 0.0190 of nvfp4+sr."""
    x = operand("normal", 5)
    error = {}
    for name, cast in (
        ("eden", lambda seed: eden(x, seed, 0)),
        ("sr", lambda seed: mf.tensor.dequantize(mf.tensor.quantize(x, "nvfp4+sr", seed=seed))),
    ):
        draws = torch.stack([cast(seed) for seed in range(64)])
        error[name] = ((draws - x).square().sum() / (64 * x.square().sum())).item()
    assert 0.009 < error["eden"] < 0.0105, error
    assert error["sr"] > 1.8 * error["eden"], error


@pytest.mark.parametrize("columnwise", [False, True])
def test_a_shard_gets_the_bytes_of_the_whole(columnwise):
    x = torch.randn(256, 384, generator=torch.Generator().manual_seed(6))
    amax = mf.tensor.amax(x, EDEN, columnwise=columnwise, seed=9, stream=2)
    arguments = {"columnwise": columnwise, "amax": amax, "seed": 9, "stream": 2}
    whole = mf.tensor.quantize(x, EDEN, **arguments)
    rows, cols = slice(128, 256), slice(256, 384)
    origin = (128, 256)
    shard = mf.tensor.quantize(x[rows, cols], EDEN, origin=origin, **arguments)
    at = (cols, rows) if columnwise else (rows, cols)
    codes = whole.codes[at[0], at[1].start // 2 : at[1].stop // 2]
    scales = whole.scale.view(torch.uint8)[at[0], at[1].start // 16 : at[1].stop // 16]
    assert torch.equal(shard.codes, codes)
    assert torch.equal(shard.scale.view(torch.uint8), scales)
    with pytest.raises(ValueError, match="a multiple of 128"):
        mf.tensor.quantize(x, EDEN, origin=(64, 64), **arguments)


def test_errors():
    for product in (f"{EDEN}*nvfp4+rht128", f"nvfp4*{EDEN}", f"{EDEN}*bf16"):
        with pytest.raises(ValueError, match="must carry the same transform"):
            ops.product_info(product)
    with pytest.raises(ValueError, match="weights round to nearest, got the stochastic nvfp4"):
        mf.QuantizedTensor.from_tensor(torch.ones(128, 128), EDEN)
    with pytest.raises(ValueError, match="needs rng"):
        ops.amax(torch.ones(4, 128), EDEN)
    with pytest.raises(ValueError, match="needs rng"):
        ops.quantize(torch.ones(4, 128), EDEN, "")
