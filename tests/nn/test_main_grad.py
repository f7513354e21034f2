"""main_grad has the whole gradient of a weight: that of ties, and of losses that read it."""

from __future__ import annotations

import copy
import io

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from minifloat.nn.fuse import mlp
from torch import nn

from tests.nn.test_accumulation import FeedForward, K, N, batch, built, grad_of, step
from tests.support.compiled import compiled

VOCABULARY, WIDTH = 48, 32


class Tied(nn.Module):
    """An embedding and a head that share a weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def tied(accumulate, recipe="mxfp8", dtype=torch.float32):
    torch.manual_seed(0)
    model = Tied().to(dtype)
    mf.quantize_(model, recipe, keep="nothing", accumulate=accumulate)
    if accumulate == "main_grad":
        model.head.weight.main_grad = torch.zeros(VOCABULARY, WIDTH)
    return model


def train(call, batches=2):
    for i in range(batches):
        tokens = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(i))
        call(tokens).float().square().mean().backward()


def require_equal_sums(weight, reference, batches=2):
    """Compares sums of 2 x batches float32 addends in two orders: at most that many roundings."""
    assert weight.grad is None
    bound = 2 * batches * 2**-24 * reference.grad.abs().max().item()
    torch.testing.assert_close(weight.main_grad, reference.grad, rtol=0, atol=bound)


# ---- everything that reads the weight ------------------------------------------------------------


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_tensorwise", "nvfp4"])
def test_tied_embedding(recipe, is_compiled):
    model, plain = tied("main_grad", recipe), tied(None, recipe)
    train(compiled(model) if is_compiled else model)
    train(plain)
    require_equal_sums(model.head.weight, plain.head.weight)


def test_bf16_tie_is_summed_in_float32():
    model, plain = tied("main_grad", dtype=torch.bfloat16), tied(None, dtype=torch.bfloat16)
    train(model, 1), train(plain, 1)
    assert model.head.weight.grad is None
    rounded = model.head.weight.main_grad.bfloat16()
    # Three roundings to bfloat16 of addends that are no larger than the largest sum or term.
    bound = 3 * 2**-8 * plain.head.weight.grad.abs().max().item()
    torch.testing.assert_close(rounded, plain.head.weight.grad, rtol=0, atol=bound)


def test_tie_that_is_made_after_conversion():
    model, plain = tied("main_grad"), tied(None)
    for each in (model, plain):
        each.embedding = nn.Embedding(VOCABULARY, WIDTH)
        each.embedding.weight.data.copy_(each.head.weight.detach())
        each.head.weight = each.embedding.weight
    model.head.weight.main_grad = torch.zeros(VOCABULARY, WIDTH)
    train(model), train(plain)
    require_equal_sums(model.head.weight, plain.head.weight)


def test_loss_that_reads_the_weight():
    layer, plain = built(accumulate="main_grad"), built()
    for each in (layer, plain):
        (each(batch(0)).square().sum() + each.weight.square().sum()).backward()
    require_equal_sums(layer.weight, plain.weight, 1)


def test_weight_that_is_trained_from_a_later_step_on():
    model, plain = tied(None), tied(None)
    model.head.weight.requires_grad_(False)
    mf.restore_(model)
    mf.quantize_(model, "mxfp8", keep="nothing", accumulate="main_grad")
    assert not model.head.weight.requires_grad
    model.head.weight.requires_grad_(True).main_grad = torch.zeros(VOCABULARY, WIDTH)
    train(model), train(plain)
    require_equal_sums(model.head.weight, plain.head.weight)


def test_copies_and_moves_keep_the_tie():
    plain = tied(None)
    train(plain)
    for change in (copy.deepcopy, lambda m: m.double().float(), lambda m: m.share_memory()):
        model = change(tied("main_grad"))
        model.head.weight.main_grad = torch.zeros(VOCABULARY, WIDTH)
        train(model)
        require_equal_sums(model.head.weight, plain.head.weight)


def test_main_grad_that_is_also_grad():
    """A loop that hands main_grad to an optimizer as .grad may leave it there."""
    model, plain = tied("main_grad"), tied(None)
    model.head.weight.grad = model.head.weight.main_grad
    train(model), train(plain)
    assert model.head.weight.grad is model.head.weight.main_grad
    model.head.weight.grad = None
    require_equal_sums(model.head.weight, plain.head.weight)


def test_restored_tie_has_its_gradient_in_grad():
    model, plain = tied("main_grad"), tied(None)
    mf.restore_(model), mf.restore_(plain)
    train(model), train(plain)
    assert torch.equal(model.head.weight.grad, plain.head.weight.grad)
    assert not model.head.weight.main_grad.any()


# ---- weights that are frozen ---------------------------------------------------------------------


@pytest.mark.parametrize("how", ["main_grad", "grad"])
def test_weight_that_is_frozen_between_forward_and_backward(how):
    """Autograd adds nothing to a leaf that was frozen since its forward."""
    layer = built(accumulate=how)
    loss = layer(batch(0)).square().sum()
    layer.weight.requires_grad_(False)
    loss.backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    assert how == "grad" or not layer.weight.main_grad.any()


@pytest.mark.parametrize("how", ["main_grad", "grad"])
@pytest.mark.parametrize("frozen", ["gate", "up", "down"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_partly_frozen_feed_forward_stays_one_op(how, frozen, is_compiled, monkeypatch):
    called, op = [], mlp.one_op
    monkeypatch.setattr(mlp, "one_op", lambda *a: (called.append(1), op(*a))[1])
    models = []
    for accumulate in (None, how):
        torch.manual_seed(0)
        model = FeedForward()
        model.get_submodule(frozen).weight.requires_grad_(False)
        report = mf.quantize_(model, "fp8_tensorwise", fuse=True, accumulate=accumulate)
        assert [text for _, text in report.fused] == ["gate, up, down and silu are one op"]
        models.append(model)
    plain, model = models
    for layer in model.children():
        if how == "main_grad" and layer.weight.requires_grad:
            layer.weight.main_grad = torch.zeros(layer.weight.shape)
    calls = [plain, model]
    if is_compiled:  # by a backend that keeps the order of a bias's sum
        calls[1] = torch.compile(model, backend="aot_eager", fullgraph=True)
    for i in range(2):
        for call in calls:
            call(batch(i)).square().sum().backward()
    assert len(called) >= (3 if is_compiled else 4)
    for a, b in zip(plain.children(), model.children()):
        assert torch.equal(a.bias.grad, b.bias.grad)
        if not b.weight.requires_grad:
            assert b.weight.grad is None
        else:
            assert torch.equal(
                a.weight.grad, b.weight.main_grad if how[0] == "m" else b.weight.grad
            )


def test_feed_forward_with_several_places_is_not_fused():
    model = FeedForward()
    mf.quantize_(model.up, "fp8_tensorwise", accumulate="main_grad")
    report = mf.quantize_(model, "fp8_tensorwise", fuse=True)
    assert [text for _, text in report.not_fused] == [
        "its layers accumulate gradients in several places"
    ]


@pytest.mark.parametrize("places", [("grad", "main_grad"), ("main_grad", "grad")])
def test_feed_forward_whose_places_part_later_is_not_one_op(places):
    models = []
    for fuse in (False, True):
        torch.manual_seed(0)
        model = FeedForward()
        mf.quantize_(model, "fp8_tensorwise", fuse=fuse, accumulate=places[0])
        model.up.accumulate = places[1]
        for layer in model.children():
            if layer.accumulate == "main_grad":
                layer.weight.main_grad = torch.zeros(layer.weight.shape)
        model(batch(0)).square().sum().backward()
        models.append(model)
    for plain, layer in zip(*(model.children() for model in models)):
        assert torch.equal(grad_of(layer), grad_of(plain))


# ---- readers of .grad, which stays None ----------------------------------------------------------


def loaded(model):
    """torch.load gives a parameter an empty dict of hooks."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    parameters = model.values() if isinstance(model, dict) else model.parameters()
    assert all(p._backward_hooks is not None for p in parameters)
    return model


