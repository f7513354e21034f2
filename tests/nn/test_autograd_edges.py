"""Autograd's edges: second derivatives of quantized products are errors, and tensors that backward
reads must not change before it.
"""

import minifloat as mf
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch._dynamo import compiled_autograd

from tests.support import layer_cases as cases
from tests.support.layer_cases import Options

K, N = 32, 16
RNG = torch.tensor([1, 2, 3])
RECIPES = ["mxfp8", "nvfp4", "fp8_tensorwise", "fp8_rowwise_gw_hp"]
NO_SECOND = "no second derivative through a quantized product"
NO_FORWARD = "forward-mode|forward AD"


def data():
    torch.manual_seed(0)
    return torch.randn(8, K, requires_grad=True), torch.randn(N, K, requires_grad=True)


def linear(x, w, recipe):
    return mf.linear(x, w, None, recipe, rng=RNG)


# ---- second derivatives --------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_second_derivative_inside_a_larger_graph_is_an_error(recipe):
    x, w = data()
    y = linear(torch.tanh(x), w, recipe)
    dx = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)[0]
    for target in (w, x):
        with pytest.raises(RuntimeError, match=NO_SECOND):
            torch.autograd.grad(dx.pow(2).sum(), target, allow_unused=True, retain_graph=True)
    group = mf.functional.linear_group(x, [w, 2 * w], None, recipe, rng=[RNG, RNG])
    dw = torch.autograd.grad(sum(t.pow(2).sum() for t in group), w, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=NO_SECOND):
        dw.sum().backward()


def test_a_gradient_penalty_on_a_residual_mlp_is_an_error():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(K, K), nn.Tanh(), nn.Linear(K, K))
    mf.quantize_(mlp, "mxfp8")
    x = torch.randn(4, K, requires_grad=True)
    dx = torch.autograd.grad((x + mlp(x)).pow(2).sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=NO_SECOND):
        dx.pow(2).mean().backward()


def test_graph_of_the_backward_pass_alone_changes_no_byte():
    x, w = data()
    want = torch.autograd.grad(linear(x, w, "nvfp4").sum(), (x, w))
    got = torch.autograd.grad(linear(x, w, "nvfp4").sum(), (x, w), create_graph=True)
    for a, b in zip(got, want):
        assert torch.equal(a, b)
    # The part of a second derivative that does not pass through the product is there.
    scale = torch.tensor(2.0, requires_grad=True)
    dx = torch.autograd.grad(linear(x, w, "mxfp8").sum() + (scale * x).sum(), x, create_graph=True)
    assert dx[0].requires_grad


@pytest.mark.parametrize("function", ["hessian", "hvp"])
def test_hessians_are_errors(function):
    _, w = data()
    x = torch.randn(2, K)

    def loss(x):
        return mf.linear(torch.tanh(x), w, None, "mxfp8").pow(2).sum()

    arguments = (x, x) if function == "hvp" else (x,)
    with pytest.raises(RuntimeError, match=NO_SECOND):
        getattr(torch.autograd.functional, function)(loss, *arguments)


def test_compiled_second_derivatives_are_errors():
    layer = mf.Linear(K, N, recipe="mxfp8")
    compiled = torch.compile(lambda x: layer(torch.tanh(x)), backend="aot_eager", fullgraph=True)
    x = data()[0]
    dx = torch.autograd.grad(compiled(x).pow(2).sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"double backward|second derivative"):
        dx.pow(2).sum().backward()


def calls_of_each_function():
    """Yields an eager result of each autograd function of layers."""
    for make in (cases.linear_case, cases.mlp_case, cases.grouped_case, cases.experts_case):
        yield make("mxfp8", Options(tokens=32)).forward()[0]


def test_compiled_autograd_over_an_eager_forward_is_an_error():
    for y in calls_of_each_function():
        with (
            compiled_autograd._enable(torch.compile(backend="aot_eager")),
            pytest.raises(NotImplementedError, match="expected a compiled forward under compiled"),
        ):
            y.sum().backward()


def test_compiled_autograd_over_a_compiled_forward_gives_eager_gradients():
    layer, x = mf.Linear(K, N, recipe="mxfp8"), data()[0].detach()
    layer(x).sum().backward()
    want, layer.weight.grad = layer.weight.grad, None
    y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    with compiled_autograd._enable(torch.compile(backend="aot_eager")):
        y.sum().backward()
    assert torch.equal(layer.weight.grad, want)


# ---- forward mode --------------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["x", "weight", "bias"])
def test_a_tangent_is_an_error(of):
    x, w = (t.detach() for t in data())
    inputs = {"x": x, "weight": w, "bias": torch.zeros(N)}
    with forward_ad.dual_level():
        inputs[of] = forward_ad.make_dual(inputs[of], torch.ones_like(inputs[of]))
        with pytest.raises(NotImplementedError, match=NO_FORWARD):
            mf.linear(**inputs, recipe="mxfp8")
        inputs[of] = inputs[of].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=NO_FORWARD):
            mf.linear(**inputs, recipe="mxfp8")


