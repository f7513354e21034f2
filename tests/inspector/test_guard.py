"""A guard leaves a step out whose gradients are not finite, as if it had not been taken."""

import copy
import math

import minifloat as mf
import pytest
import torch
from minifloat.inspector import StepGuard
from torch import nn

from tests.inspector.test_nonfinite import Explodes
from tests.support.guard_warnings import said_by
from tests.support.host_reads import HostReads
from tests.support.same_bits import require_all_same
from tests.support.sharded_models import batch, built

STEPS, BAD = 5, 2  # steps, and the one whose batch has an Inf

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True, amsgrad=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "fused sgd, dampening": lambda p: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, dampening=0.5, fused=True
    ),
    "fused adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
    "two": lambda p: [
        torch.optim.AdamW(p[:3], lr=1e-2, fused=True),
        torch.optim.SGD(p[3:], lr=1e-2, momentum=0.9),
    ],
    "groups": lambda p: torch.optim.AdamW(
        [{"params": p[:2]}, {"params": p[2:], "lr": 1e-3, "weight_decay": 0.1}], fused=True
    ),
}


def listed(optimizer):
    return optimizer if isinstance(optimizer, list) else [optimizer]


def train(model, optimizer, steps, guard=None):
    """Trains on finite batches, but for that of step BAD."""
    for step in steps:
        x = batch(step)
        if step == BAD:
            x[3, 5] = math.inf
        model(x).square().mean().backward()
        if guard is not None:
            guard.check()
        for each in listed(optimizer):
            each.step()
        for each in listed(optimizer):
            each.zero_grad()
        mf.step(model)


def train_guarded(model, optimizer, steps, on_nonfinite="skip"):
    with StepGuard(model, optimizer, on_nonfinite=on_nonfinite) as guard:
        train(model, optimizer, steps, guard)


def state_of(model, optimizer):
    """Returns all that a step changes."""
    found = {f"weights {n}": t for n, t in model.state_dict().items()}
    found |= {f"training {n}": t for n, t in mf.training_state(model).items()}
    for i, each in enumerate(listed(optimizer)):
        for j, states in each.state_dict()["state"].items():
            found |= {f"optimizer {i}, {j}, {n}": t for n, t in states.items() if t is not None}
    return found


@pytest.mark.parametrize("bad", [0, BAD])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_step_leaves_no_trace(name, bad, monkeypatch):
    """Weights, the optimizer's states and amax histories are those of a run without the step."""
    monkeypatch.setattr(f"{__name__}.BAD", bad)
    guarded, plain = built("fp8_delayed"), built("fp8_delayed")
    optimizer = OPTIMIZERS[name]([*guarded.parameters()])
    without = OPTIMIZERS[name]([*plain.parameters()])
    (text,) = said_by(lambda: train_guarded(guarded, optimizer, range(STEPS)))
    assert text.startswith(f"minifloat: step {bad + 1}: 12 of 12 gradients")
    assert text.endswith("The step is skipped")
    train(plain, without, [step for step in range(STEPS) if step != bad])
    require_all_same(state_of(guarded, optimizer), state_of(plain, without))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_guard_changes_no_finite_step(name):
    guarded, plain = built("fp8_delayed"), built("fp8_delayed")
    optimizer = OPTIMIZERS[name]([*guarded.parameters()])
    without = OPTIMIZERS[name]([*plain.parameters()])
    assert not said_by(lambda: train_guarded(guarded, optimizer, range(BAD)))
    train(plain, without, range(BAD))
    require_all_same(state_of(guarded, optimizer), state_of(plain, without))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_error_comes_before_the_step_is_applied(name):
    """In the step itself, or in the next one where nothing waits."""
    model = built("fp8_delayed")
    optimizer = OPTIMIZERS[name]([*model.parameters()])
    guard = StepGuard(model, optimizer, on_nonfinite="raise")
    train(model, optimizer, range(BAD), guard)
    before = copy.deepcopy(state_of(model, optimizer))
    with pytest.raises(FloatingPointError, match=rf"^step {BAD + 1}: .* The step was left out$"):
        train(model, optimizer, range(BAD, BAD + 2), guard)
    require_all_same(state_of(model, optimizer), before)
    assert guard.steps == BAD + 1
    for each in listed(optimizer):
        each.zero_grad()
    with pytest.raises(FloatingPointError, match=rf"^step {BAD + 2}: "):  # a caller may go on
        train(model, optimizer, range(BAD, BAD + 2), guard)
    require_all_same(state_of(model, optimizer), before)