def with_converted_layer_loaded():
    return loaded(built(accumulate="main_grad"))


def with_plain_layer_loaded():
    torch.manual_seed(0)
    layer = loaded(nn.Linear(K, N))
    mf.quantize_(layer, "fp8_rowwise", accumulate="main_grad")
    layer.weight.main_grad = torch.zeros(N, K)
    return layer


def with_parameters_loaded():
    layer = built(accumulate="main_grad")
    state = layer.state_dict()
    layer.load_state_dict(state | loaded(dict(layer.named_parameters())), assign=True)
    layer.weight.main_grad = torch.zeros(N, K)
    return layer


def with_hook_removed():
    layer = built(accumulate="main_grad")
    layer.weight.register_hook(lambda g: g).remove()
    return layer


@pytest.mark.parametrize(
    "make",
    [
        with_converted_layer_loaded,
        with_plain_layer_loaded,
        with_parameters_loaded,
        with_hook_removed,
    ],
)
def test_empty_dict_of_hooks_is_no_hook(make):
    layer, plain = make(), built()
    for each in (layer, plain):
        step(each, 0), step(each, 1)
    require_equal_sums(layer.weight, plain.weight)
    layer.weight.register_hook(lambda g: g)
    with pytest.raises(ValueError, match="expected no gradient hook"):
        step(layer, 2)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_is_refused_in_compiled_backward(register):
    """Also where the code was compiled for a weight without hooks."""
    layer = built(accumulate="main_grad")
    call = torch.compile(layer, backend="aot_eager", fullgraph=True)
    step(layer, 0, call=call)
    handle = getattr(layer.weight, register)(lambda _: None)
    with pytest.raises(ValueError, match=r"no gradient hook on a weight \(37, 70\), got one"):
        step(layer, 1, call=call)
    handle.remove()
    layer.weight.main_grad.zero_()
    step(layer, 0, call=call)
    assert layer.weight.main_grad.any()