@pytest.mark.parametrize("needs_grad", [False, True])
def test_jvp_and_forward_hessians_are_errors(needs_grad):
    x, w = data()
    x, w = x.detach(), w.requires_grad_(needs_grad)

    def run(x):
        return mf.linear(x, w, None, "mxfp8")

    with pytest.raises((NotImplementedError, RuntimeError), match=NO_FORWARD + "|functorch"):
        torch.func.jvp(run, (x,), (torch.ones_like(x),))
    with pytest.raises(RuntimeError, match=NO_SECOND):
        torch.autograd.functional.jvp(run, x, torch.ones_like(x))


def test_a_layers_tangent_is_an_error_in_compiled_code_too():
    layer = mf.Linear(K, N, recipe="mxfp8").requires_grad_(False)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(8, K)
    for run in (layer, compiled):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            with pytest.raises(Exception, match=NO_FORWARD):
                run(dual)


def test_a_product_by_itself_has_no_derivative():
    x, w = data()
    q = mf.tensor.quantize(w.detach(), "mxfp8")
    y = mf.tensor.scaled_mm(x, q, out_dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"scaled_mm.*not implemented|scaled_mm.*derivative"):
        y.sum().backward()
    assert not mf.tensor.scaled_mm(x.detach(), q).requires_grad


# ---- what backward reads as it is ----------------------------------------------------------------


def overwritten(recipe, of, shape=(8, K)):
    x, w = torch.randn(shape).requires_grad_(), data()[1]
    leaf = x
    x = x * 1  # a leaf may not be written to
    y = linear(x, w, recipe)
    with torch.no_grad():
        {"x": x, "w": w, "neither": torch.zeros(1)}[of].mul_(2)
    return torch.autograd.grad(y.sum(), (leaf, w))


@pytest.mark.parametrize("shape", [(8, K), (2, 4, K), (K,)])
@pytest.mark.parametrize(
    ("recipe", "of"),
    [
        ("fp8_rowwise_gw_hp", "x"),
        ("fprop=mxfp8*mxfp8 dgrad=mxfp8*bf16 wgrad=mxfp8*mxfp8", "w"),
        ("bf16", "x"),
        ("bf16", "w"),
    ],
)
def test_an_operand_in_high_precision_must_stay_until_backward(recipe, of, shape):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        overwritten(recipe, of, shape)


@pytest.mark.parametrize("of", ["x", "w"])
def test_codes_are_saved_apart_from_what_they_were_made_of(of):
    torch.manual_seed(1)
    got = overwritten("mxfp8", of)
    torch.manual_seed(1)
    want = overwritten("mxfp8", "neither")
    for a, b in zip(got, want):
        assert torch.equal(a, b)


def test_random_state_must_stay_until_backward():
    x, w = data()
    rng = RNG.clone()
    y = mf.linear(x, w, None, "nvfp4", rng=rng)
    rng[1] += 1
    with pytest.raises(RuntimeError, match=r"rng.*modified by an inplace operation"):
        y.sum().backward()


# ---- operands under bf16 -------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_an_fp32_operand_under_bf16_is_the_identity_everywhere(out_dtype):
    """Uses integers up to 2^10, so that fp32 sums of 32 products are exact."""
    torch.manual_seed(0)
    x = torch.randint(-512, 513, (8, K)).float() + 0.0
    w = torch.randint(-4, 5, (N, K)).float()
    assert not torch.equal(x, x.bfloat16().float())
    exact = x @ w.t()
    got = mf.tensor.scaled_mm(
        x, mf.tensor.quantize(w, "e4m3/tensor", amax=torch.tensor(448.0)), out_dtype=out_dtype
    )
    assert torch.equal(got, exact.to(out_dtype))
    assert torch.equal(mf.tensor.scaled_mm(x, w, out_dtype=out_dtype), exact.to(out_dtype))


# ---- views that negate ---------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [*RECIPES, "fp8_delayed"])
def test_views_that_negate_are_read(recipe):
    """The imaginary part of a conjugate is such a view, also where autograd makes it a gradient."""
    z, g = torch.randn(8, K, dtype=torch.complex64), torch.randn(8, N)
    x = z.conj().imag
    assert x.is_neg()

    def of_conjugate(y):
        return (torch.complex(torch.zeros_like(y), y).conj() * g).imag

    found = []
    for given, loss in ((x, of_conjugate), (x.clone(), lambda y: y * -g)):
        torch.manual_seed(0)
        layer = mf.Linear(K, N, recipe=recipe)
        y = layer(given)
        loss(y).sum().backward()
        found.append((y.detach(), layer.weight.grad))
    for got, want in zip(*found):
        assert torch.equal(got, want)
