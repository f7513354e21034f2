"""Compiled code of a feed-forward that is one op follows what changes later, as eager code does.

Some changes no compiled code sees, of the layers one by one as little: a hook, or a name that is
written into a module's __dict__. There nothing is asked of the op.
"""

import minifloat as mf
import pytest
import torch
from torch import nn

from tests.support.fused_models import WIDTH
from tests.support.later_changes import ROWS, module_of

X = torch.linspace(-2, 2, 2 * WIDTH).view(2, WIDTH)


def model_of(title, fuse):
    torch.compiler.reset()
    model = nn.Sequential(module_of(title))
    report = mf.quantize_(model, "mxfp8", keep="nothing", fuse=fuse)
    assert len(report.fused) == fuse, report.not_fused
    return model


def outcome(run):
    """Returns the result, or None of an error: compiled code has errors of its own."""
    try:
        return run(X)
    except Exception:
        return None


def after(title, change, monkeypatch, *, fuse, compiled=True, first=True, fullgraph=True):
    """Returns what a model computes after a change; first: it has run before."""
    model = model_of(title, fuse)
    options = {"backend": "eager", "fullgraph": fullgraph}
    run = torch.compile(model, **options) if compiled else model
    if first:
        assert run(X) is not None
    with monkeypatch.context() as patch:
        change(model[0], patch)
        return outcome(run)


def is_same(a, b):
    return (a is None) == (b is None) and (a is None or torch.equal(a, b))


@pytest.mark.parametrize(("title", "change"), ROWS, ids=[row[0] for row in ROWS])
def test_a_change_after_the_first_call(title, change, monkeypatch):
    got = after(title, change, monkeypatch, fuse=True)
    want = after(title, change, monkeypatch, fuse=False, compiled=False)
    if not is_same(got, want):  # torch's own code does not see it either
        assert not is_same(after(title, change, monkeypatch, fuse=False), want)


FIRST = ("layer: forward", "dropout: p of the instance", "global", "act: __class__")


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(("title", "change"), [row for row in ROWS if row[0] in FIRST])
def test_a_change_before_the_first_call(title, change, fullgraph, monkeypatch):
    want = after(title, change, monkeypatch, fuse=False, compiled=False)
    options = {"fuse": True, "first": False, "fullgraph": fullgraph}
    got = after(title, change, monkeypatch, **options)
    assert want is not None
    assert is_same(got, want)