def test_hook_after_the_addition_is_refused():
    layer = built(accumulate="main_grad")
    layer.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(ValueError, match=r"expected no gradient hook .* use accumulate='grad'"):
        layer(batch(0))


def test_hook_of_autograds_node_is_refused():
    """Wrappers that reduce .grad register hooks there."""
    layer = built(accumulate="main_grad")
    leaf = layer.weight.view_as(layer.weight).grad_fn.next_functions[0][0]
    leaf.register_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"Wrappers that reduce .grad .* accumulate='grad'"):
        step(layer, 0)
    assert not layer.weight.main_grad.any()


# ---- the loop of docs/memory.md ------------------------------------------------------------------


def test_loop_with_masters_that_clips():
    """The masters' .grad is main_grad, so torch's clipping counts it."""
    layer, plain = built(accumulate="main_grad"), built()
    master = nn.Parameter(layer.weight.detach().clone())
    optimizer = torch.optim.AdamW([master, layer.bias])
    other = torch.optim.AdamW(plain.parameters())
    for i in range(3):
        for each in (layer, plain):
            step(each, 2 * i), step(each, 2 * i + 1)
        master.grad = layer.weight.main_grad
        norms = [
            nn.utils.clip_grad_norm_(p, 1.0) for p in ([master, layer.bias], plain.parameters())
        ]
        assert torch.equal(*norms)
        assert norms[0] > N
        optimizer.step(), other.step()
        with torch.no_grad():
            layer.weight.copy_(master)
        layer.weight.main_grad.zero_()
        layer.bias.grad = None
        other.zero_grad()
        mf.step(layer), mf.step(plain)
        assert torch.equal(layer.weight, plain.weight)


@pytest.mark.parametrize("received", ["zeros", "empty"])
def test_autograd_receives_zeros_or_any_memory(received):
    x, w = torch.randn(32, 64).bfloat16(), torch.randn(48, 64).bfloat16().requires_grad_()
    options = {"accumulate": "main_grad", "received": received, "main_grad": torch.zeros(48, 64)}
    torch.use_deterministic_algorithms(True)  # fills memory that is not initialized with NaN
    try:
        ops.linear(x, w, None, "mxfp8", **options).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert options["main_grad"].any()
    assert bool(w.grad.eq(0).all()) == (received == "zeros")


@pytest.mark.parametrize("is_megatrons", [False, True])
def test_main_grad_has_the_gradient_under_vmap(is_megatrons):
    """Megatron's hook adds .grad to main_grad, unless the weight says that the op has done so."""
    layer = nn.Linear(K, N, bias=False)
    mf.quantize_(layer, "mxfp8", accumulate="main_grad")
    weight, x = layer.weight, torch.randn(3, 4, K)
    weight.main_grad = torch.zeros(N, K)
    if is_megatrons:
        weight.grad_added_to_main_grad = False

        def add(*_):
            if not weight.grad_added_to_main_grad:
                weight.main_grad.add_(weight.grad)
            weight.grad = None

        weight.register_post_accumulate_grad_hook(add)
    for sample in x:
        layer(sample).sum().backward()
    expected = weight.main_grad.clone()
    weight.main_grad.zero_()
    torch.func.vmap(layer)(x).sum().backward()
    torch.testing.assert_close(weight.main_grad, expected)