def test_what_nothing_waits_for():
    """A fused optimizer's steps read nothing on the host but the flags of the step before."""
    model = built("fp8_delayed")
    optimizer = OPTIMIZERS["fused adamw"]([*model.parameters()])
    with StepGuard(model, optimizer, on_nonfinite="skip") as guard:
        train(model, optimizer, range(1), guard)
        with HostReads() as reads:
            model(batch(1)).square().mean().backward()
            guard.check()
            optimizer.step()
            mf.step(model)
    assert reads.found == ["__bool__"]


def test_the_last_step_is_reported_at_the_end():
    model = built("mxfp8")
    optimizer = OPTIMIZERS["fused adamw"]([*model.parameters()])
    with pytest.raises(FloatingPointError, match="step 1: "):
        train_guarded(model, optimizer, [BAD], "raise")


def test_an_error_of_the_loop_comes_first():
    model = built("mxfp8")
    optimizer = OPTIMIZERS["fused adamw"]([*model.parameters()])

    def run():
        with StepGuard(model, optimizer, on_nonfinite="raise") as guard:
            train(model, optimizer, [BAD], guard)
            raise KeyError("of the loop")

    with pytest.raises(KeyError, match="of the loop"):
        run()
    train(model, optimizer, [BAD])  # without a guard
    assert model.head.weight.isnan().any()


def test_the_balance_of_experts():
    torch.manual_seed(0)
    model = mf.MoE(64, 32, experts=4, top_k=2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = model.router.expert_bias.clone()
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    for is_bad in (True, False):
        y = model(torch.randn(40, 64))
        (y * (math.inf if is_bad else 1)).sum().backward()
        said = said_by(guard.check)
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
        assert torch.equal(model.router.expert_bias, before) == is_bad
        assert bool(model.router.step_counts.any()) != is_bad
    assert len(said) == 1


# ---- what the report names -----------------------------------------------------------------------


def loss_of(model, x):
    return model(x).square().mean()


def report(model, make_wrong, *, clips=False, loss=None, batches=()):
    """Returns the error of a step whose gradients are made wrong."""
    optimizer = torch.optim.AdamW(model.parameters())
    guard = StepGuard(model, optimizer, on_nonfinite="raise", loss=loss)
    loss_of(model, batch(0)).backward()
    make_wrong(model)
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with pytest.raises(FloatingPointError) as raised:
        guard.check(*batches)
    return str(raised.value)


def explode_after(layer):
    forward = layer.forward
    layer.forward = lambda x: Explodes.apply(forward(x))


def test_the_layer_that_comes_first_in_backward():
    model = nn.Sequential(*(nn.Linear(48, 48, bias=False) for _ in range(4)))
    mf.quantize_(model, "mxfp8", keep="nothing")
    explode_after(model[2])
    text = report(model, lambda _: None)
    assert "step 1: 3 of 4 gradients are not finite, the last in the model, where" in text
    assert "backward begins, that of 2.weight; none behind it is wrong: look at g of dgrad" in text


def spoil(model):
    model.blocks[1].down.weight.grad[0, 0] = math.nan


def test_a_gradient_alone():
    text = report(built("mxfp8"), spoil)
    assert "1 of 12 gradients are not finite" in text
    assert "where backward begins, that of blocks.1.down.weight; no other is wrong" in text
    assert "wgrad's product of g and x" in text


def test_clipping_before_a_check_hides_names():
    text = report(built("mxfp8"), spoil, clips=True)
    assert "12 of 12 gradients" in text
    assert "call check() before clipping" in text


def test_a_weight():
    model = built("mxfp8")
    with torch.no_grad():
        model.blocks[0].up.bias[3] = math.nan
    text = report(model, lambda _: None)
    assert "W is not finite: blocks.0.up.bias" in text


@pytest.mark.parametrize("name", ["adamw", "fused adamw"])
def test_batches_are_repeated(name):
    """That of the second micro-batch, with the weights that it had."""
    model = built("mxfp8")
    optimizer = OPTIMIZERS[name]([*model.parameters()])
    guard = StepGuard(model, optimizer, on_nonfinite="skip", loss=loss_of)

    def steps():
        for step in range(3):
            batches = [batch(2 * step), batch(2 * step + 1)]
            if step == 1:
                batches[1][0, 0] = math.inf
            for x in batches:
                loss_of(model, x).backward()
            guard.check(*batches)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    (text,) = said_by(steps)
    assert text.startswith("minifloat: step 2: ")
    assert "value in blocks.0.norm, x: 1 of 1152 values of micro-batch 1. The step" in text
    assert guard.steps == 3


def test_a_repetition_that_is_finite():
    text = report(built("mxfp8"), spoil, loss=loss_of, batches=[batch(0)])
    assert "Repeated, the batch has finite values alone" in text


def test_an_error_of_the_repetition():
    def loss(model, x):
        raise KeyError("of the loss")

    text = report(built("mxfp8"), spoil, loss=loss, batches=[batch(0)])
    assert "that of blocks.1.down.weight; no other is wrong" in text
    assert ". Repeating the batch raised KeyError: 'of the loss'. The step was left out" in text


def test_masters_have_no_names():
    """Their gradients are a weight's main_grad, as in docs/memory.md."""
    model = nn.Linear(4, 4, bias=False)
    master = nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.AdamW([master])
    master.grad = model.weight.main_grad = torch.full((4, 4), math.nan)
    guard = StepGuard(model, optimizer, on_nonfinite="raise")
    with pytest.raises(FloatingPointError, match=r"parameter 0 of the optimizer \(4, 4\)"):
        guard.check()


# ---- gradients of all kinds ----------------------------------------------------------------------


def test_sparse_empty_and_missing_gradients():
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4, sparse=True), "unread": nn.Linear(2, 2)})
    model.register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    sparse = torch.optim.SparseAdam([*model["embedding"].parameters()])
    rest = torch.optim.SGD([*model["unread"].parameters(), model.empty])
    before = copy.deepcopy(model.state_dict())
    guard = StepGuard(model, [sparse, rest], on_nonfinite="skip")
    for factor in (math.inf, 1):
        loss = model["embedding"](torch.tensor([1, 1, 5])).sum() * factor + model.empty.sum()
        loss.backward()
        assert model["embedding"].weight.grad.is_sparse
        said_by(guard.check)
        for optimizer in (sparse, rest):
            optimizer.step()
            optimizer.zero_grad()
        same = torch.equal(model["embedding"].weight, before["embedding.weight"])
        assert same == (factor == math.inf)
    assert guard.steps == 2


