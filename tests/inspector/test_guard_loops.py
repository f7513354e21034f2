"""A guard among other hooks, optimizers and loops than a plain one."""

import copy
import math
import warnings
import weakref

import minifloat as mf
import pytest
import torch
from minifloat.inspector import StepGuard
from minifloat.nn.state.guarded_steps import guards_of
from torch import nn

from tests.support.guard_warnings import said_by
from tests.support.same_bits import require_all_same
from tests.support.sharded_models import batch, built


def two_layers():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    return model, [torch.optim.SGD(layer.parameters(), lr=1.0) for layer in model]


def test_clipping_between_a_check_and_steps():
    """All are clipped at once, and each optimizer's alone."""
    model, optimizers = two_layers()
    guard = StepGuard(model, optimizers, on_nonfinite="skip")
    before = copy.deepcopy(model.state_dict())

    def step():
        (model(torch.ones(2, 4)).sum() * math.inf).backward()
        guard.check()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for layer, optimizer in zip(model, optimizers):
            nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()

    assert len(said_by(step)) == guard.steps == 1
    require_all_same(model.state_dict(), before)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_raise(fused):
    """The optimizer fails, and gradients of another number have other flags."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    before = copy.deepcopy(model.state_dict())
    guard = StepGuard(model, optimizer, on_nonfinite="skip")

    def fail(*_):
        raise KeyError("of a hook")

    handle = optimizer.register_step_pre_hook(fail)
    model[0](torch.ones(2, 4)).sum().backward()  # two of four gradients
    guard.check()
    with pytest.raises(KeyError):
        optimizer.step()
    handle.remove()
    for factor in (math.inf, 1):
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).sum() * factor).backward()
        said_by(guard.check)
        optimizer.step()
        assert torch.equal(model[0].weight, before["0.weight"]) == (factor == math.inf)


def test_rows_of_a_sparse_gradient_whose_sum_overflows():
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    before = model.weight.detach().clone()
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    (model(torch.tensor([1, 1])) * 3e38).sum().backward()
    assert not model.weight.grad.is_coalesced()
    said_by(guard.check)
    optimizer.step()
    assert torch.equal(model.weight, before)


def test_momentum_keeps_negative_zeros():
    """A first step of SGD keeps the gradient itself, and a weight of -0 minus -0 is +0."""
    steps = []
    for is_guarded in (False, True):
        model = nn.ParameterList([nn.Parameter(torch.full((8,), -0.0))])
        optimizer = torch.optim.SGD(model, lr=0.1, momentum=0.9, fused=True)
        model[0].grad = torch.full((8,), -0.0)
        if is_guarded:
            StepGuard(model, optimizer, on_nonfinite="raise").check()
        optimizer.step()
        momentum = optimizer.state[model[0]]["momentum_buffer"]
        steps.append((model[0].signbit().tolist(), momentum.signbit().tolist()))
    assert steps[0] == steps[1] == ([False] * 8, [True] * 8)


def test_a_check_of_a_step_that_was_given_up():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(model.state_dict())
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    model(torch.ones(2, 4)).sum().backward()
    guard.check()
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    said_by(guard.check)
    optimizer.step()
    require_all_same(model.state_dict(), before)


def test_an_optimizer_that_is_listed_twice():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    guard = StepGuard(model, [optimizer, optimizer], on_nonfinite="skip")
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    assert len(said_by(guard.check)) == guard.steps == 1


def test_a_new_guard_ends_the_one_before():
    """As where a run is interrupted and its model trained again; it reports what is left."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), fused=True)
    first = StepGuard(model, optimizer, on_nonfinite="skip")
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    first.check()
    outer, made = nn.Sequential(model), []
    assert len(said_by(lambda: made.append(StepGuard(outer, optimizer, on_nonfinite="skip")))) == 1
    first.remove()
    assert guards_of(model) == made
    assert len(optimizer._optimizer_step_post_hooks) == 1
    assert not hasattr(optimizer, "found_inf")
    with pytest.raises(ValueError, match="expected a guard in use, got one that has ended"):
        first.check()


def test_mf_step_of_a_module_around_the_guarded_one():
    model = built("fp8_delayed")
    outer = nn.ModuleDict({"first": nn.Linear(4, 4), "model": model})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(mf.training_state(outer))
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    x = batch(0)
    x[0, 0] = math.inf
    model(x).sum().backward()
    said_by(guard.check)
    optimizer.step()
    mf.step(outer)
    found = mf.training_state(outer)
    histories = [name for name in found if name.endswith("amax_history")]
    require_all_same({n: found[n] for n in histories}, {n: before[n] for n in histories})


class Pair:
    """Two models with a history, one optimizer each, and what trains both."""

    def __init__(self, fused):
        self.models = nn.ModuleList([built("fp8_delayed", seed) for seed in (1, 2)])
        self.optimizers = [
            torch.optim.AdamW(m.parameters(), lr=1e-2, fused=fused) for m in self.models
        ]

    def backward(self, i, step, is_bad=False):
        x = batch(step)
        if is_bad:
            x[0, 0] = math.inf
        self.models[i](x).square().mean().backward()

    def step(self, i):
        self.optimizers[i].step()
        self.optimizers[i].zero_grad()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("guards", ["one", "two"])
