"""A setting that a foreign forward read raises an error where it changes after the conversion."""

import copy
from types import SimpleNamespace

import minifloat as mf
import pytest
import torch
from torch import nn

from tests.moe.test_same_experts import Foreign


class Adjustable(Foreign):
    """Experts that scale nothing and drop nothing as they are built."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.drop = 1.0, nn.Dropout(0.0)
        self.config = SimpleNamespace(scale=1.0, unread=1)

    def weighted(self, y, weights):
        assert all(hasattr(self, name) for name in ("down_proj", "hidden"))
        y = y * self.factor * getattr(self, "late", 1.0) * self.config.scale
        if self.drop.p:
            y = self.drop(y)
        return y * weights


CHANGES = {
    "factor": lambda m: setattr(m, "factor", 2.0),
    "drop.p": lambda m: setattr(m.drop, "p", 0.5),
    "config.scale": lambda m: setattr(m.config, "scale", 2.0),
    "late": lambda m: setattr(m, "late", 2.0),
    "act_fn.__class__.forward": lambda m: setattr(m, "act_fn", nn.GELU()),
    "act_fn.inplace": lambda m: setattr(m.act_fn, "inplace", True),
    "original.weighted": None,
    "original.forward": None,
}


def call(experts: nn.Module) -> torch.Tensor:
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    return experts(x, torch.arange(12).view(6, 2) % 4, torch.ones(6, 2))


def test_a_changed_setting_raises_and_names_itself(monkeypatch):
    model = nn.ModuleDict({"experts": Adjustable()})
    mf.quantize_(model, "mxfp8", verbose=False)
    experts = model["experts"]
    expected = call(experts)
    experts.config.unread = experts.remark = 2  # which the forward does not read
    assert torch.equal(call(experts), expected)
    for name, change in CHANGES.items():
        changed = experts
        with monkeypatch.context() as patch:
            if change is None:
                patch.setattr(Adjustable, name.partition(".")[2], lambda self, *args: args[0])
            else:
                changed = copy.deepcopy(experts)
                change(changed)
            with pytest.raises(RuntimeError, match=rf"Adjustable: expected {name} as at .* got"):
                call(changed)
        assert torch.equal(call(experts), expected)
    experts.factor = 3.0
    mf.restore_(model)
    assert "_settings" not in experts.__dict__
    skipped = dict(mf.quantize_(nn.ModuleList([model, nn.Linear(32, 32)]), "mxfp8").skipped)
    assert "differs from minifloat's by 0.67" in skipped["0.experts.down_proj"]


def test_compiled_code_reads_the_settings_too():
    experts = Adjustable()
    mf.quantize_(nn.ModuleList([experts]), "mxfp8", verbose=False)
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(call(compiled), call(experts))
    experts.factor = 2.0
    with pytest.raises(RuntimeError, match="factor"):
        call(compiled)
    experts.factor = 1.0
    assert torch.equal(call(compiled), call(experts))


def test_what_an_activation_runs_besides_its_forward_still_runs():
    experts, seen = Foreign(), []
    mf.quantize_(nn.ModuleList([experts]), "mxfp8", verbose=False)
    plain = call(experts)
    experts.act_fn.register_forward_hook(lambda *args: seen.append(1) or 0 * args[-1])
    assert not torch.equal(call(experts), plain)
    assert seen
