"""What a backward pass reads may change after its forward pass: each op of layers then returns the
gradients of the state that its forward read, or raises. Every tensor of every op is written to, and
its memory freed.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import Tensor, nn

from tests.support import layer_cases as cases
from tests.support.fused_models import FeedForward
from tests.support.layer_cases import ONE_RANK, Case, Options
from tests.support.same_bits import require_same, same_bytes

PARTLY = "fprop=mxfp8*mxfp8 dgrad=mxfp8*bf16 wgrad=mxfp8*bf16"
EDEN = "fprop=bf16*bf16 dgrad=nvfp4+eden*nvfp4+eden wgrad=nvfp4+eden*nvfp4+eden"
DELAYED = "fp8_delayed"
ALL = ["bf16", PARTLY, "mxfp8", "fp8_rowwise", "nvfp4", EDEN, DELAYED]
CODES = ["fp8_tensorwise", DELAYED]
AGAIN = {"recompute": "weight"}
CALLS = [
    (cases.linear_case, ALL, {}),
    (cases.linear_case, ALL, AGAIN),
    (cases.linear_case, CODES, {"has_codes": True}),
    (cases.linear_case, ["mxfp8", "nvfp4"], {"accumulate": "main_grad"}),
    (cases.linear_case, ["mxfp8", "nvfp4"], {"accumulate": "grad"}),
    (cases.linear_case, ALL, {"where": ONE_RANK}),
    (cases.linear_case, ["mxfp8", "nvfp4"], {"where": ONE_RANK, **AGAIN}),
    (cases.group_case, ALL, {}),
    (cases.mlp_case, ALL, {}),
    (cases.mlp_case, ALL, AGAIN),
    (cases.mlp_case, CODES, {"has_codes": True}),
    (cases.mlp_case, ["mxfp8"], {"accumulate": "main_grad"}),
    (cases.grouped_case, ALL, {}),
    (cases.grouped_case, ALL, AGAIN),
    (cases.grouped_case, CODES, {"has_codes": True}),
    (cases.grouped_case, ["mxfp8", "nvfp4"], {"where": ONE_RANK}),
    (cases.experts_case, ALL, {}),
    (cases.experts_case, CODES, {"has_codes": True}),
    (cases.experts_case, ["mxfp8", "nvfp4"], {"where": ONE_RANK, **AGAIN}),
    (cases.swiglu_case, ["bf16"], {}),
    (cases.rows_case, ["bf16"], {}),
]
IDS = [f"{make.__name__}-{'-'.join(options) or 'plain'}" for make, _, options in CALLS]
SUMS = ("main_grad", "grad")  # backward adds to what they are then


# ---- what changes --------------------------------------------------------------------------------
def write(t: Tensor) -> None:
    """Writes other values, as valid: indices in another order, other ends of groups."""
    with torch.no_grad():
        if t.dtype == torch.int64:  # (seed, count)
            t[1] += 1
        elif t.dtype == torch.int32 and t.shape == (cases.E,):  # the ends of groups
            t[:-1] -= 8
        elif t.is_floating_point() and t.dtype.itemsize > 1:
            t.mul_(-3)
        else:
            t.copy_(t.flip(-1).flip(0))


def roll(t: Tensor) -> None:
    ops.roll_amax_histories([t])


def free(t: Tensor) -> None:
    t.untyped_storage().resize_(0)


def changes_of(name: str) -> list[Callable[[Tensor], None]]:
    if "history" in name:
        return [write, free, roll]
    return [write] if name == "grad" else [write, free]


def other_results(build: Callable[[], Case]) -> Iterator[str]:
    """Yields the changes that gave other bits without an error."""
    case = build()
    want = case.backward(case.forward())
    for name in case.values:
        for change in changes_of(name):
            case = build()
            results = case.forward()
            change(case.values[name])
            expected = want
            if name.rstrip("0123456789") in SUMS and change is write:
                changed = build()
                change(changed.values[name])
                expected = changed.backward(changed.forward())
            try:
                got = case.backward(results)
            except (RuntimeError, ValueError):
                continue
            other = [key for key, t in got.items() if not same_bytes(t, expected[key])]
            if other:
                yield f"{change.__name__} {name}: other gradients of {other}"


@pytest.mark.parametrize("is_profiled", [False, True])
@pytest.mark.parametrize(("make", "recipes", "options"), CALLS, ids=IDS)
def test_gradients_are_of_what_forward_read(make, recipes, options, is_profiled):
    """A profiler turns off the shortcuts by which ops skip torch's dispatcher."""
    if is_profiled:
        recipes = [recipe for recipe in recipes if recipe in ("bf16", PARTLY, DELAYED)]
    wrong = []
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profiler if is_profiled else nullcontext():
        for recipe in recipes:
            found = other_results(lambda recipe=recipe: make(recipe, Options(**options)))
            wrong += [f"{recipe}: {what}" for what in found]
    assert not wrong, "\n".join(wrong)


