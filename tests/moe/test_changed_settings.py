"""A setting that a foreign forward read raises an error where it changes after the conversion."""

import copy
import functools
import sys
from types import MethodType, SimpleNamespace

import minifloat as mf
import pytest
import torch
from torch import nn

from tests.moe.test_same_experts import Foreign
from tests.support.experts import relative_error


class Adjustable(Foreign):
    """Experts that scale nothing and drop nothing as they are built."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.drop = 1.0, nn.Dropout(0.0)
        self.config = SimpleNamespace(scale=1.0, unread=1)

    def weighted(self, y, weights):
        assert hasattr(self, "down_proj")
        assert hasattr(self, "hidden")
        y = y * self.factor * getattr(self, "late", 1.0) * self.config.scale
        if self.drop.p:
            y = self.drop(y)
        return y * weights


CHANGES = {
    "factor": lambda m: setattr(m, "factor", 2.0),
    "drop.p": lambda m: setattr(m.drop, "p", 0.5),
    "config.scale": lambda m: setattr(m.config, "scale", 2.0),
    "late": lambda m: setattr(m, "late", 2.0),
    "act_fn": lambda m: setattr(m, "act_fn", nn.GELU()),
    "act_fn.inplace": lambda m: setattr(m.act_fn, "inplace", True),
    "no hooks of drop": lambda m: m.drop.register_forward_hook(lambda *args: None),
    "drop.forward": lambda m: setattr(m.drop, "forward", lambda y: 2 * y),
    "_apply_gate": lambda m: setattr(m, "_apply_gate", lambda gate_up: gate_up[:, ::2]),
    f"{__name__}.Adjustable.weighted": None,
    f"{__name__}.Adjustable.forward": None,
}


# ---- what a forward reads elsewhere --------------------------------------------------------------

ALPHA, FLAG, ORDER, CONFIG = 1.0, True, [1.0, 2.0], SimpleNamespace(scale=1.0, nested={"low": 1.0})


class Constants:
    beta = 1.0


def scaled(y, factor=1.0, *, shift=0.0):
    return y * factor + shift


def halved(y):
    return y / 2


def enclosing():
    gamma = 1.0

    def enclosed(y, change=None):
        nonlocal gamma
        if change is not None:
            gamma = change
        return y * gamma

    def reading(y):
        return y * gamma

    return enclosed, reading


CHANGE_GAMMA, BY_GAMMA = enclosing()
BY_PARTIAL = functools.partial(scaled, factor=1.0)
FUNCTIONS = {"first": scaled}


class Scattered(Foreign):
    """Experts that read a value from each kind of place, and scale by 1 as they are built."""

    late_of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.finish = scaled

    def weighted(self, y, weights):
        y = BY_PARTIAL(BY_GAMMA(scaled(y))) * ALPHA * Constants.beta * CONFIG.scale
        y = FUNCTIONS["first"](self.finish(y)) * CONFIG.nested["low"] * ORDER[0]
        y = y * self.late_of_class * (1 if FLAG is True else 2) * getattr(CONFIG, "late", 1.0)
        try:
            late = LATE
        except NameError:
            late = 1.0
        return y * late * weights


HERE = sys.modules[__name__]
SCATTERED = {  # name in the error: change
    "ALPHA": lambda patch, m: patch.setattr(HERE, "ALPHA", 2.0),
    "FLAG": lambda patch, m: patch.setattr(HERE, "FLAG", 1),
    "ORDER": lambda patch, m: ORDER.__setitem__(0, 2.0),
    "LATE": lambda patch, m: patch.setattr(HERE, "LATE", 2.0, raising=False),
    "CONFIG": lambda patch, m: patch.setattr(HERE, "CONFIG", SimpleNamespace(**vars(DOUBLED))),
    "CONFIG.scale": lambda patch, m: patch.setattr(CONFIG, "scale", 2.0),
    "CONFIG.late": lambda patch, m: patch.setattr(CONFIG, "late", 2.0, raising=False),
    "CONFIG.nested": lambda patch, m: patch.setitem(CONFIG.nested, "low", 2.0),
    "Constants": lambda patch, m: patch.setattr(HERE, "Constants", SimpleNamespace(beta=2.0)),
    "Constants.beta": lambda patch, m: patch.setattr(Constants, "beta", 2.0),
    "scaled": lambda patch, m: patch.setattr(HERE, "scaled", halved),
    "scaled.__code__": lambda patch, m: patch.setattr(scaled, "__code__", doubled.__code__),
    "scaled.__defaults__": lambda patch, m: patch.setattr(scaled, "__defaults__", (2.0,)),
    "scaled.__kwdefaults__": lambda patch, m: patch.setitem(scaled.__kwdefaults__, "shift", 1.0),
    "FUNCTIONS": lambda patch, m: patch.setitem(FUNCTIONS, "first", halved),
    "BY_PARTIAL": lambda patch, m: patch.setitem(BY_PARTIAL.keywords, "factor", 2.0),
    "gamma of": lambda patch, m: CHANGE_GAMMA(0, 2.0),
    "late_of_class": lambda patch, m: setattr(m, "late_of_class", 2.0),
    "Scattered.late_of_class": lambda patch, m: patch.setattr(Scattered, "late_of_class", 2.0),
    "finish": lambda patch, m: setattr(m, "finish", halved),
    "weighted": lambda patch, m: setattr(m, "weighted", lambda y, weights: 2 * y),
    "forward": lambda patch, m: setattr(m, "forward", lambda x, *args: 2 * x),
}


def with_variable(value):
    def by_variable(y):
        return y if value is None else y * value

    return by_variable


BY_VARIABLE = with_variable(None)


class OneVariable(Foreign):
    """Experts that scale by a variable of an enclosing function."""

    def weighted(self, y, weights):
        return BY_VARIABLE(y) * weights


@pytest.mark.parametrize(
    ("before", "after"), [(1.0, None), (None, 2.0), (1.0, "empty"), (None, "empty")]
)
def test_any_change_of_an_enclosing_variable_raises(before, after, monkeypatch):
    function = with_variable(before)
    monkeypatch.setitem(globals(), "BY_VARIABLE", function)
    experts = converted(OneVariable())
    call(experts)
    (cell,) = function.__closure__
    if after == "empty":
        del cell.cell_contents
    else:
        cell.cell_contents = after
    got = "none" if after == "empty" else after
    text = rf"expected value of .*by_variable as at its conversion, got {got} instead of {before};"
    with pytest.raises(RuntimeError, match=text):
        call(experts)


def test_the_sign_of_a_zero_is_a_change():
    experts = converted(Adjustable())
    experts.drop.p = -0.0
    with pytest.raises(RuntimeError, match=r"drop.p as at its conversion, got -0.0 instead of 0.0"):
        call(experts)


DOUBLED = SimpleNamespace(scale=2.0, nested={"low": 1.0})


def doubled(y, factor=1.0, *, shift=0.0):
    return 2 * y


def converted(experts: nn.Module) -> nn.Module:
    mf.quantize_(nn.ModuleList([experts]), "mxfp8")
    assert hasattr(experts, "original"), "left out"
    return experts


@pytest.fixture
def restored():
    yield
    CHANGE_GAMMA(0, 1.0)
    ORDER[0] = 1.0


@pytest.mark.parametrize("name", SCATTERED)
def test_a_change_anywhere_is_followed_or_raises(name, monkeypatch, restored):
    plain = Scattered()
    experts = converted(copy.deepcopy(plain))
    before, expected = call(plain), call(experts)
    with monkeypatch.context() as patch:
        for module in (plain, experts):
            SCATTERED[name](patch, module)
        assert not torch.equal(call(plain), before)
        if name == "forward":  # of the instance: a call runs it, converted or not
            assert torch.equal(call(experts), call(plain))
        else:
            with pytest.raises(RuntimeError, match=rf"expected ([\w.]*\.)?{name}( .*)? as at its"):
                call(experts)
    if name.partition(".")[0] in ("ALPHA", "FLAG", "LATE", "CONFIG", "Constants", "scaled"):
        assert torch.equal(call(experts), expected)


def test_compiled_code_follows_places_outside_the_module(monkeypatch):
    experts = converted(Scattered())
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(call(compiled), call(experts))
    for name in ("ALPHA", "scaled.__defaults__", "scaled.__code__", "CONFIG.scale"):
        with monkeypatch.context() as patch:
            SCATTERED[name](patch, experts)
            with pytest.raises(RuntimeError, match=f"expected {name.rpartition('.')[2]} as at"):
                call(compiled)
        assert torch.equal(call(compiled), call(experts))


class Held:
    """An object whose method is an activation, or that is one."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, gate):
        self.calls += 1
        return torch.nn.functional.silu(gate)


