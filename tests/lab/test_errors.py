"""mf.lab.errors: the inspector's numbers of any tensor, for specs and for rules in Python."""

import dataclasses
import math

import minifloat as mf
import pytest
import torch

from tests.lab.test_rules import RULES
from tests.support.same_bits import require_same

SPECS = ["e4m3/tensor", "mxfp8/32x32", "mxfp4", "nvfp4", "nvfp4+4over6", "nvfp4+rht", "nvfp4+eden"]


def matrix(rows=96, cols=160):
    torch.manual_seed(0)
    x = torch.randn(rows, cols) * 2.0 ** torch.randint(-20, 3, (rows, 1))
    x[:, 7] *= 100
    x[3] = 0
    return x


def test_errors_are_those_of_the_inspector():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(64, 48, bias=False), torch.randn(96, 64)
    (row,) = mf.inspect(layer, x, "nvfp4", loss=lambda m, b: m(b).square().mean()).rows
    weight = layer.weight.detach()
    for each, t, columnwise in (
        (row.operands[0], x, False),
        (row.operands[1], weight, False),
        (row.operands[3], weight, True),
    ):
        (found,) = mf.lab.errors(t, each.spec, columnwise=columnwise).rows
        assert dataclasses.replace(found, operand=each.operand) == each


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("spec", RULES)
def test_a_spec_as_a_rule_has_its_errors(spec, columnwise):
    """Values are equal, so each number that they tell is."""
    x = matrix()
    named = dataclasses.replace(RULES[spec], name="mine")
    want, got = mf.lab.errors(x, [spec, named], columnwise=columnwise).rows
    assert got.spec == "mine"
    assert math.isnan(got.saturated)
    assert math.isnan(got.zero_scales)
    known = {"spec": spec, "saturated": want.saturated, "zero_scales": want.zero_scales}
    assert dataclasses.replace(got, **known, scales=want.scales) == want
    assert got.scales == {}
    assert got.flushed > 0 or "fp4" not in spec
    assert got.outlier_channels == 1


def test_numbers_of_a_batch_are_sums():
    x = torch.stack([matrix(), 3 * matrix(), matrix().flip(0)])
    for rule in ("mxfp4", RULES["mxfp4"]):
        (whole,) = mf.lab.errors(x, rule).rows
        parts = [mf.lab.errors(each, rule).rows[0] for each in x]
        assert whole.elements == sum(part.elements for part in parts) == x.numel()
        assert whole.flushed == pytest.approx(sum(part.flushed for part in parts) / 3)
        assert whole.amax == x.abs().max()
        error = (
            mf.lab.fake_quantize(x, rule).double() - x
        ).square().sum() / x.double().square().sum()
        assert whole.snr_db == pytest.approx(-10 * math.log10(error), abs=1e-4)


def test_random_bits_are_those_of_the_cast():
    x = torch.randn(64, 64)
    for seed, stream in ((1, 2), (3, 4)):
        values = mf.lab.fake_quantize(x, "nvfp4+sr", seed=seed, stream=stream)
        error = (values - x).double().square().sum() / x.double().square().sum()
        (row,) = mf.lab.errors(x, "nvfp4+sr", seed=seed, stream=stream).rows
        assert row.snr_db == pytest.approx(-10 * math.log10(error), abs=1e-4)
    a, b = (mf.lab.errors(x, "nvfp4+sr", seed=seed).rows[0].snr_db for seed in (1, 2))
    assert a != b


@pytest.mark.parametrize("columnwise", [False, True])
def test_random_bits_of_a_batch_are_those_of_the_cast(columnwise):
    """Matrices of equal values draw different bits, by their place in the batch."""
    x = torch.randn(48, 80).expand(3, 48, 80).contiguous()
    for spec in ("mxfp4+sr", "nvfp4+sr", "e4m3/row+sr"):
        values = mf.lab.fake_quantize(x, spec, columnwise=columnwise, seed=5, stream=6)
        assert not torch.equal(values[0], values[1]), spec
        read = x.mT if columnwise else x
        error = (values - read).double().square().sum() / x.double().square().sum()
        (row,) = mf.lab.errors(x, spec, columnwise=columnwise, seed=5, stream=6).rows
        assert row.snr_db == pytest.approx(-10 * math.log10(error), abs=1e-5), spec