WITHOUT_SUMS = [c for c in CALLS if "accumulate" not in c[2]]  # another pass would add to those


@pytest.mark.parametrize(("make", "recipes", "options"), WITHOUT_SUMS)
def test_passes_in_another_order_change_nothing(make, recipes, options):
    """Pipelines run the backward pass of a later forward first, which raises histories."""
    for recipe in recipes:
        case = make(recipe, Options(**options))
        want = case.backward(case.forward())
        case = make(recipe, Options(**options))
        first, second = case.forward(), case.forward()
        case.backward(second)
        for _, t in case.leaves():
            t.grad = None
        for name, t in case.backward(first).items():
            require_same(t, want[name], (recipe, name))


# ---- models --------------------------------------------------------------------------------------
def network(recipe: str, options: dict) -> nn.Module:
    """A feed-forward of its own weights, one as a single op, and experts."""
    torch.manual_seed(0)
    model = nn.Sequential(
        FeedForward(width=64, hidden=128),
        mf.MoE(64, 64, cases.E, 2, dtype=torch.float32),
        nn.Linear(64, 64),
    )
    mf.quantize_(model, recipe, keep="nothing", **options)
    allocate_sums(model)
    return model


def allocate_sums(model: nn.Module) -> None:
    for layer in model.modules():
        if getattr(layer, "accumulate", None):
            layer.weight.main_grad = torch.zeros(layer.weight.shape)


def inputs() -> Tensor:
    return cases.draw(48, 64)


def write_weights(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def load_weights(model: nn.Module) -> None:
    model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})


def load_training_state(model: nn.Module) -> None:
    other = deepcopy(model)
    allocate_sums(other)
    other(inputs()).sum().backward()
    mf.step(other)
    mf.load_training_state(model, mf.training_state(other))


def forward_and_step(model: nn.Module) -> None:
    model(inputs())
    mf.step(model)


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(inputs())
    model.train()


def take_other_weights(model: nn.Module) -> None:
    for layer in model.modules():
        if type(layer) is mf.Linear:
            layer.weight = nn.Parameter(layer.weight.detach().clone())


EVENTS = [mf.step, write_weights, load_weights, load_training_state, forward_and_step, evaluate]
EVENTS += [take_other_weights, mf.restore_]


def gradients_around(model: nn.Module, event: Callable[[nn.Module], None]) -> list[Tensor]:
    """Returns the gradients of a forward that an event follows."""
    leaves = list(model.parameters())
    sums = [p.main_grad for p in leaves if hasattr(p, "main_grad")]
    y = model(inputs())
    event(model)
    torch.autograd.backward(y, cases.draw(*y.shape, seed=1))
    return [p.grad for p in leaves if p.grad is not None] + sums


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", DELAYED])
@pytest.mark.parametrize(
    "options",
    [{}, {"recompute": "weight"}, {"fuse": True}, {"accumulate": "main_grad"}, {"primary": True}],
)
def test_models_give_the_gradients_of_their_forward(recipe, options):
    if recipe == DELAYED and "primary" in options:
        return  # codes scale by an amax of their own
    want = gradients_around(network(recipe, options), lambda model: None)
    for event in EVENTS:
        try:
            got = gradients_around(network(recipe, options), event)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), event  # noqa: PT017
            continue
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            require_same(a, b, (recipe, options, event.__name__, i))
