"""Weight gradients of micro-batches, added in float32 to main_grad or .grad.

On the CPU a sum is defined to the bit: each product is rounded to float32, then added. The gradient
of one micro-batch in float32 is that of the op `linear` with a float32 weight.
"""

from __future__ import annotations

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from minifloat.nn.fuse import mlp
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.collectives import Begun

RECIPES = [recipe for recipe in mf.presets() if recipe != "bf16"]
N, K, TOKENS, BATCHES = 37, 70, 45, 3  # no multiple of any block
HOW = ("main_grad", "grad")


def batch(i: int, dtype=torch.float32, k: int = K) -> torch.Tensor:
    return torch.randn(TOKENS, k, generator=torch.Generator().manual_seed(i)).to(dtype)


def built(recipe="fp8_rowwise", accumulate=None, dtype=torch.float32, bias=True, **options):
    """Returns a converted layer, with a main_grad of zeros where it reads one."""
    torch.manual_seed(0)
    layer = nn.Linear(K, N, bias=bias).to(dtype)
    mf.quantize_(layer, recipe, accumulate=accumulate, **options)
    if accumulate == "main_grad":
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
    return layer


def grad_of(layer: nn.Module) -> torch.Tensor:
    """Returns the layer's sum, after it checks that autograd received no other gradient."""
    weight = layer.weight
    if layer.accumulate == "main_grad":
        assert weight.grad is None
        return weight.main_grad
    return weight.grad


def step(layer: nn.Module, i: int, dtype=torch.float32, call=None) -> None:
    call = layer if call is None else call
    call(batch(i, dtype)).float().square().sum().backward()


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("recipe", RECIPES)
def test_sum_is_that_of_float32_products(recipe, how):
    plain, layer = built(recipe), built(recipe, how)
    want = torch.zeros(N, K)
    for i in range(BATCHES):
        for each in (plain, layer):
            step(each, i)
        want += plain.weight.grad
        plain.weight.grad = None
        if recipe == "fp8_delayed":
            mf.step(plain), mf.step(layer)
    assert torch.equal(grad_of(layer), want)
    assert torch.equal(layer.bias.grad, plain.bias.grad)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "nvfp4", "fp8_rowwise_gw_hp"])
def test_bf16_weights_are_not_rounded_between_micro_batches(recipe):
    """The float32 product of a bfloat16 layer is the op's, of its operands."""
    layer = built(recipe, "main_grad", torch.bfloat16)
    other = built(recipe, "grad", torch.bfloat16)
    other.weight.grad_dtype = torch.float32
    rounded = built(recipe, None, torch.bfloat16)
    for i in range(BATCHES):
        for each in (layer, other, rounded):
            step(each, i, torch.bfloat16)
    assert layer.weight.main_grad.dtype == other.weight.grad.dtype == torch.float32
    assert torch.equal(grad_of(layer), grad_of(other))
    one = built(recipe, "main_grad", torch.bfloat16)
    step(one, 0, torch.bfloat16)
    reference = built(recipe, None, torch.bfloat16)
    step(reference, 0, torch.bfloat16)
    assert torch.equal(grad_of(one).bfloat16(), reference.weight.grad)
    assert not torch.equal(grad_of(one), reference.weight.grad.float())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("is_inside", [False, True])  # whether backward runs within the context
def test_autocast_rounds_no_gradient(how, is_inside):
    layer, reference = built("fp8_rowwise", how), built("fp8_rowwise", "main_grad", torch.bfloat16)
    for i in range(BATCHES):
        x = batch(i)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
            if is_inside:
                y.float().square().sum().backward()
        if not is_inside:
            y.float().square().sum().backward()
        step(reference, i, torch.bfloat16)
    assert torch.equal(grad_of(layer), grad_of(reference))


def test_products_are_added_by_the_op():
    """The first product of .grad is written; all others are added."""
    for how, added in (("main_grad", 3), ("grad", 2)):
        layer = built("fp8_rowwise", how)
        with Begun() as begun:
            for i in range(BATCHES):
                step(layer, i)
        counts = [begun.names.count(name) for name in ("add_scaled_mm", "scaled_mm")]
        assert counts == [added, 2 * BATCHES - added], how


