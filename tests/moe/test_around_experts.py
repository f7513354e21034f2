"""Converted experts of each form within what users put around modules: threads, parametrizations,
copies, torch.compile, torch.func. Their results are those of plain calls.
"""

import copy
import threading

import minifloat as mf
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.utils import parametrize, prune

from tests.moe.test_convert import BLOCKS, D, E, mixture, tokens
from tests.nn.test_threads import in_threads
from tests.support.foreign_experts import Batched

NAMED = {"*": ["inputs", "outputs"]}
FORMS = [*BLOCKS, "named"]


def build(name: str, recipe: str = "mxfp8") -> tuple[nn.Sequential, Tensor]:
    """Returns a model with converted experts, and its input."""
    torch.manual_seed(0)
    model = nn.Sequential(Batched() if name == "named" else BLOCKS[name]())
    mf.quantize_(model, recipe, keep="nothing", experts=NAMED if name == "named" else None)
    x = torch.randn(E, 6, D) if name == "named" else tokens()
    return model, x


def experts_of(model: nn.Sequential) -> nn.Module:
    return getattr(model[0], "experts", model[0])


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def parametrized(model: nn.Sequential) -> str:
    """Parametrizes the first 3D parameter of the experts; returns its name."""
    experts = experts_of(model)
    name = next(n for n, p in experts.named_parameters(recurse=False) if p.dim() == 3)
    parametrize.register_parametrization(experts, name, Double())
    return name


# ---- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_parametrized", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_a_thread_that_evaluates_takes_no_gradient_away(name, is_parametrized):
    model, x = build(name)
    if is_parametrized:
        parametrized(model)
    model(x).sum().backward()
    want = {n: p.grad for n, p in model.named_parameters()}
    ended = threading.Event()

    def evaluate() -> None:
        while not ended.is_set():
            with torch.no_grad():
                model(x)

    def train() -> None:
        try:
            for _ in range(20):
                model.zero_grad()
                model(x).sum().backward()
                for n, p in model.named_parameters():
                    assert (p.grad is None) == (want[n] is None), n
                    assert p.grad is None or torch.equal(p.grad, want[n]), n
        finally:
            ended.set()

    in_threads(evaluate, train, evaluate)


def test_products_are_numbered_in_each_thread(monkeypatch):
    """A forward that runs between two products of another one takes none of its products."""
    model, x = build("grouped_mm method", "fp8_delayed")
    model(x).sum().backward()
    mf.step(model)
    model.eval()
    with torch.no_grad():
        want = model(x)
        inner: list[Tensor] = []
        cls = type(experts_of(model))
        product = cls._grouped_mm

        def run_inside() -> None:
            with torch.no_grad():
                inner.append(model(x))

        def interrupted(self: nn.Module, **operands: Tensor) -> Tensor:
            y = product(self, **operands)
            if threading.current_thread() is threading.main_thread():
                thread = threading.Thread(target=run_inside)
                thread.start()
                thread.join()
            return y

        monkeypatch.setattr(cls, "_grouped_mm", interrupted)
        got = model(x)
    assert len(inner) == 3
    assert all(torch.equal(y, want) for y in (got, *inner))


def test_a_product_outside_a_forward_is_refused():
    model, x = build("grouped_mm method")
    experts, raised = experts_of(model), []
    model(x)
    operands = {"A": x, "B_t": experts.w1.mT, "offs": torch.full((E,), len(x), dtype=torch.int32)}

    def multiply() -> None:
        with pytest.raises(RuntimeError, match=r"got a call of _grouped_mm (\w+ .*)") as error:
            experts._grouped_mm(**operands)
        raised.append(str(error.value).partition("_grouped_mm ")[2])

    multiply()
    thread = threading.Thread(target=multiply)
    thread.start()
    thread.join()
    assert raised == ["after 3 of them", "outside its forward"]


# ---- parametrizations ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_parametrized_experts_are_copied_and_restored(name):
    model, x = build(name)
    original, _ = build(name)
    mf.restore_(original)
    parameter = parametrized(model)
    want = model(x)
    assert torch.equal(copy.deepcopy(model)(x), want)
    assert torch.equal(model(x), want)
    mf.restore_(model)
    assert parametrized(original) == parameter
    assert torch.equal(model(x), original(x))
    for each in (model, original):
        parametrize.remove_parametrizations(experts_of(each), parameter)
    assert type(experts_of(model)) is type(experts_of(original))
    assert torch.equal(model(x), original(x))


@pytest.mark.parametrize("matrix", ["w1", "w2", "all"])
@pytest.mark.parametrize("compute", [prune.identity, None])
def test_experts_with_a_computed_matrix_are_left_out_with_a_reason(matrix, compute):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), mixture())
    names = ["w1", "w3", "w2"] if matrix == "all" else [matrix]
    for name in names:
        if compute is None:
            parametrize.register_parametrization(model[1].experts, name, Double())
        else:
            compute(model[1].experts, name)
    report = mf.quantize_(model, "mxfp8", keep="nothing")
    assert "0" in dict(report.converted)
    reasons = dict(report.skipped)
    for name in ("w1", "w3", "w2"):
        why = reasons[f"1.experts.{name}"]
        assert why.endswith(f"which computes {' and '.join(names)} in each forward")
    found = mf.inspect(model, tokens(), ["mxfp8"], loss=lambda m, x: m(x).square().mean())
    assert "0" in {row.layer for row in found.rows}
    assert "1.experts.w3" in dict(found.skipped)


@pytest.mark.parametrize("fused", [False, True])
def test_inspect_leaves_converted_experts_with_a_computed_matrix_out(fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, D), mixture(fused_w13=fused))
    mf.quantize_(model, "mxfp8", keep="nothing")
    prune.identity(model[1].experts, "w13" if fused else "w2")
    found = mf.inspect(model, tokens(), loss=lambda m, x: m(x).square().mean())
    assert not any(row.layer.startswith("1.experts") for row in found.rows)
    reasons = dict(found.skipped)
    for name in model[1].experts.weight_names:
        assert reasons[f"1.experts.{name}"].endswith("weight is computed in each forward") or (
            reasons[f"1.experts.{name}"].startswith("another weight of its module is computed")
        )


# ---- torch.compile and torch.func ----------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_compiled_experts_equal_eager_ones(name):
    model, x = build(name)
    model(x)  # in eager mode first
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        want, got = model(x), compiled(x)
        assert torch.equal(got, want)
        of_eager = torch.autograd.grad(want.square().sum(), list(model.parameters()))
        of_compiled = torch.autograd.grad(got.square().sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(of_eager, of_compiled, strict=True))


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_tensorwise", "nvfp4"])
@pytest.mark.parametrize("name", FORMS)
def test_gradients_by_torch_func_are_autograds(name, recipe):
    model, x = build(name, recipe)
    model.eval()
    torch.manual_seed(1)
    x.requires_grad_()
    (want,) = torch.autograd.grad(model(x).square().sum(), x)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum()

    assert torch.equal(grad(loss)(x.detach()), want)
    if name != "named":  # whose code takes no batch
        found = vmap(grad(loss))(x.detach()[None])
        torch.testing.assert_close(found[0], want)
