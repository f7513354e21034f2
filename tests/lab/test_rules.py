"""Rules in Python: rounding against the oracle, specs as rules bit for bit, blocks, gradients."""

import math
from fractions import Fraction

import minifloat as mf
import numpy as np
import pytest
import torch
from minifloat.lab.rules import ELEMENTS
from minifloat.spec import Spec

from tests.support import oracle
from tests.support.same_bits import require_same
from tests.support.specs import BASES
from tests.tensor.test_quantize import values

FORMATS = {"e2m1": oracle.E2M1, "e1m2": oracle.E1M2, "e4m3": oracle.E4M3, "e5m2": oracle.E5M2}


def bf16s():
    """Returns every bf16 as float32, NaNs and infinities included."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).float()


def beside(points):
    """Returns the points and the floats next to them, of both signs."""
    near = [np.nextafter(points, np.float32(end)) for end in (-np.inf, np.inf)]
    found = np.concatenate([points, *near]).astype(np.float32)
    return torch.from_numpy(np.concatenate([found, -found]))


# ---- Rounding ------------------------------------------------------------------------------------


def test_every_format_of_elements_can_be_rounded_to():
    assert {*ELEMENTS} == {*FORMATS} == {Spec.parse(spec).elements for spec in BASES}


@pytest.mark.parametrize("name", FORMATS)
@np.errstate(invalid="ignore")  # of NaNs
def test_rounding_to_elements(name):
    form = FORMATS[name]
    grid = form.values()
    middles = (grid[1:] + grid[:-1]) / 2
    x = torch.cat([bf16s(), beside(np.concatenate([grid, middles]).astype(np.float32))])
    for rounding, up in (("nearest", False), ("up", True)):
        want = oracle.decode(oracle.encode(x.numpy(), form, up=up), form)
        want = torch.from_numpy(np.where(np.isnan(x.numpy()), np.float32(np.nan), want))
        require_same(mf.lab.round_to(x, name, rounding), want, (name, rounding))
    places = np.searchsorted(grid, np.abs(x.numpy()), side="right") - 1
    want = torch.from_numpy(np.copysign(grid[places], x.numpy()).astype(np.float32))
    require_same(mf.lab.round_to(x, name, "down"), want.where(~x.isnan(), x), (name, "down"))


@np.errstate(invalid="ignore")
def test_rounding_to_powers_of_two():
    tensor = bf16s().abs()
    x = tensor.numpy()
    fraction, exponent = np.frexp(x.astype(np.float64))
    exact = fraction == 0.5
    # 2^(exponent - 1) <= x < 2^exponent. Of a tie, 1.5 times a power, codes decide: exponent + 127.
    to_upper = (fraction > 0.75) | ((fraction == 0.75) & (exponent % 2 == 1))
    for rounding, power in (
        ("down", exponent - 1),
        ("up", np.where(exact, exponent - 1, exponent)),
        ("nearest", np.where(to_upper, exponent, exponent - 1)),
    ):
        want = np.ldexp(1.0, np.clip(power, -127, 127))
        want = np.where(x == 0, 2.0**-127, np.where(np.isfinite(x), want, np.nan))
        got = mf.lab.round_to(tensor, "e8m0", rounding)
        require_same(got, torch.from_numpy(want.astype(np.float32)), rounding)


def test_rounding_to_a_grid():
    grid = torch.tensor([0.25, 1.0, 2.0, 7.0])
    x = torch.tensor([0.0, -0.0, 0.625, 1.5, 4.5, -4.6, 100.0, -math.inf, math.nan])
    want = torch.tensor([0.25, -0.25, 0.25, 2.0, 2.0, -7.0, 7.0, -7.0, math.nan])
    require_same(mf.lab.round_to(x, grid), want)
    ints = mf.lab.round_to(torch.arange(-20, 20) / 2, torch.arange(8.0))
    require_same(ints, (torch.arange(-20, 20) / 2).round().clamp(-7, 7))
    require_same(
        mf.lab.round_to(torch.tensor([3.0, -5.0]), torch.tensor([4.0])), torch.tensor([4.0, -4.0])
    )


def nearest(x, grid):
    """Returns the nearest value of a grid by exact fractions; of a tie that of an even place."""
    place = min(range(len(grid)), key=lambda i: (abs(Fraction(grid[i]) - Fraction(x)), i % 2))
    return grid[place]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "grid",
    [
        [0.0, 1e-30, 1.0, 1.0 + 2.0**-20, 3.0],  # sums that float64 cannot hold
        [2.0**-60, 1.0, 2.0, 2.0 + 2.0**-51, 2.0**60],
        [0.1, 0.3, 0.7, 1.1, 1.9, 5.3],
        [0.0, 5e-324, 1e-323, 2.0**-1022],
    ],
)
def test_magnitudes_around_ties_go_to_the_nearest(grid, dtype):
    middles = torch.tensor(grid, dtype=torch.float64)
    middles = ((middles[1:] + middles[:-1]) / 2).to(dtype)
    x = torch.cat([middles, middles.nextafter(middles * 0), middles.nextafter(middles + 1)])
    want = torch.tensor([nearest(each, grid) for each in x.tolist()], dtype=torch.float64)
    require_same(mf.lab.round_to(x, torch.tensor(grid, dtype=torch.float64)), want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_rounding_keeps_shape_and_dtype(dtype):
    x = torch.randn(3, 4, 5).to(dtype).mT.requires_grad_()
    got = mf.lab.round_to(x, "e4m3")
    assert not got.requires_grad
    require_same(got, mf.lab.round_to(x.detach().float(), "e4m3").to(dtype))
    assert mf.lab.round_to(x[:0], "e4m3").shape == (0, 5, 4)


# ---- Specs as rules ------------------------------------------------------------------------------


def amax_of(blocks):
    return blocks.abs().amax(-1, keepdim=True)


def quotient(number, amax):
    return (amax.new_tensor(number) / amax).clamp(max=torch.finfo(torch.float32).max)


def mx(elements, largest, rounding="up"):
    def cast(blocks):
        scale = mf.lab.round_to(amax_of(blocks) / largest, "e8m0", rounding)
        return scale * mf.lab.round_to(blocks / scale, elements)

    return cast


def nvfp4(rounding="nearest"):
    def cast(blocks):
        amax = amax_of(blocks)
        tensor = quotient(2688, amax.max())
        scale = mf.lab.round_to(amax * (tensor * (1 / 6)), "e4m3", rounding)
        codes = mf.lab.round_to(blocks * quotient(1, scale * (1 / tensor)), "e2m1")
        return torch.where(scale == 0, 0, codes) * scale * (1 / tensor)

    return cast


def fp8(blocks):
    amax = amax_of(blocks)
    encode = torch.where(amax == 0, 1, quotient(448, amax))
    encode = torch.where(amax.isfinite(), encode, torch.nan)
    return mf.lab.round_to(blocks * encode, "e4m3") * (1 / encode)


RULES = {
    "mxfp8": mf.lab.Rule(mx("e4m3", 448), (1, 32)),
    "mxfp8/e5m2": mf.lab.Rule(mx("e5m2", 57344), (1, 32)),
    "mxfp8/32x32": mf.lab.Rule(mx("e4m3", 448), (32, 32)),
    "mxfp4": mf.lab.Rule(mx("e2m1", 6), (1, 32)),
    "mxfp4+floor": mf.lab.Rule(mx("e2m1", 4, "down"), (1, 32)),
    "nvfp4": mf.lab.Rule(nvfp4(), (1, 16)),
    "nvfp4+up": mf.lab.Rule(nvfp4("up"), (1, 16)),
    "nvfp4/16x16": mf.lab.Rule(nvfp4(), (16, 16)),
    "e4m3/tensor": mf.lab.Rule(fp8, (-1, -1)),
    "e4m3/row+exact": mf.lab.Rule(fp8, (1, -1)),
}


@pytest.mark.parametrize("spec", RULES)
@pytest.mark.parametrize("kind", ["normal", "wide", "tiny", "sparse", "zeros", "special"])
def test_a_spec_as_a_rule_has_its_bits(spec, kind):
    for shape in ((48, 160), (7, 37), (2, 3, 45)):
        for columnwise in (False, True):
            x = values(kind, shape, 3) * (kind != "zeros")
            want = mf.tensor.dequantize(mf.tensor.quantize(x, spec, columnwise=columnwise))
            got = mf.lab.fake_quantize(x, RULES[spec], columnwise=columnwise)
            require_same(got, want, (spec, kind, shape, columnwise))
            assert got.isnan().any() or kind != "special" or x.numel() < 1000


# ---- Blocks --------------------------------------------------------------------------------------


def blocks_of(x, block, **options):
    """Returns the blocks that a rule gets, which writes to them, and what comes of the writes."""
    seen = []

    def cast(blocks):
        seen.append(blocks.clone())
        return blocks.mul_(10)

    before = x.clone()
    got = mf.lab.fake_quantize(x, mf.lab.Rule(cast, block), **options)
    require_same(x, before)
    return seen, got


def test_blocks_are_rows_filled_up_with_zeros():
    x = torch.arange(1.0, 16.0).view(3, 5)
    for block, want in (
        ((1, 2), [[1, 2], [3, 4], [5, 0], [6, 7], [8, 9], [10, 0], [11, 12], [13, 14], [15, 0]]),
        ((2, 4), [[1, 2, 3, 4, 6, 7, 8, 9], [5, 0, 0, 0, 10, 0, 0, 0]]),
        ((1, -1), x.tolist()),
        ((-1, -1), [list(range(1, 16))]),
    ):
        (blocks,), got = blocks_of(x, block)
        assert blocks[: len(want)].tolist() == want, block
        assert blocks.sum() == x.sum(), block
        require_same(got, 10 * x)
    (columns,), got = blocks_of(x, (1, 2), columnwise=True)
    assert columns[:2].tolist() == [[1, 6], [11, 0]]
    require_same(got, 10 * x.T)


def test_each_matrix_of_a_batch_is_cast_alone():
    x = torch.arange(12.0).view(3, 2, 2)
    seen, got = blocks_of(x, (-1, -1))
    assert [blocks.tolist() for blocks in seen] == x.flatten(1)[:, None].tolist()
    require_same(got, 10 * x)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0), (0, 2, 3), (2, 0, 3)])
def test_nothing_is_cast_to_nothing(shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    for rule in ("nvfp4", RULES["nvfp4"]):
        got = mf.lab.fake_quantize(x, rule, columnwise=True)
        assert got.shape == (*shape[:-2], shape[-1], shape[-2])
        assert got.dtype == torch.bfloat16


def test_names_of_rules():
    assert mf.lab.Rule(amax_of, (1, 16)).name == "amax_of"
    assert mf.lab.Rule(amax_of, (1, 16), "mine").name == "mine"
    assert mf.lab.Rule(torch.nn.Identity(), (1, 16)).name == "Identity"


# ---- Values and gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_a_spec(dtype):
    x = torch.randn(2, 40, 72).to(dtype)
    for spec in ("nvfp4", "nvfp4+sr", "mxfp4+rht32", "nvfp4+eden", "e4m3/row"):
        for columnwise in (False, True):
            options = {"columnwise": columnwise, "seed": 5, "stream": 6}
            want = mf.tensor.dequantize(mf.tensor.quantize(x, spec, **options), dtype)
            require_same(mf.lab.fake_quantize(x, spec, **options), want, spec)
    different = (mf.lab.fake_quantize(x, "nvfp4+sr", seed=seed) for seed in (1, 2))
    assert not torch.equal(*different)


@pytest.mark.parametrize("rule", ["nvfp4", RULES["nvfp4"]], ids=["spec", "rule"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_pass_through(rule, dtype):
    for shape, columnwise in (((40, 72), False), ((2, 40, 72), True)):
        x = torch.randn(shape).to(dtype).requires_grad_()
        y = mf.lab.fake_quantize(x, rule, columnwise=columnwise)
        assert y.dtype == dtype
        g = torch.randn(y.shape).to(dtype)
        (got,) = torch.autograd.grad(y, x, g)
        require_same(got, g.mT.contiguous() if columnwise else g)


def test_gradients_do_not_pass_through_a_transform():
    x = torch.randn(16, 32, requires_grad=True)
    for spec in ("mxfp4+rht", "nvfp4+eden"):
        with pytest.raises(ValueError, match="a spec without a transform for x that requires a gr"):
            mf.lab.fake_quantize(x, spec)
        with torch.no_grad():
            assert mf.lab.fake_quantize(x, spec).isfinite().all()


def test_a_learned_scale_is_refused_where_it_would_get_no_gradient():
    scale = torch.ones(1, requires_grad=True)
    learned = mf.lab.Rule(
        lambda blocks: scale * mf.lab.round_to(blocks / scale, "e2m1"), (1, 16), "learned"
    )
    for x in (torch.randn(4, 32), torch.randn(4, 32, requires_grad=True)):
        with pytest.raises(ValueError, match="rule learned: expected values without a gradient"):
            mf.lab.fake_quantize(x, learned)
        with torch.no_grad():
            assert not mf.lab.fake_quantize(x, learned).requires_grad
    frozen = mf.lab.Rule(
        lambda b: scale.detach() * mf.lab.round_to(b / scale.detach(), "e2m1"), (1, 16)
    )
    mf.lab.fake_quantize(x, frozen).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


# ---- Refusals ------------------------------------------------------------------------------------

X = torch.ones(4, 32)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: mf.lab.round_to([1.0], "e2m1"), TypeError, "x: expected a Tensor, got list"),
        (lambda: mf.lab.round_to(X.int(), "e2m1"), ValueError, "floating dtype, got torch.int32"),
        (
            lambda: mf.lab.round_to(X, "e3m2"),
            ValueError,
            "one of e2m1, e1m2, e4m3, e5m2, e8m0, got 'e3m2'",
        ),
        (
            lambda: mf.lab.round_to(X, [1.0]),
            TypeError,
            "grid: expected a format's name or a Tensor",
        ),
        (
            lambda: mf.lab.round_to(X, torch.tensor([0.0, 2, 1])),
            ValueError,
            r"rising .*\[0.0, 2.0, 1",
        ),
        (
            lambda: mf.lab.round_to(X, torch.tensor([-1.0, 1])),
            ValueError,
            "none negative and none ab",
        ),
        (
            lambda: mf.lab.round_to(X, torch.tensor([0, math.inf])),
            ValueError,
            "rising finite magnit",
        ),
        (
            lambda: mf.lab.round_to(X, torch.tensor([0, math.nan])),
            ValueError,
            "rising finite magnit",
        ),
        (lambda: mf.lab.round_to(X, torch.ones(0)), ValueError, r"magnitudes \(n\), .* got \[\]"),
        (lambda: mf.lab.round_to(X, torch.ones(1, 1)), ValueError, r"magnitudes \(n\)"),
        (
            lambda: mf.lab.round_to(X, "e2m1", "even"),
            ValueError,
            "one of nearest, up, down, got 'even",
        ),
        (
            lambda: mf.lab.Rule("mxfp4", (1, 32)),
            TypeError,
            "expected a function of blocks, got str",
        ),
        (lambda: mf.lab.Rule(amax_of, 32), TypeError, r"block: expected \(rows, cols\), got 32"),
        (lambda: mf.lab.Rule(amax_of, (1, 1.5)), TypeError, "block: expected an int, got 1.5"),
        (lambda: mf.lab.Rule(amax_of, (1, 0)), ValueError, r"positive sizes or -1, got \(1, 0\)"),
        (lambda: mf.lab.Rule(amax_of, (1, -2)), ValueError, "block: expected at least -1, got -2"),
        (lambda: mf.lab.Rule(amax_of, (1, 16), None), TypeError, "name: expected its text as str"),
        (lambda: mf.lab.fake_quantize([1.0], "mxfp4"), TypeError, "x: expected a Tensor, got list"),
        (
            lambda: mf.lab.fake_quantize(X[0], "mxfp4"),
            ValueError,
            r"\(rows, cols\) or .* got 1 dim",
        ),
        (lambda: mf.lab.fake_quantize(X.half(), "mxfp4"), ValueError, "got torch.float16"),
        (lambda: mf.lab.fake_quantize(X, "mxfp5"), ValueError, "'mxfp5' is not an operand"),
        (
            lambda: mf.lab.fake_quantize(X, amax_of),
            TypeError,
            "a spec or a mf.lab.Rule, got function",
        ),
        (lambda: mf.lab.fake_quantize(X, "mxfp4", columnwise=1), TypeError, "columnwise"),
        (lambda: mf.lab.fake_quantize(X, "mxfp4", seed=0.5), TypeError, "seed: expected an int"),
        (
            lambda: mf.lab.fake_quantize(X, "mxfp4", stream="a"),
            TypeError,
            "stream: expected an int",
        ),
        (
            lambda: mf.lab.fake_quantize(X, mf.lab.Rule(amax_of, (1, 16))),
            ValueError,
            r"rule amax_of: expected values of the blocks' shape \(8, 16\), got \(8, 1\)",
        ),
        (
            lambda: mf.lab.fake_quantize(X, mf.lab.Rule(lambda blocks: None, (1, 16))),
            TypeError,
            "rule <lambda>: expected a Tensor, got NoneType",
        ),
    ],
)
def test_refusals(call, error, match):
    with pytest.raises(error, match=match):
        call()
