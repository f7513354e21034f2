"""The statistics of a cast and the errors of a product, against NumPy."""

import math

import numpy as np
import pytest
import torch
from minifloat._native import ops

from tests.support import oracle

NAMES = ops.statistic_names()
SPECS = ("e4m3/tensor", "e5m2/tensor", "e4m3/row", "e4m3/1x128", "e4m3/128x128", "mxfp8", "mxfp4")
SPECS = (*SPECS, "mxfp8/e5m2", "mxfp8/32x32", "mxfp4+floor", "nvfp4", "nvfp4/16x16", "nvfp4+pow2")
SPECS = (*SPECS, "e1m2/1x16", "e1m2/16x16+pow2", "e1m2/1x32+rht")
SPECS = (*SPECS, "nvfp4+4over6", "nvfp4+rht", "mxfp4+rht32", "nvfp4+sr", "mxfp8+sr", "nvfp4+eden")


def statistics(x, spec, columnwise=False, amax=None):
    """Returns the numbers by name, and the histogram by exponent."""
    rng = torch.zeros(2, dtype=torch.int64)
    amaxes = None if amax is None else [amax]
    (found,) = ops.operand_statistics([x], spec, columnwise, amax=amaxes, rng=rng).tolist()
    histogram = {i - 127: int(n) for i, n in enumerate(found[len(NAMES) :]) if n}
    return dict(zip(NAMES, found)), histogram


def values_of(codes, scale, amax, spec, cols):
    """Returns the values of the oracle's codes and the scale of each element, in float64."""
    p = oracle.parse(spec)
    if p.elements.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)[:, :cols]
    elements = oracle.decode(codes, p.elements).astype(np.float64)
    shape = elements.shape
    if p.rule == "tensor":
        factor = np.full(shape, scale, np.float64)
    elif p.rule == "row":
        factor = np.broadcast_to(scale[:, None], shape).astype(np.float64)
    elif p.rule == "mx":
        factor = oracle.spread(np.ldexp(1.0, scale.astype(int) - 127), p.block, shape)
    elif p.rule == "block":
        factor = oracle.spread(scale, p.block, shape).astype(np.float64)
    else:
        top = p.elements.max * (256 if {"pow2", "4over6"} & {*p.flags} else 448)
        top = 256 * float.fromhex("0x1.849D64p2") if "eden" in p.flags else top
        blocks = oracle.decode(scale, oracle.E4M3).astype(np.float64)
        factor = oracle.spread(blocks, p.block, shape) * (amax / top)
    return elements * factor, factor * p.elements.max


def exponents(scale, spec):
    """Counts scales by the exponent of two."""
    p = oracle.parse(spec)
    found = np.asarray(scale).reshape(-1)
    if p.rule == "mx":
        logs = found.astype(int) - 127
    else:
        stored = oracle.decode(found, oracle.E4M3) if p.rule == "nvfp4" else found
        logs = np.frexp(stored[stored != 0])[1] - 1
    return {int(e): int(n) for e, n in zip(*np.unique(logs, return_counts=True))}


def outliers(x):
    norms = np.sqrt((x.astype(np.float64) ** 2).sum(0))
    middle = np.sort(norms)[(norms.size - 1) // 2]
    return int((norms > 4 * middle).sum())


def matrix(kind):
    """Returns (48, 160): normal values, a wide range, an outlier channel, blocks of zeros."""
    draw = np.random.default_rng(5)
    x = draw.standard_normal((48, 160))
    if kind == "wide":
        x *= 2.0 ** draw.integers(-24, 3, (48, 10)).repeat(16, 1)
    x[:, 3] *= 300
    x[7], x[16:32, 32:64] = 0, 0
    return torch.from_numpy(x.astype(np.float32)).bfloat16().float()


@pytest.mark.parametrize("kind", ["normal", "wide"])
@pytest.mark.parametrize("spec", SPECS)
def test_statistics_against_numpy(spec, kind):
    x = matrix(kind)
    for columnwise in (False, True):
        n, histogram = statistics(x, spec, columnwise)
        read = np.ascontiguousarray(x.numpy().T if columnwise else x.numpy())
        key = oracle.mix_seed(0, 0)
        codes, scale, amax = oracle.quantize(read, spec, key=key, columnwise=columnwise)
        y = read
        if points := oracle.parse(spec).points:
            signs = oracle.eden_signs(key, 0) if "eden" in spec else oracle.SIGNS
            y = oracle.hadamard(read, points, signs)
        values, most = values_of(codes, scale, amax, spec, y.shape[1])
        exact = y.astype(np.float64)
        assert n["elements"] == y.size
        assert n["signal"] == pytest.approx((exact**2).sum(), rel=1e-5)
        assert n["noise"] == pytest.approx(((exact - values) ** 2).sum(), rel=1e-4)
        assert n["flushed"] == ((y != 0) & (values == 0)).sum()
        # fp32's roundings of the largest value are within 2^-20 of it.
        past = (np.abs(exact) > most * (1 + 2.0**-18)) & (most > 0)
        near = (np.abs(exact) > most * (1 + 2.0**-20)) & (most > 0)
        assert past.sum() <= n["saturated"] <= near.sum()
        assert n["amax"] == np.abs(y).max()
        assert n["nonfinite"] == 0
        is_nvfp4 = oracle.parse(spec).rule == "nvfp4"
        assert n["zero_scales"] == ((scale == 0).sum() if is_nvfp4 else 0)
        assert n["scales"] == np.asarray(scale).size
        assert histogram == exponents(scale, spec)
        assert n["channels"] == 160
        assert n["outlier_channels"] == outliers(x.numpy()) == 1


def test_the_matrices_have_what_is_counted():
    """Without this, the counts above could all be 0."""
    n, _ = statistics(matrix("wide"), "nvfp4")
    assert min(n[name] for name in ("saturated", "flushed", "zero_scales")) > 0


def test_an_amax_that_is_too_small_saturates():
    x = torch.tensor([[1.0, -2.0, 0.5, 3.0] * 4])
    for spec in ("e4m3/tensor", "e4m3/tensor+delayed", "nvfp4"):
        n, _ = statistics(x, spec, amax=torch.tensor(1.0))
        assert n["saturated"] == 8, spec
    n, _ = statistics(x, "e4m3/tensor+delayed", amax=torch.tensor(3.0))
    assert n["saturated"] == 0


def test_values_that_are_not_finite():
    x = torch.ones(4, 32)
    x[1, 2], x[3, 5] = math.inf, math.nan
    for spec in ("mxfp8", "nvfp4", "e4m3/row"):
        n, histogram = statistics(x, spec)
        assert n["nonfinite"] == 2, spec
        assert math.isnan(n["noise"]), spec
        assert histogram[128] >= 2, spec  # of NaN


def test_small_gradients_keep_their_noise():
    g = torch.randn(64, 64)
    at_one, _ = statistics(g, "mxfp8")
    for exponent in (-60, -100):
        small, _ = statistics(g * 2.0**exponent, "mxfp8")
        ratio = small["noise"] / small["signal"]
        assert ratio == pytest.approx(at_one["noise"] / at_one["signal"], rel=1e-5)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (1, 1), (3, 5)])
