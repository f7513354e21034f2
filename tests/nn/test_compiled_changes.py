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


class DoubledLinear(mf.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def doubles(module, patch):
    forward = module.w1.forward
    module.w1.forward = lambda x: forward(x) * 2


def always(module):
    return True


LAYERS = [
    ("layer: forward", always, doubles),
    ("layer: a bound forward", always, lambda m, p: setattr(m.w1, "forward", m.w3.forward)),
    ("layer: __class__", always, lambda m, p: setattr(m.w1, "__class__", DoubledLinear)),
    ("layer: another", always, lambda m, p: setattr(m, "w1", m.w3)),
    ("layer: recipe", always, lambda m, p: setattr(m.w1, "recipe", "fp8_rowwise")),
    (
        "class default: instance",
        lambda m: m.default == "silu",
        lambda m, p: setattr(m, "default", "relu"),
    ),
    (
        "class default: class",
        lambda m: m.default == "silu",
        lambda m, p: p.setattr(type(m), "default", "relu", raising=False),
    ),
]
TITLES = (  # one of each kind of read
    "hasattr of the module: an attribute",
    "hasattr of a submodule: a property",
    "submodule: _parameters",
    "submodule: all others",
    "class attribute: instance",
    "class attribute: nearer class",
    "settings: attribute",
    "settings: __class__",
    "class: metaclass",
    "property: code",
    "method: instance",
    "call: forward of the instance",
    "call: forward of a nearer class",
    "call: class",
    "a keyword's default",
    "cell",
    "partial: a keyword",
    "global",
    "builtin",
    "keys of a container",
    "dict",
    "0.0 to -0.0",
)
CHANGES = LAYERS + [row for row in ROWS if row[0] in TITLES]
assert len(CHANGES) == len(LAYERS) + len(TITLES)


def model_of(condition, fuse):
    torch.compiler.reset()
    module = module_of(condition)
    type(module).default = "silu"
    model = nn.Sequential(module)
    report = mf.quantize_(model, "mxfp8", keep="nothing", fuse=fuse)
    assert len(report.fused) == fuse, report.not_fused
    return model


def outcome(run):
    """Returns the result, or None of an error: compiled code has errors of its own."""
    try:
        return run(X)
    except Exception:
        return None


def after(condition, change, monkeypatch, *, fuse, compiled=True, first=True, fullgraph=True):
    """Returns what a model computes after a change; first: it has run before."""
    model = model_of(condition, fuse)
    options = {"backend": "eager", "fullgraph": fullgraph}
    run = torch.compile(model, **options) if compiled else model
    if first:
        assert run(X) is not None
    with monkeypatch.context() as patch:
        change(model[0], patch)
        return outcome(run)


def is_same(a, b):
    return (a is None) == (b is None) and (a is None or torch.equal(a, b))


@pytest.mark.parametrize(("_", "condition", "change"), CHANGES, ids=[row[0] for row in CHANGES])
def test_a_change_after_the_first_call(_, condition, change, monkeypatch):
    got = after(condition, change, monkeypatch, fuse=True)
    want = after(condition, change, monkeypatch, fuse=False, compiled=False)
    if not is_same(got, want):  # torch's own code does not see it either
        assert not is_same(after(condition, change, monkeypatch, fuse=False), want)


def before_the_first_call():
    names = ("cell", "layer: forward", "class default: instance", "global", "partial: a keyword")
    return [row for row in CHANGES if row[0] in names]


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(
    ("_", "condition", "change"),
    before_the_first_call(),
    ids=[row[0] for row in before_the_first_call()],
)
def test_a_change_before_the_first_call(_, condition, change, fullgraph, monkeypatch):
    want = after(condition, change, monkeypatch, fuse=False, compiled=False)
    options = {"fuse": True, "first": False, "fullgraph": fullgraph}
    got = after(condition, change, monkeypatch, **options)
    assert want is not None
    assert is_same(got, want)


def test_a_closure_of_the_forward():
    """Compiled code can read a variable of an enclosing function through a function alone."""
    row = next(row for row in ROWS if row[0] == "cell")
    model = model_of(row[1], True)
    run = torch.compile(model, backend="eager", fullgraph=True)
    cell = model[0].closed.__closure__[0]
    found = []
    for kind in ("silu", "relu", "silu"):
        cell.cell_contents = kind
        found.append(run(X))
        assert torch.equal(found[-1], model(X))
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])