def test_checks_of_one_step_are_one(fused, bad, guards):
    """mf.step rolls no history where any check since the last one has left a step out."""
    pair = Pair(fused)
    if guards == "one":
        checks = [StepGuard(pair.models, pair.optimizers, on_nonfinite="skip").check] * 2
    else:
        pairs = zip(pair.models, pair.optimizers)
        checks = [StepGuard(m, o, on_nonfinite="skip").check for m, o in pairs]
    for step in range(3):
        before = copy.deepcopy(mf.training_state(pair.models))
        for i in range(2):
            pair.backward(i, step, is_bad=step == 1 and i == bad)
            said_by(checks[i])
            pair.step(i)
        said_by(lambda: mf.step(pair.models))
        state = mf.training_state(pair.models)
        for name, history in state.items():
            if name.endswith("amax_history"):
                assert history.isfinite().all()
                kept = torch.equal(history[:, 0], before[name][:, 0])
                assert kept == (step == 1), (name, step)
    said_by(lambda: [guard.remove() for guard in guards_of(pair.models)])
    assert all(p.isfinite().all() for p in pair.models.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_a_left_out_step_reach_no_later_check(fused):
    """The first optimizer skips a step, and the second steps twice before the first has others."""
    pair, plain = Pair(fused), Pair(fused)
    guard = StepGuard(pair.models, pair.optimizers, on_nonfinite="skip")

    def train(job, turns, check=lambda: None):
        for step, i in turns:
            job.optimizers[i].zero_grad()
            job.backward(i, step, is_bad=step == 2)
            check()
            job.optimizers[i].step()
            mf.step(job.models)

    turns = [*enumerate([0, 1, 0, 1, 1, 0])]
    (text,) = said_by(lambda: [train(pair, turns, guard.check), guard.remove()])
    assert text.startswith("minifloat: step 3: ")
    train(plain, [turn for turn in turns if turn[0] != 2])
    for i in range(2):
        require_all_same(pair.models[i].state_dict(), plain.models[i].state_dict())
        states = [job.optimizers[i].state_dict()["state"] for job in (pair, plain)]
        require_all_same(*({(j, n): t[j][n] for j in t for n in t[j]} for t in states))


def test_gradients_that_are_inference_tensors():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    made = [torch.optim.SGD(m.parameters(), lr=1.0, fused=True) for m in model]
    guard = StepGuard(model, made, on_nonfinite="skip")
    with torch.inference_mode():
        for p in model.parameters():
            p.grad = torch.full_like(p, math.nan)
    guard.check()
    for optimizer in made:
        optimizer.step()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


@pytest.mark.parametrize(("on_nonfinite", "optimizers"), [("raise", 2), ("skip", 1)])
def test_gradients_that_stay_as_they_are(on_nonfinite, optimizers):
    """Under "raise", for whoever looks for the fault; and of one optimizer, which need no write."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parameters = [[*model.parameters()]] if optimizers == 1 else [m.parameters() for m in model]
    made = [torch.optim.SGD(p, lr=1.0, fused=True) for p in parameters]
    guard = StepGuard(model, made, on_nonfinite=on_nonfinite)
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    guard.check()
    for optimizer in made:
        optimizer.step()
    assert not any(p.grad.isfinite().all() for p in model.parameters())


def test_a_step_after_the_one_that_was_left_out_is_whole():
    model = built("fp8_delayed")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    for is_checked in (True, False):
        before = copy.deepcopy(mf.training_state(model))
        (model(batch(0)).sum() * (math.inf if is_checked else 1)).backward()
        if is_checked:
            said_by(guard.check)
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
        name = "head.amax_history"
        assert torch.equal(mf.training_state(model)[name], before[name]) == is_checked


@pytest.mark.parametrize("change", ["load_state_dict", "add_param_group"])
def test_an_optimizer_that_is_no_longer_fused(change):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=1.0, momentum=0.9, fused=True)
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    if change == "load_state_dict":
        plain = torch.optim.SGD(model[0].parameters(), lr=1.0, momentum=0.9)
        optimizer.load_state_dict(plain.state_dict())
    else:
        more = {"params": [*model[1].parameters()], "dampening": 0.5}
        optimizer.add_param_group(more)
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="expected optimizers that are fused, as when the guard"):
        guard.check()
    StepGuard(model, optimizer, on_nonfinite="skip").check()
    optimizer.step()


def test_a_warning_that_is_an_error_comes_after_the_gradients_are_dropped():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(model.state_dict())
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="2 of 2 gradients"):
            guard.check()
    optimizer.step()
    require_all_same(model.state_dict(), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype(dtype):
    """The flag is float32, as fused optimizers take it."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    torch.set_default_dtype(dtype)
    try:
        guard = StepGuard(model, optimizer, on_nonfinite="skip")
        model(torch.ones(2, 4, dtype=torch.float32)).sum().backward()
        guard.check()
        optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_gradient_that_is_conjugated():
    model = nn.ParameterList([nn.Parameter(torch.zeros(3, dtype=torch.complex64))])
    guard = StepGuard(model, torch.optim.SGD(model), on_nonfinite="raise")
    model[0].grad = torch.full((3,), complex(1, math.nan), dtype=torch.complex64).conj()
    with pytest.raises(FloatingPointError, match="1 of 1 gradients"):
        guard.check()


def test_a_frozen_weight_is_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False).weight[0, 0] = math.nan
    guard = StepGuard(model, torch.optim.SGD(model[1].parameters()), on_nonfinite="raise")
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(FloatingPointError, match=r"W is not finite: 0\.weight"):
        guard.check()