def test_sum_of_any_strides():
    layer, plain = built(accumulate="main_grad"), built(accumulate="main_grad")
    layer.weight.main_grad = torch.zeros(K, N).t()  # no kernel adds to it
    for i in range(2):
        step(layer, i), step(plain, i)
    assert torch.equal(grad_of(layer), grad_of(plain))


def test_op_adds_a_product():
    torch.manual_seed(0)
    a, b = torch.randn(40, 64), torch.randn(24, 64)
    left, right = (ops.quantize(t, "e4m3/row", "")[:3] for t in (a, b))
    product = ops.scaled_mm(*left, *right, "e4m3/row*e4m3/row", k=64, out_dtype=torch.float32)
    start = torch.randn(40, 24)
    total = start.clone()
    before = total._version
    ops.add_scaled_mm(total, *left, *right, "e4m3/row*e4m3/row", k=64)
    assert torch.equal(total, start + product)
    assert total._version > before
    for wrong in (
        torch.zeros(24, 40),
        torch.zeros(40, 24).double(),
        torch.zeros(1, 24).expand(40, 24),
    ):
        with pytest.raises(ValueError, match="add_scaled_mm: expected sum"):
            ops.add_scaled_mm(wrong, *left, *right, "e4m3/row*e4m3/row", k=64)


# ---- graphs --------------------------------------------------------------------------------------


COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]  # with kernels of C++


@pytest.mark.parametrize("backend", COMPILERS)
@pytest.mark.parametrize("how", HOW)
def test_compiled_sums_equal_eager_ones(how, backend):
    for recipe in ("fp8_tensorwise", "fp8_delayed", "nvfp4", "fp8_rowwise_gw_hp"):
        eager, compiled = built(recipe, how), built(recipe, how)
        call = torch.compile(compiled, backend=backend, fullgraph=True)
        for i in range(BATCHES):
            step(eager, i), step(compiled, i, call=call)
            if recipe == "fp8_delayed":
                mf.step(eager), mf.step(compiled)
        assert torch.equal(grad_of(eager), grad_of(compiled)), recipe
        torch._dynamo.reset()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_sums_equal_plain_ones(how, use_reentrant):
    plain, layer = built("nvfp4", how), built("nvfp4", how)
    for i in range(BATCHES):
        step(plain, i)
        x = batch(i).requires_grad_()
        checkpoint(layer, x, use_reentrant=use_reentrant).square().sum().backward()
    assert torch.equal(grad_of(plain), grad_of(layer))


@pytest.mark.parametrize("how", HOW)
def test_layer_that_is_called_twice_adds_twice(how):
    layer, plain = built(accumulate=how), built()
    for each in (layer, plain):
        (each(batch(0)).square().sum() + each(batch(1)).square().sum()).backward()
    torch.testing.assert_close(grad_of(layer), plain.weight.grad, rtol=1e-6, atol=1e-5)
    products = []
    for i in range(2):
        plain.weight.grad = None
        step(plain, i)
        products.append(plain.weight.grad)
    assert torch.equal(grad_of(layer), products[0] + products[1])