def test_exact_values_and_values_that_are_not_finite():
    same = mf.lab.Rule(lambda blocks: blocks, (1, 16))
    x = torch.ones(4, 32)
    assert [row.snr_db for row in mf.lab.errors(x, ["mxfp8", same]).rows] == [math.inf] * 2
    x[1, 2], x[3, 5] = math.inf, math.nan
    for row in mf.lab.errors(x, ["mxfp8", same]).rows:
        assert row.nonfinite == 2
        assert math.isnan(row.snr_db)


def test_the_tensor_stays_and_needs_no_gradient():
    x = matrix().bfloat16().requires_grad_()
    before = x.detach().clone()
    wrong = mf.lab.Rule(lambda blocks: blocks.mul_(0.5), (1, 16), "half")
    rows = mf.lab.errors(x, [*SPECS, wrong]).rows
    require_same(x.detach(), before)
    assert [row.spec for row in rows] == [*SPECS, "half"]
    assert rows[-1].snr_db == pytest.approx(20 * math.log10(2), abs=1e-4)


def test_zeros_have_the_amax_0():
    (row,) = mf.lab.errors(torch.zeros(2, 32), "mxfp8").rows
    assert math.copysign(1, row.amax) == 1


def test_the_table_has_a_line_a_rule():
    found = mf.lab.errors(matrix(), [*SPECS, RULES["nvfp4"]])
    titles, _, *lines = found.table().splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (titles, *lines)]
    assert [line[0] for line in cells[1:]] == [*SPECS, "cast"]
    rule = dict(zip(cells[0], cells[-1]))
    nvfp4 = dict(zip(cells[0], cells[1 + SPECS.index("nvfp4")]))
    unknown = {name for name, cell in rule.items() if cell == "-"}
    assert unknown == {"saturated", "zero scales", "scales 2^n: least, median, most"}
    assert all(rule[name] == nvfp4[name] for name in {*rule} - unknown - {"spec"})


@pytest.mark.parametrize(
    ("x", "rules", "options", "error", "match"),
    [
        ([1.0], "mxfp4", {}, TypeError, "errors: x: expected a Tensor, got list"),
        (torch.ones(32), "mxfp4", {}, ValueError, "got 1 dimensions"),
        (torch.ones(2, 32).double(), "mxfp4", {}, ValueError, "float32 or bfloat16, got torch.flo"),
        (torch.ones(0, 32), "mxfp4", {}, ValueError, r"x with elements, got shape \(0, 32\)"),
        (torch.ones(2, 32), [], {}, ValueError, "expected a spec or a mf.lab.Rule, got none"),
        (torch.ones(2, 32), 4, {}, TypeError, "expected a spec or a mf.lab.Rule, got int"),
        (
            torch.ones(2, 32),
            ["mxfp4", mf.Recipe("mxfp4")],
            {},
            TypeError,
            "a mf.lab.Rule, got Recipe",
        ),
        (torch.ones(2, 32), "mxfp5", {}, ValueError, "'mxfp5' is not an operand"),
        (torch.ones(2, 32), "bf16", {}, ValueError, "bf16 is the identity and has no codes"),
        (torch.ones(2, 32), "mxfp4", {"columnwise": 1}, TypeError, "columnwise: expected True or"),
        (torch.ones(2, 32), "mxfp4", {"seed": 1.5}, TypeError, "seed: expected an int, got 1.5"),
        (torch.ones(2, 32), "mxfp4", {"stream": "a"}, TypeError, "stream: expected an int, got 'a"),
    ],
)
def test_refusals(x, rules, options, error, match):
    with pytest.raises(error, match=match):
        mf.lab.errors(x, rules, **options)


@pytest.mark.parametrize("measure", [mf.lab.errors, mf.lab.fake_quantize])
@pytest.mark.parametrize("rule", ["mxfp4", RULES["nvfp4"]])
def test_an_expanded_batch_beyond_memory(measure, rule):
    """Refused before the first matrix is cast."""
    x = torch.ones(1, 17, 16).expand(2**39, 17, 16)
    with pytest.raises(RuntimeError, match=r"not enough memory|can.t allocate memory"):
        measure(x, rule)