def test_a_step_without_any_gradient():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with StepGuard(model, optimizer, on_nonfinite="raise") as guard:
        guard.check()
        optimizer.step()
        model(torch.ones(2, 4)).sum().backward()
        guard.check()
        optimizer.step()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_value_that_is_not_finite(value):
    """Beside the largest finite ones, whose sums and squares overflow."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64):
        parameter = nn.Parameter(torch.zeros(5, 7, dtype=dtype))
        model = nn.ParameterList([parameter])
        optimizer = torch.optim.SGD(model, lr=0.0)
        guard = StepGuard(model, optimizer, on_nonfinite="raise")
        largest = torch.finfo(dtype).max
        parameter.grad = torch.full_like(parameter, largest)
        parameter.grad[3] = -largest
        guard.check()
        parameter.grad[1, 4] = complex(0, value) if dtype.is_complex else value
        with pytest.raises(FloatingPointError, match=r"step 2: .* that of 0; "):
            guard.check()
        guard.remove()


def test_gradients_of_two_dtypes():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    guard = StepGuard(model, optimizer, on_nonfinite="raise")
    model[1](model[0](torch.ones(2, 4)).bfloat16()).sum().backward()
    model[1].bias.grad[0] = math.nan
    with pytest.raises(FloatingPointError, match=r"backward begins, that of 1\.bias"):
        guard.check()


def values_of(model):
    """Returns parameters, of codes their values and codes."""
    found = {}
    for name, p in model.named_parameters():
        is_codes = isinstance(p, mf.QuantizedTensor)
        found[name] = p.dequantize() if is_codes else p.detach().clone()
        if is_codes:
            found[f"{name}, codes"] = p.rowwise.codes.clone()
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_primary_weights(fused):
    """Codes are not rounded again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    mf.quantize_(model, "mxfp8", primary=True, keep="nothing")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    before = values_of(model)
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    (model(torch.ones(2, 64)).sum() * math.inf).backward()
    said = said_by(guard.check)
    optimizer.step()
    mf.step(model)
    assert len(said) == 1  # codes are never stepped on a flag of the device
    guard.remove()
    require_all_same(values_of(model), before)