@pytest.mark.parametrize("fused", [False, True])
def test_batches_are_kept_until_the_report(fused):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    guard = StepGuard(model, optimizer, on_nonfinite="skip", loss=lambda m, x: m(x).sum())
    x = torch.ones(2, 4)
    kept = weakref.ref(x)
    model(x).sum().backward()
    guard.check(x)
    optimizer.step()
    del x
    assert (kept() is not None) == fused
    guard.remove()
    assert kept() is None


@pytest.mark.parametrize("fused", [False, True])
def test_mf_step_of_the_parts_of_a_guarded_model(fused):
    pair = Pair(fused)
    guard = StepGuard(pair.models, pair.optimizers, on_nonfinite="skip")
    for step in range(3):
        before = copy.deepcopy(mf.training_state(pair.models))
        for i in range(2):
            pair.backward(i, step, is_bad=step == 1)
        said_by(guard.check)
        for i in range(2):
            pair.step(i)
            said_by(lambda i=i: mf.step(pair.models[i]))
        for name, history in mf.training_state(pair.models).items():
            if name.endswith("amax_history"):
                assert history.isfinite().all()
                assert torch.equal(history[:, 0], before[name][:, 0]) == (step == 1)
    guard.remove()


@pytest.mark.parametrize("fused", [False, True])
def test_mf_step_after_the_last_guarded_step(fused):
    model = built("fp8_delayed")
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with StepGuard(model, optimizer, on_nonfinite="skip") as guard:
            (model(batch(0)) * math.inf).sum().backward()
            guard.check()
            optimizer.step()
    mf.step(model)
    assert all(t.isfinite().all() for t in mf.training_state(model).values())


class Masters(torch.optim.SGD):
    """Has an optimizer of fp32 copies, to which it copies gradients in its step."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=1.0)
        self.copies = [nn.Parameter(p.detach().clone()) for p in self.param_groups[0]["params"]]
        self.optimizer = torch.optim.SGD(self.copies, lr=1.0)

    def step(self, closure=None):
        for p, own in zip(self.param_groups[0]["params"], self.copies):
            own.grad = p.grad
        self.optimizer.step()
        for p, own in zip(self.param_groups[0]["params"], self.copies):
            p.data.copy_(own)


def with_own_step(parameters):
    optimizer = torch.optim.SGD(parameters, lr=1.0, fused=True)
    step = optimizer.step

    def decayed():
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                p.data.add_(p.grad)
        step()

    optimizer.step = decayed
    return optimizer


@pytest.mark.parametrize("make", [Masters, with_own_step])
def test_optimizers_around_others(make):
    """Their own parameters are looked at, and their steps wait for the flag."""
    model = nn.Linear(4, 4)
    optimizer = make([*model.parameters()])
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    before = copy.deepcopy(model.state_dict())
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    assert len(said_by(guard.check)) == 1
    optimizer.step()
    require_all_same(model.state_dict(), before)


def test_models_that_share_a_module():
    """Each has a guard, and a model around both ends them."""
    shared = nn.Linear(4, 4)
    models = [nn.Sequential(shared, nn.Linear(4, 4)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model[1].parameters()) for model in models]
    first, second = (StepGuard(*pair, on_nonfinite="skip") for pair in zip(models, optimizers))
    first.check()
    second.check()
    assert guards_of(models[0]) == [first]
    assert guards_of(shared) == [first, second]
    whole = StepGuard(nn.ModuleList(models), optimizers, on_nonfinite="skip")
    assert guards_of(shared) == guards_of(models[1]) == [whole]


@pytest.mark.parametrize("fused", [False, True])
def test_a_check_in_inference_mode(fused):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    with torch.inference_mode():
        guard = StepGuard(model, optimizer, on_nonfinite="raise")
    guard.check()  # without gradients
    for is_inference in (True, False, True):
        model(torch.ones(2, 8)).sum().backward()
        with torch.inference_mode(is_inference):
            guard.check()
        optimizer.step()
        optimizer.zero_grad()
    model(torch.full((2, 8), math.inf)).sum().backward()

    def check_and_report():
        guard.check()
        guard.report()

    with (
        torch.inference_mode(),
        pytest.raises(FloatingPointError, match="step 5: 1 of 2 gradients"),
    ):
        check_and_report()
