"""What a matched forward depends on may change later: the module then computes as its layers do.

The rows are those of tests/support/later_changes.py.
"""

import functools

import minifloat as mf
import pytest
import torch
from minifloat.nn.convert.reads import differs
from minifloat.nn.fuse.mlp import layers_read
from torch import nn

from tests.support.fused_models import WIDTH
from tests.support.later_changes import ROWS, module_of
from tests.support.same_bits import require_same


@pytest.mark.parametrize(("title", "change"), ROWS, ids=[row[0] for row in ROWS])
def test_a_change_of_what_was_matched(title, change, monkeypatch):
    models = [nn.Sequential(module_of(title)) for _ in range(2)]
    fused, unfused = models
    report = mf.quantize_(fused, "mxfp8", keep="nothing", fuse=True)
    mf.quantize_(unfused, "mxfp8", keep="nothing")
    assert [name for name, _ in report.fused] == ["0"], report.not_fused
    x = torch.randn(2, WIDTH)
    assert layers_read(fused[0], x)
    before = fused(x)
    found = []
    for model in models:
        with monkeypatch.context() as patch:
            change(model[0], patch)
            if model is fused:
                assert not layers_read(model[0], x)
            try:
                found.append(model(x))
            except Exception as error:  # of a change that breaks the forward
                found.append(repr(error))
    if isinstance(found[0], str):
        assert found[0] == found[1]
    else:
        require_same(*found)
        assert not torch.equal(found[0], before)


@pytest.mark.parametrize(
    ("got", "want", "is_other"),
    [
        (True, 1, True),
        (1, True, True),
        (1, 1.0, True),
        (0.0, -0.0, True),
        (float("nan"), float("nan"), True),  # it may be kept by identity alone
        (float(10**20), float(10**20), False),
        (10**20, 10**20, False),
        ("a b"[:1], "ab"[:1], False),
        ((1, (2.0, "a")), (1, (2.0, "a")), False),
        ((1, 0.0), (1, -0.0), True),
        ((1,), (1, 2), True),
        ([1], [1], False),
        ([1], [True], True),
        ({"a": (0.0,)}, {"a": (-0.0,)}, True),
        ({"a": 1}, {"b": 1}, True),
        ({1}, {1}, False),
        (functools.partial(int, 1), functools.partial(int, 1), False),
        (functools.partial(int, base=2), functools.partial(int, base=2.0), True),
        (-0j, 0j, True),
        (object(), object(), True),
    ],
)
def test_values_that_differ(got, want, is_other):
    assert differs(got, want) == is_other
    assert not differs(want, want)