def test_a_closure_makes_the_gradients():
    """As Lightning passes one."""
    for fused in (False, True):
        model = built("mxfp8")
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        before = copy.deepcopy(model.state_dict())
        guard = StepGuard(model, optimizer, on_nonfinite="skip")

        def closure(factor, model=model, optimizer=optimizer, guard=guard):
            optimizer.zero_grad()
            loss = loss_of(model, batch(0)) * factor
            loss.backward()
            guard.check()
            return loss

        def steps(model=model, optimizer=optimizer, closure=closure, before=before):
            assert optimizer.step(lambda: closure(math.inf)) == math.inf
            require_all_same(model.state_dict(), before)
            optimizer.step(closure=lambda: closure(1))

        (text,) = said_by(steps)
        assert "step 1: 12 of 12" in text
        assert not torch.equal(model.head.weight, before["head.weight"])


def test_compiled_models_are_known_by_their_names():
    model = built("mxfp8")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = torch.optim.AdamW(compiled.parameters(), fused=True)
    guard = StepGuard(compiled, optimizer, on_nonfinite="raise")
    (compiled(batch(0)).sum() * math.inf).backward()
    guard.check()
    optimizer.step()
    mf.step(compiled)
    with pytest.raises(FloatingPointError, match=r"backward begins, that of head\.bias"):
        guard.remove()


@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_step(fused):
    """The optimizer's step, and the check with it."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    guard = StepGuard(model, optimizer, on_nonfinite="skip")

    def checked_step():
        guard.check()
        optimizer.step()

    step = torch.compile(checked_step, backend="aot_eager")
    said = []
    for factor in (1, math.inf, 1):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        (model(torch.ones(2, 8)).sum() * factor).backward()
        said.append(len(said_by(step)))
        assert torch.equal(model.weight, before) == (factor == math.inf)
    assert said == ([0, 0, 1] if fused else [0, 1, 0])


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_without_a_check_is_not_left_out(fused):
    """Whatever the last check has found."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    for factor in (math.inf, 1):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).sum() * factor).backward()
        if factor == math.inf:
            said_by(guard.check)
        optimizer.step()
        assert torch.equal(model.weight, before) == (factor == math.inf)


def test_optimizers_that_step_on_gradients_of_their_own():
    """As a generator and its critic: each is checked before its step."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = (torch.optim.SGD(layer.parameters(), lr=1.0) for layer in model)
    guard = StepGuard(model, [first, second], on_nonfinite="raise")
    model(torch.ones(2, 4)).sum().backward()
    guard.check()
    first.step()
    (model[1](torch.ones(2, 4)).sum() * math.inf).backward()  # adds to gradients that were read
    with pytest.raises(FloatingPointError, match=r"step 2: .* 1\.bias"):
        guard.check()


class OwnStep(torch.optim.AdamW):
    """It changes weights before the step of its base class, whose hooks are called too."""

    def step(self, closure=None):
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p.add_(p.grad)
        return super().step(closure)


def test_an_optimizer_with_a_step_of_its_own():
    torch.optim.AdamW([torch.zeros(1)])  # from now on the base class calls hooks
    model = nn.Linear(4, 4)
    optimizer = OwnStep(model.parameters(), fused=True)
    before = copy.deepcopy(model.state_dict())
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    (model(torch.ones(2, 4)).sum() * math.inf).backward()
    assert len(said_by(guard.check)) == guard.steps == 1
    optimizer.step()
    require_all_same(model.state_dict(), before)


# ---- what is refused -----------------------------------------------------------------------------


def test_arguments():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="on_nonfinite: expected one of raise, skip, got 'stop'"):
        StepGuard(model, optimizer, on_nonfinite="stop")
    with pytest.raises(TypeError, match=r"expected a torch\.optim\.Optimizer, .* got Linear"):
        StepGuard(model, [optimizer, model], on_nonfinite="skip")
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got SGD"):
        StepGuard(optimizer, optimizer, on_nonfinite="skip")
    with pytest.raises(TypeError, match="or a list of those, got an empty list"):
        StepGuard(model, [], on_nonfinite="skip")
    with pytest.raises(TypeError, match="loss: expected a function or None, got 3"):
        StepGuard(model, optimizer, on_nonfinite="skip", loss=3)
    with pytest.raises(TypeError, match="expected a process group"):
        StepGuard(model, optimizer, on_nonfinite="skip", group=3)
    guard = StepGuard(model, optimizer, on_nonfinite="skip")
    with pytest.raises(ValueError, match="expected a loss to repeat a batch with"):
        guard.check(torch.ones(2, 4))
    guard.remove()
    assert not optimizer._optimizer_step_post_hooks
    StepGuard(model, optimizer, on_nonfinite="skip")