def test_small_and_empty_matrices(shape):
    for spec in ("nvfp4", "mxfp8", "e4m3/row", "nvfp4+rht"):
        n, _ = statistics(torch.ones(shape), spec)
        assert n["nonfinite"] == 0
        assert n["noise"] <= n["signal"]
    assert statistics(torch.zeros(16, 16), "nvfp4")[0]["noise"] == 0


def test_operands_are_not_written_to():
    x = matrix("normal")
    before = x.clone()
    statistics(x, "nvfp4")
    ops.result_error([x], [x.clone()], [x])
    assert torch.equal(x, before)


def test_errors_of_a_result():
    draw = np.random.default_rng(1)
    result, reference, g = (draw.standard_normal((6, 10)).astype(np.float32) for _ in range(3))
    tensors = [[torch.from_numpy(t)] for t in (result, reference, g)]
    d = result.astype(np.float64) - reference
    rows = (d * g).sum(1)
    expected = [
        (d**2).sum(),
        (reference.astype(np.float64) ** 2).sum(),
        rows.sum(),
        (rows**2).sum(),
    ]
    assert ops.result_error(*tensors)[0].tolist() == pytest.approx(expected, rel=1e-5)
    assert ops.result_error(*tensors[:2])[0].tolist()[2:] == [0, 0]


@pytest.mark.parametrize("spec", ["e4m3/tensor", "mxfp4+sr+rht", "nvfp4+eden", "nvfp4/16x16"])
def test_matrices_of_one_call_have_their_own_numbers(spec):
    """Also beside one that is not finite; sums of several matrices may have another order."""
    rng = torch.zeros(2, dtype=torch.int64)
    several = [matrix("normal"), matrix("wide"), matrix("normal") * 3, matrix("wide")]
    several[2][5, 7] = math.inf
    for columnwise in (False, True):
        found = ops.operand_statistics(several, spec, columnwise, rng=rng)
        apart = [ops.operand_statistics([x], spec, columnwise, rng=rng)[0] for x in several]
        torch.testing.assert_close(found, torch.stack(apart), rtol=1e-6, atol=0, equal_nan=True)
    errors = ops.result_error(several, several[::-1], several)
    apart = [ops.result_error([x], [y], [x])[0] for x, y in zip(several, several[::-1])]
    torch.testing.assert_close(errors, torch.stack(apart), rtol=1e-6, atol=0, equal_nan=True)


def test_refusals():
    x = torch.ones(4, 32)
    with pytest.raises(ValueError, match="expected matrices x, got none"):
        ops.operand_statistics([], "mxfp8", rng=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="expected x of one shape and dtype"):
        ops.operand_statistics([x, x.t()], "mxfp8")
    with pytest.raises(ValueError, match="expected an amax of each of 2 matrices, got 1"):
        ops.operand_statistics([x, x], "nvfp4", amax=[torch.ones(())])
    with pytest.raises(ValueError, match="bf16 is the identity and has no codes"):
        ops.operand_statistics([x], "bf16")
    with pytest.raises(ValueError, match=r"expected x \(rows, cols\), got 3 dimensions"):
        ops.operand_statistics([x[None]], "mxfp8")
    with pytest.raises(ValueError, match="needs rng"):
        ops.operand_statistics([x], "mxfp4+sr")
    with pytest.raises(ValueError, match="expected results, got none"):
        ops.result_error([], [x])
    with pytest.raises(ValueError, match="expected 2 references, one for each result, got 1"):
        ops.result_error([x, x], [x])
    with pytest.raises(ValueError, match="references as matrices of the first result's shape"):
        ops.result_error([x], [x.t()])
    with pytest.raises(ValueError, match="expected results of one dtype"):
        ops.result_error([x, x.bfloat16()], [x, x])
    with pytest.raises(ValueError, match="gradients in float32 or bfloat16"):
        ops.result_error([x], [x], [x.double()])