@pytest.mark.parametrize("how", HOW)
def test_weight_that_two_layers_share(how):
    first, second = built(accumulate=how, bias=False), built(accumulate=how, bias=False)
    second.weight = first.weight
    plain = built(bias=False)
    first(batch(0)).square().sum().backward()
    (first(batch(1)).square().sum() + second(batch(2)).square().sum()).backward()
    want = torch.zeros(N, K)
    for i in (0, 1, 2):
        plain.weight.grad = None
        step(plain, i)
        want += plain.weight.grad
    torch.testing.assert_close(grad_of(first), want, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("how", HOW)
def test_backward_twice_through_one_graph(how):
    layer, plain = built(accumulate=how), built()
    for each in (layer, plain):
        loss = each(batch(0)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert torch.equal(grad_of(layer), plain.weight.grad)


@pytest.mark.parametrize("how", HOW)
def test_grad_of_other_tensors_adds_nothing(how):
    layer, plain = built(accumulate=how), built()
    step(layer, 0), step(plain, 0)
    before = grad_of(layer).clone()
    x = batch(1).requires_grad_()
    (of_layer,) = torch.autograd.grad(layer(x).square().sum(), x)
    (of_plain,) = torch.autograd.grad(plain(x).square().sum(), x)
    assert torch.equal(of_layer, of_plain)
    assert torch.equal(grad_of(layer), before)
    layer(x).square().sum().backward(inputs=[x])
    assert torch.equal(grad_of(layer), before)


@pytest.mark.parametrize("how", HOW)
def test_grad_of_the_weight_is_returned(how):
    layer, plain = built(accumulate=how), built()
    step(layer, 0)
    before = grad_of(layer).clone()
    found = torch.autograd.grad(layer(batch(1)).square().sum(), layer.weight)
    want = torch.autograd.grad(plain(batch(1)).square().sum(), plain.weight)
    assert torch.equal(found[0], want[0])
    assert torch.equal(grad_of(layer), before)
    layer(batch(1)).square().sum().backward(inputs=[layer.weight])
    assert torch.equal(grad_of(layer), before + want[0])


def test_zero_grad_between_forward_and_backward():
    """.grad is read in backward: a former tensor is not written to."""
    layer, plain = built(accumulate="grad"), built()
    for set_to_none in (True, False):
        for i in range(2):
            for each in (layer, plain):
                optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
                former = each.weight.grad
                loss = each(batch(i)).square().sum()
                optimizer.zero_grad(set_to_none=set_to_none)
                loss.backward()
                assert set_to_none or former is None or former is each.weight.grad
        assert torch.equal(layer.weight.grad, plain.weight.grad)


def test_hooks_of_a_weight():
    """.grad: hooks receive each gradient, unfused. main_grad: a hook would receive none."""
    layer, seen = built(accumulate="grad"), []
    layer.weight.register_hook(lambda g: seen.append(g.clone()))
    layer.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for i in range(2):
        step(layer, i)
    assert len(seen) == 4
    assert torch.equal(seen[1] + seen[2], layer.weight.grad)
    layer = built(accumulate="main_grad")
    layer.weight.register_hook(lambda g: g)
    with pytest.raises(ValueError, match="expected no gradient hook"):
        step(layer, 0)
    assert not layer.weight.main_grad.any()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_backward_that_records_a_graph():
    """create_graph makes autograd replace .grad, and the layer add nothing in place."""
    layer, plain = built(accumulate="grad"), built()
    for each in (layer, plain):
        for i in range(2):
            each(batch(i)).square().sum().backward(create_graph=True)
    assert torch.equal(layer.weight.grad.detach(), plain.weight.grad.detach())


# ---- primary weights, feed-forwards, conversion --------------------------------------------------


def test_primary_weights():
    layer = built("mxfp8_2d", "main_grad", torch.bfloat16, primary=True)
    plain = built("mxfp8_2d", None, torch.bfloat16, primary=True)
    step(layer, 0, torch.bfloat16), step(plain, 0, torch.bfloat16)
    assert torch.equal(grad_of(layer).bfloat16(), plain.weight.grad)
    step(layer, 1, torch.bfloat16)
    assert not torch.equal(grad_of(layer).bfloat16(), plain.weight.grad)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(K, N), nn.Linear(K, N), nn.Linear(N, K)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("backend", [None, *COMPILERS])
def test_fused_feed_forward_accumulates(how, backend, monkeypatch):
    called, op = [], mlp.one_op
    monkeypatch.setattr(mlp, "one_op", lambda *a: (called.append(1), op(*a))[1])
    models = []
    for accumulate in (None, how):
        torch.manual_seed(0)
        model = FeedForward()
        mf.quantize_(model, "fp8_tensorwise", fuse=True, accumulate=accumulate)
        models.append(model)
    plain, fused = models  # both compute the op `mlp`
    calls = [plain, torch.compile(fused, backend=backend, fullgraph=True) if backend else fused]
    for layer in fused.children():
        layer.weight.main_grad = torch.zeros(layer.weight.shape) if how == "main_grad" else None
    for i in range(BATCHES):
        for call in calls:
            call(batch(i)).square().sum().backward()
    assert len(called) >= BATCHES + 1
    for a, b in zip(plain.children(), fused.children()):
        assert torch.equal(a.weight.grad, grad_of(b))


def test_restored_layer_accumulates_no_more():
    layer = built(accumulate="main_grad")
    mf.restore_(layer)
    step(layer, 0)
    assert layer.weight.grad is not None
    assert not layer.weight.main_grad.any()
    mf.quantize_(layer, "mxfp8")
    assert layer.accumulate == ""