COUNTED = []


def counting(gate, calls=COUNTED):
    calls.append(1)
    return torch.nn.functional.silu(gate)


def noisy(gate):
    return gate * torch.rand_like(gate)


SCALE = torch.ones(())


def by_tensor(gate):
    return torch.nn.functional.silu(gate) * SCALE


class Hooked(nn.SiLU):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda *args: args[-1].clamp(-1, 1))


ACTIVATIONS = {
    "object": (Held, "changes its attribute act_fn.calls"),
    "method": (lambda: MethodType(Held.__call__, Held()), "changes its attribute act_fn"),
    "default": (lambda: counting, "could change calls"),
    "partial": (lambda: functools.partial(counting), "could change calls"),
    "random": (lambda: noisy, "draws random numbers, by rand_like"),
    "tensor": (lambda: by_tensor, "reads SCALE, a Tensor that is no part of it"),
    "hook": (Hooked, "calls act_fn, which has a forward_hook"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_that_do_more_are_left_out(name):
    experts, (build, reason) = Foreign(), ACTIVATIONS[name]
    del experts.act_fn
    experts.act_fn = build()
    model = nn.ModuleDict({"experts": experts, "other": nn.Linear(32, 32)})
    skipped = dict(mf.quantize_(model, "mxfp8").skipped)
    assert reason in skipped["experts.down_proj"]
    assert COUNTED == []


class Clamped(nn.SiLU):
    """Differs from SiLU for large values alone, and has its class's name."""

    def forward(self, x):
        return super().forward(x.clamp(max=1))


Clamped.__name__ = "SiLU"


def test_an_activation_with_the_name_of_another_runs_itself():
    plain = Foreign()
    plain.act_fn = Clamped()
    for parameter in plain.parameters():
        parameter.data = parameter.data.sign() * 0.25  # exact in E4M3
    experts = copy.deepcopy(plain)
    recipe = "fprop=bf16*mxfp8 dgrad=bf16*bf16 wgrad=bf16*bf16"
    mf.quantize_(nn.ModuleList([experts]), recipe)
    assert hasattr(experts, "original")
    assert relative_error(call(experts), call(plain)) < 1e-5


def call(experts: nn.Module) -> torch.Tensor:
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    return experts(x, torch.arange(12).view(6, 2) % 4, torch.ones(6, 2))


def test_a_changed_setting_raises_and_names_itself(monkeypatch):
    model = nn.ModuleDict({"experts": Adjustable()})
    mf.quantize_(model, "mxfp8")
    experts = model["experts"]
    expected = call(experts)
    experts.config.unread = experts.remark = 2  # which the forward does not read
    assert torch.equal(call(experts), expected)
    for name, change in CHANGES.items():
        changed = experts
        with monkeypatch.context() as patch:
            if change is None:
                patch.setattr(Adjustable, name.rpartition(".")[2], lambda self, *args: args[0])
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
    mf.quantize_(nn.ModuleList([experts]), "mxfp8")
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(call(compiled), call(experts))
    experts.factor = 2.0
    with pytest.raises(RuntimeError, match="factor"):
        call(compiled)
    experts.factor = 1.0
    assert torch.equal(call(compiled), call(experts))


def test_what_an_activation_runs_besides_its_forward_still_runs():
    experts, seen = Foreign(), []
    mf.quantize_(nn.ModuleList([experts]), "mxfp8")
    plain = call(experts)
    experts.act_fn.register_forward_hook(lambda *args: seen.append(1) or 0 * args[-1])
    assert not torch.equal(call(experts), plain)
    assert seen
