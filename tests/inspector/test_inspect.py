"""mf.inspect: which layers it reads, what it leaves alone, whom it blames, and what it predicts."""

import copy
import json
import math
import re
from collections import OrderedDict
from dataclasses import replace

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from minifloat.inspector import inspect as inspector
from minifloat.inspector.inspection import NOT_CALLED
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support import foreign_experts
from tests.support.llama import ModelConfig, build_model, cross_entropy
from tests.support.same_bits import require_same_results

VOCAB, SEQ = 300, 32
DENSE = ModelConfig(64, 2, 2, 2, 128, VOCAB)
MIXED = ModelConfig(64, 2, 2, 2, 96, VOCAB, 32, 4, 2, 1)
OPERANDS = ["x/fprop", "w/fprop", "g/dgrad", "w/dgrad", "g/wgrad", "x/wgrad"]


def ids(sequences=4):
    return torch.randint(0, VOCAB, (sequences, SEQ + 1), generator=torch.Generator().manual_seed(3))


def llama(config=DENSE):
    return build_model(config, SEQ, 1, "cpu")


def loss_of(model, batch):
    return cross_entropy(model(batch[:, :-1]), batch[:, 1:])


def rows_by(inspection, recipe):
    return {row.layer: row for row in inspection.rows if row.recipe == recipe}


def relative(result, exact):
    return ((result.double() - exact.double()).norm() / exact.double().norm()).item()


@pytest.fixture(scope="module")
def inspection():
    return mf.inspect(llama(), ids(), ["mxfp8", "nvfp4"], loss=loss_of)


# ---- the numbers ---------------------------------------------------------------------------------


class Two(nn.Module):
    """Two layers, and the mean of squares of what they return as the loss."""

    def __init__(self, bias=False):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias), nn.Linear(64, 16, bias)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))).square().mean()


def test_errors_are_those_of_the_layer_itself():
    torch.manual_seed(0)
    model, x = Two(), torch.randn(24, 32)
    found = {row.layer: row for row in mf.inspect(model, x, "mxfp8").rows}
    h = torch.tanh(model.up(x)).detach()
    for layer, given in ((model.down, h), (model.up, x)):
        results = []
        for convert in (False, True):
            inner, a = copy.deepcopy(layer), given.clone().requires_grad_()
            if convert:
                mf.quantize_(inner, "mxfp8", keep="nothing")
            y = inner(a)
            g = 2 * model.down(h) / y.numel() if layer is model.down else g_of_up(model, x)
            y.backward(g)
            results.append((y.detach(), a.grad, inner.weight.grad))
        row = found["down" if layer is model.down else "up"]
        errors = [relative(q, exact) for exact, q in zip(*results)]
        got = [row.y_error, row.dx_error, row.dw_error]
        assert got == pytest.approx(errors, rel=1e-4)
        by_name = {each.operand: each for each in row.operands}
        assert list(by_name) == OPERANDS
        values = mf.tensor.quantize(given, "mxfp8").dequantize()
        snr = 20 * math.log10(1 / relative(values, given))
        assert by_name["x/fprop"].snr_db == pytest.approx(snr, abs=1e-3)
        values = mf.tensor.quantize(layer.weight.detach(), "mxfp8", columnwise=True).dequantize()
        snr = 20 * math.log10(1 / relative(values, layer.weight.detach().t()))
        assert by_name["w/dgrad"].snr_db == pytest.approx(snr, abs=1e-3)
        assert row.operations == 24 * layer.weight.numel()


def g_of_up(model, x):
    y = model.up(x)
    return torch.autograd.grad(model.down(torch.tanh(y)).square().mean(), y)[0]


def test_layers_outside_autocast_are_measured_in_their_dtype():
    def loss(model, x):
        with torch.autocast("cpu", enabled=False):
            return model(x).square().mean()

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64)), torch.randn(256, 64)
    (expected,) = mf.inspect(model, x, ["nvfp4"], loss=loss).rows
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (found,) = mf.inspect(model, x, ["nvfp4"], loss=loss).rows
    assert found == expected


def test_the_first_order_predicts_the_loss():
    """One layer at a time is converted: the loss changes by the first order, where that is large.

    The second order is that of the loss's Fisher matrix, an estimate: it bounds what is left.
    """
    found = rows_by(mf.inspect(llama(), ids(), "fp8_rowwise", loss=loss_of), "fp8_rowwise")
    exact = loss_of(llama(), ids()).double().item()
    checked = 0
    for name, row in found.items():
        model = llama()
        mf.quantize_(model, f"{name}: fp8_rowwise", keep="nothing")
        change = loss_of(model, ids()).double().item() - exact
        assert abs(change - row.loss_first) < 3 * row.loss_second + 0.1 * abs(row.loss_first) + 2e-6
        checked += abs(row.loss_first) > 10 * row.loss_second + 2e-5
    assert checked >= 5  # layers where the first order decides


def test_the_second_order_is_a_fisher_form():
    """For a softmax's loss the mean over labels drawn from the model itself is the Hessian's form.

    With labels that the model predicts at random, the empirical form estimates it.
    """
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 50, bias=False), torch.randn(4096, 64)
    labels = torch.distributions.Categorical(logits=layer(x)).sample()
    (row,) = mf.inspect(layer, x, "nvfp4", loss=lambda m, b: F.cross_entropy(m(b), labels)).rows
    y = layer(x).detach()
    quantized = copy.deepcopy(layer)
    mf.quantize_(quantized, "nvfp4", keep="nothing")
    d, p = quantized(x).detach() - y, y.softmax(-1)
    hessian = ((p * d * d).sum(-1) - (p * d).sum(-1) ** 2).mean() / 2
    assert row.loss_second == pytest.approx(hessian.item(), rel=0.1)
    first = ((p - F.one_hot(labels, 50)) * d).sum(-1).mean()
    assert row.loss_first == pytest.approx(first.item(), rel=1e-2, abs=1e-6)


def test_a_bad_layer_is_found():
    """A few weights of one layer are so large that they take the scales of their blocks."""
    model = llama()
    bad = model.layers[1].feed_forward.w1
    with torch.no_grad():
        bad.weight[::16, ::16] *= 60
    found = mf.inspect(model, ids(), ["mxfp8", "nvfp4"], loss=loss_of)
    rows = rows_by(found, "nvfp4")
    flushed = {name: row.operands[1].flushed for name, row in rows.items()}
    assert max(flushed, key=flushed.get) == "layers.1.feed_forward.w1"
    quiet = rows_by(mf.inspect(llama(), ids(), "nvfp4", loss=loss_of), "nvfp4")
    harm = {name: row.loss_second / quiet[name].loss_second for name, row in rows.items()}
    assert max(harm, key=harm.get) == "layers.1.feed_forward.w1"
    assert rows["layers.1.feed_forward.w1"].operands[1].outlier_channels > 0
    kept = found.recipe_map(0.7).text
    assert "layers.1.feed_forward.w1: bf16" in kept


def test_writes_in_place():
    """The gradient of an output is that before the write; an input that is written to is named."""
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self, in_place):
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 16)
            self.act = nn.ReLU(in_place)

        def forward(self, x):
            return self.down(self.act(self.up(x))).square().mean()

    first, second, x = Model(False), Model(True), torch.randn(24, 32)
    second.load_state_dict(first.state_dict())
    expected = mf.inspect(first, x, "mxfp8").rows
    assert mf.inspect(second, x, "mxfp8").rows == expected
    for parameter in second.parameters():
        parameter.requires_grad_(False)
    assert mf.inspect(second, x, "mxfp8").rows == expected

    def loss(model, batch):
        value, x = 0, batch.clone()
        with torch.no_grad():
            y = model(x)
        value = model(x)
        x += 1
        return value + y

    found = mf.inspect(second, x, "mxfp8", loss=loss)
    assert dict(found.skipped) == {"up": "its input is written to in place"}
    assert [row.layer for row in found.rows] == ["down"]


def test_outlier_channels_of_inputs():
    torch.manual_seed(0)
    model, x = Two(), torch.randn(24, 32)
    x[:, 5] *= 100
    rows = rows_by(mf.inspect(model, x, "nvfp4"), "nvfp4")
    assert [row.operands[0].outlier_channels for row in rows.values()] == [1, 0]
    assert rows["up"].operands[0].channels == 32


# ---- which layers --------------------------------------------------------------------------------


def test_all_layers_of_a_llama(inspection):
    names = [name for name, m in llama().named_modules() if isinstance(m, nn.Linear)]
    assert list(rows_by(inspection, "nvfp4")) == list(rows_by(inspection, "mxfp8")) == names
    assert not inspection.skipped
    assert inspection.heads == ("output",)
    assert inspection.loss == loss_of(llama(), ids()).item()
    assert inspection.tokens == 4 * SEQ
    for row in inspection.rows:
        assert [each.operand for each in row.operands] == OPERANDS
        low, high = (25, 40) if row.recipe == "mxfp8" else (12, 35)
        if row.layer != "output":  # whose gradient is nearly one value a row
            assert all(low < each.snr_db < high for each in row.operands), row


def test_experts_are_inspected_one_by_one():
    """The numbers of experts are those of dense layers of each expert's tokens."""
    model, batch = llama(MIXED), ids()
    found = rows_by(mf.inspect(model, batch, "mxfp8", loss=loss_of), "mxfp8")
    names = [f"layers.1.moe.experts.{name}" for name in ("w13", "w2")]
    assert set(names) < set(found)
    w13 = found[names[0]]
    assert w13.module == "layers.1.moe.experts"
    experts, seen = model.layers[1].moe.experts, {}
    hook = experts.register_forward_hook(lambda m, args, y: seen.update(args=args))
    with torch.no_grad():
        loss_of(model.eval(), batch)
    hook.remove()
    x, indices, _weights = seen["args"]
    signal = noise = tokens = 0
    for expert in range(4):
        rows = x[(indices == expert).any(1)]
        tokens += len(rows)
        values = mf.tensor.quantize(rows, "mxfp8").dequantize()
        signal, noise = signal + rows.square().sum(), noise + (rows - values).square().sum()
    assert tokens == indices.numel()
    assert w13.operations == tokens * 64 * 64
    assert w13.operands[0].elements == tokens * 64
    assert w13.operands[0].snr_db == pytest.approx(10 * math.log10(signal / noise), abs=1e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_one_expert_has_the_numbers_of_dense_layers(fused):
    torch.manual_seed(0)
    mixture = mf.MoE(64, 96, 1, 1, fused_w13=fused, bias=True, route_norm=True)
    dense, experts = Dense(), mixture.experts
    with torch.no_grad():
        inputs = [("1", 0, 96), ("3", 96, 192)]
        for name, begin, end in inputs:
            layer, which = getattr(dense, f"w{name}"), "13" if fused else name
            rows = slice(begin, end) if fused else slice(None)
            layer.weight.copy_(getattr(experts, f"w{which}")[0, rows])
            layer.bias.copy_(getattr(experts, f"b{which}")[0, rows])
        dense.w2.weight.copy_(experts.w2[0])
        dense.w2.bias.copy_(experts.b2[0])
    x, target = torch.randn(48, 64), torch.randn(48, 64)

    def loss(model, batch):
        return (model(batch) - target).square().mean()

    of_experts = mf.inspect(mixture, x, ["mxfp8", "nvfp4"], loss=loss)
    of_layers = mf.inspect(dense, x, ["mxfp8", "nvfp4"], loss=loss)
    assert of_experts.loss == pytest.approx(of_layers.loss, rel=1e-6)
    for recipe in ("mxfp8", "nvfp4"):
        got, want = rows_by(of_experts, recipe), rows_by(of_layers, recipe)
        pairs = {"w2": "w2"} if fused else {name: name for name in ("w1", "w3", "w2")}
        for name, other in pairs.items():
            a, b = got[f"experts.{name}"], want[other]
            assert a.operations == b.operations
            for field in ("y_error", "dx_error", "dw_error", "loss_first", "loss_second"):
                # Sums of other shapes round differently, which may round an operand differently.
                assert getattr(a, field) == pytest.approx(getattr(b, field), rel=0.02, abs=1e-7)
            for one, two in zip(a.operands, b.operands):
                assert one.snr_db == pytest.approx(two.snr_db, abs=0.05), one.operand
        if fused:
            sides = [want[name] for name in ("w1", "w3")]
            noise = sum(row.loss_first for row in sides)
            row = got["experts.w13"]
            assert row.operations == sum(side.operations for side in sides)
            if recipe == "mxfp8":  # nvfp4 scales both matrices by one amax
                assert row.loss_first == pytest.approx(noise, rel=0.02, abs=1e-7)


class Dense(nn.Module):
    """A SwiGLU of dense layers."""

    def __init__(self):
        super().__init__()
        self.w1, self.w3, self.w2 = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


def test_what_waits_for_others_of_its_shape(monkeypatch):
    """Layers are measured together up to a number of elements, and experts layer by layer."""
    groups, measure = [], inspector.Numbers.measure

    def recorded(self, products):
        groups.append([product.layer.module for product in products])
        measure(self, products)

    monkeypatch.setattr(inspector.Numbers, "measure", recorded)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    x = torch.randn(32, 64)
    results = 2 * (2 * 32 * 64 + 64 * 64)  # of a layer and of the exact products
    found = []
    for most, expected in ((1, [1] * 6), (2 * results, [2, 2, 2]), (1 << 23, [6])):
        monkeypatch.setitem(inspector.MOST_ELEMENTS, "cpu", most)
        groups.clear()
        found.append(mf.inspect(model, x, ["mxfp8"], loss=lambda m, x: m(x).square().mean()))
        assert [len(group) for group in groups] == expected
    for row, same, other in zip(*(each.rows for each in found), strict=True):
        assert row.operands[0].scales == same.operands[0].scales == other.operands[0].scales
        assert row.y_error == pytest.approx(same.y_error) == pytest.approx(other.y_error)
    groups.clear()
    three = ModelConfig(64, 3, 2, 2, 96, VOCAB, 32, 4, 2, 1)  # the first has no experts
    mf.inspect(llama(three), ids(), ["mxfp8"], loss=loss_of)
    of_experts = [set(group) for group in groups if group[0].endswith(".experts")]
    assert set.union(*of_experts) == {"layers.1.moe.experts", "layers.2.moe.experts"}
    assert all(len(modules) == 1 for modules in of_experts)


def test_converted_layers_have_their_own_recipe():
    model = llama(MIXED)
    mf.quantize_(model, "*: nvfp4; layers.1.*: mxfp8; *.wq: fp8_delayed")
    found = mf.inspect(model, ids(), loss=loss_of)
    own = {row.layer: row.recipe for row in found.rows}
    assert own["layers.0.attention.wv"] == "nvfp4"
    assert own["layers.1.moe.experts.w2"] == "mxfp8"
    assert own["layers.1.attention.wq"] == "fp8_delayed"
    assert dict(found.skipped) == {
        "output": "not converted; name recipes to inspect it",
        "layers.1.moe.router": "a router beside experts, which stays in high precision",
    }
    every = mf.inspect(model, ids(), ["mxfp8"], loss=loss_of)
    assert {row.recipe for row in every.rows} == {"mxfp8"}
    assert len(every.rows) == len(found.rows) + 1
    assert dict(every.skipped).keys() == {"layers.1.moe.router"}


def test_what_is_not_inspected_has_its_reason():
    class Model(Two):
        def __init__(self):
            super().__init__()
            self.idle, self.codes, self.fused = nn.Linear(32, 32), nn.Linear(32, 32), None

        def forward(self, x):
            return super().forward(self.codes(x))

    model = Model()
    mf.quantize_(model, "codes: mxfp8_2d", primary=True)
    found = mf.inspect(model, torch.randn(8, 32), ["mxfp8"])
    reasons = dict(found.skipped)
    assert reasons["idle"] == NOT_CALLED
    assert reasons["codes"].startswith("its weight is codes")
    assert found.recipe_map(1.0, "mxfp8").text == "*: mxfp8; idle: bf16"


@pytest.mark.parametrize("name", ["a*", "a?", "a;b", " a", "a "])
def test_names_that_a_map_cannot_have(name):
    model = nn.Sequential(OrderedDict({name: nn.Linear(64, 64), "other": nn.Linear(64, 64)}))
    found = mf.inspect(model, torch.randn(8, 64), ["mxfp8"], loss=lambda m, x: m(x).sum())
    with pytest.raises(ValueError, match=re.escape(f"got {name!r}")):
        found.recipe_map(0.0, "mxfp8")


def test_experts_of_other_libraries_are_named():
    torch.manual_seed(0)
    model = foreign_experts.GroupedMmBlock()
    x = torch.randn(8, 32)
    for _ in range(2):  # before and after a conversion
        found = mf.inspect(model, x, ["mxfp8"], loss=lambda m, b: m(b).float().square().mean())
        reasons = [why for name, why in found.skipped if "experts" in name]
        assert reasons
        assert all(why.startswith("experts in a ") for why in reasons), reasons
        assert not any("experts" in row.layer for row in found.rows)
        mf.quantize_(model, "mxfp8", keep="nothing")


def test_experts_without_a_token_are_named():
    model = nn.Sequential(nn.Linear(32, 32), mf.MoE(32, 64, experts=4, top_k=2))
    found = mf.inspect(model, torch.zeros(0, 32), ["mxfp8"], loss=lambda m, x: m(x).sum())
    assert dict(found.skipped)["1.experts"] == NOT_CALLED


def test_a_model_without_a_layer_to_inspect(tmp_path):
    model = nn.Sequential(nn.Linear(32, 32))
    mf.quantize_(model, "mxfp8_2d", primary=True)
    found = mf.inspect(model, torch.ones(2, 32), loss=lambda m, x: m(x).mean())
    assert not found.rows
    assert "- 0: its weight is codes (primary)" in found.table()
    found.plot(tmp_path / "map.png")


def test_layers_of_a_feed_forward_that_is_one_op():
    """Hooks make it call its layers one by one."""
    mlp = mf.MLP(32, 64, gated=True, activation="silu")
    report = mf.quantize_(mlp, "mxfp8", fuse=True, keep="nothing")
    assert report.fused
    found = mf.inspect(mlp, torch.randn(8, 32), loss=lambda m, x: m(x).square().mean())
    assert [row.layer for row in found.rows] == ["gate", "up", "down"]
    assert not found.skipped


def test_frozen_and_checkpointed_and_compiled_models():
    torch.manual_seed(0)
    model, x = Two(), torch.randn(16, 32)
    expected = mf.inspect(model, x, "mxfp8").rows
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert mf.inspect(model, x, "mxfp8").rows == expected
    model.up.forward = model.up.forward  # no conversion: replaced on the instance
    assert [row.layer for row in mf.inspect(model, x, "mxfp8").rows] == ["down"]
    del model.up.__dict__["forward"]

    class Again(Two):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    again = Again()
    again.load_state_dict(model.state_dict())
    assert mf.inspect(again, x, "mxfp8").rows == expected


def test_compiled_layers_run_uncompiled():
    torch.manual_seed(0)
    model, x = Two(), torch.randn(16, 32)
    expected = mf.inspect(model, x, "mxfp8").rows
    model.up.compile(backend="eager")
    model(x)
    assert mf.inspect(torch.compile(model, backend="eager"), x, "mxfp8").rows == expected


@pytest.mark.parametrize("change", [lambda y: y * 8, lambda y: y[:, :32], lambda y: (y, None)])
def test_a_hook_that_returns_another_output(change):
    """It is called behind the layer: the numbers are those of a module around the layer."""

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return self.layer(x)

    def loss(model, x):
        y = model(x) if hooked is model.layer else change(model(x))
        return (y if torch.is_tensor(y) else y[0]).square().mean()

    torch.manual_seed(0)
    model, x = Around(), torch.randn(16, 64)
    rows = []
    for hooked in (None, model.layer):
        if hooked is not None:
            hooked.register_forward_hook(lambda module, args, y: change(y))
        rows.append(mf.inspect(model, x, ["nvfp4"], loss=loss).rows)
    assert len(rows[0]) == 1
    assert rows[0] == rows[1]


def test_delayed_operands_that_a_layer_has_no_amax_of():
    """Its own recipe scales x and W by earlier amaxes; g has those of this batch."""
    torch.manual_seed(0)
    model, x = Two(), torch.randn(16, 32)
    delayed = "e4m3/tensor+delayed"
    mf.quantize_(model, f"fprop={delayed}*{delayed} dgrad=bf16*bf16 wgrad=bf16*bf16")
    (model(x) * 1e-3).backward()
    mf.step(model)
    for row in mf.inspect(model, x, ["fp8_delayed"], loss=lambda m, x: m(x) * 1e-3).rows:
        assert max(row.dx_error, row.dw_error) < 0.1


# ---- what it leaves alone ------------------------------------------------------------------------


class Teacher(nn.Module):
    """A frozen layer whose running mean of squares divides another layer's loss."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(32, 32), nn.Linear(32, 32).requires_grad_(False)
        self.register_buffer("squares", torch.ones(32))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        t = self.teacher(x)
        self.squares.mul_(0.9).add_(t.square().mean(0), alpha=0.1)
        self.calls = self.calls + 1
        return (self.student(x) - t * self.squares.rsqrt()).square().mean()


def test_buffers_that_a_forward_writes():
    model, x = Teacher(), torch.randn(8, 32)
    model(x).backward()
    before = [model.squares.clone(), model.calls]
    mf.inspect(model, x, ["mxfp8"])
    assert torch.equal(model.squares, before[0])
    assert model.calls is before[1]
    model(x).backward()


class Lazy(nn.Module):
    """A layer, and a buffer that its first forward makes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("first", None)

    def forward(self, x):
        y = self.layer(x)
        self.first = y.detach().clone() if self.first is None else self.first
        self.register_buffer("last", y.detach())
        return (y - self.first).square().mean()


def test_buffers_that_a_forward_makes():
    model = Lazy()
    mf.inspect(model, torch.randn(8, 32), ["mxfp8"])
    assert model._buffers == {"first": None}


@pytest.mark.parametrize("norm", ["weight_norm", "spectral_norm"])
def test_converted_layers_whose_weight_is_computed(norm):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    mf.quantize_(model, "mxfp8", keep="nothing")
    getattr(nn.utils.parametrizations, norm)(model[0])
    x, loss = torch.randn(8, 32), lambda m, x: m(x).square().mean()
    found = mf.inspect(model, x, loss=loss)
    assert ("0", "its weight is computed in each forward") in found.skipped
    assert [row.layer for row in found.rows] == ["1"]


def test_the_mode_of_a_module_in_two_others():
    drop = nn.Dropout(0.5)
    model = nn.Sequential(
        nn.Sequential(drop, nn.Linear(32, 32)), nn.Sequential(drop, nn.Linear(32, 32))
    )
    drop.eval()
    mf.inspect(model, torch.randn(8, 32), ["mxfp8"], loss=lambda m, x: m(x).square().mean())
    assert not drop.training
    assert model.training


def test_training_goes_on_as_without_it():
    """Weights, random states, histories, gradients and modes are those of a model without it."""
    models = []
    for look in (False, True):
        model = llama(MIXED)
        mf.quantize_(model, "*: nvfp4; *.wq: fp8_delayed", accumulate="main_grad")
        model.layers[0].attention_norm.eval()
        for linear in (m for m in model.modules() if isinstance(m, nn.Linear)):
            linear.weight.main_grad = torch.zeros_like(linear.weight)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            batch = ids(step + 2)
            loss_of(model, batch).backward()
            if look:
                mf.inspect(model, batch, loss=loss_of)
            optimizer.step()
            mf.step(model)
        assert model.training
        assert not model.layers[0].attention_norm.training
        grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        sums = {n: p.main_grad for n, p in model.named_parameters() if hasattr(p, "main_grad")}
        models.append((model.state_dict(), grads, sums))
    for before, after in zip(*models):
        require_same_results(after, before)


def test_a_failing_loss_leaves_the_model_in_order():
    model = Two()
    with pytest.raises(RuntimeError, match="shapes"):
        mf.inspect(model, torch.randn(8, 31), "mxfp8")
    assert model.training
    assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(
        ValueError, match=r"expected a loss, a tensor of one element.* got \(8, 32\)"
    ):
        mf.inspect(nn.Linear(32, 32), torch.randn(8, 32), "mxfp8")


def test_refusals():
    with pytest.raises(TypeError, match=r"inspect: expected a torch.nn.Module"):
        mf.inspect(3, None)
    with pytest.raises(ValueError, match="expected a model and recipes to inspect, got no linear"):
        mf.inspect(nn.ReLU(), torch.ones(2))
    with pytest.raises(ValueError, match="expected a model and recipes to inspect, got no recipe"):
        mf.inspect(Two(), torch.ones(2, 32), [])
    with pytest.raises(ValueError, match="'mxfp9' is not a recipe"):
        mf.inspect(Two(), torch.ones(2, 32), ["mxfp9"])


# ---- the result ----------------------------------------------------------------------------------


def test_the_map_keeps_a_share(inspection):
    rows = rows_by(inspection, "nvfp4")
    total = sum(row.operations for name, row in rows.items() if name != "output")
    before = set()
    for share in (1.0, 0.9, 0.5, 0.0):
        text = inspection.recipe_map(share).text
        kept = {n for n in rows if f" {n}: bf16" in text}
        taken = sum(rows[name].operations for name in kept)
        assert taken <= (1 - share) * total * (1 + 1e-6)
        smallest = min(row.operations for row in rows.values())
        assert taken >= (1 - share) * total - smallest * 4  # a layer that no longer fits
        assert before <= kept or share == 0.5
        before = kept
    assert kept == set(rows) - {"output"}
    first = inspection.recipe_map(0.9)
    model = llama()
    report = mf.quantize_(model, first)
    recipes = dict(report.converted)
    assert all(
        recipes[name] == "nvfp4"
        for name in rows
        if first.find(name).text == "nvfp4" and name != "output"
    )
    assert len(recipes) < len(rows) - 1


def test_a_map_of_experts():
    """Experts are one name of the map, for all of their matrices; routers stay out of it."""
    found = mf.inspect(llama(MIXED), ids(), ["nvfp4"], loss=loss_of)
    text = found.recipe_map(0.0).text
    assert text.count("layers.1.moe.experts: bf16") == 1
    assert "router" not in text
    every = mf.quantize_(llama(MIXED), found.recipe_map(1.0))
    assert {name for name, _ in every.converted} == {r.layer for r in found.rows} - {"output"}
    some = mf.quantize_(llama(MIXED), found.recipe_map(0.8))
    assert 0 < len(some.converted) < len(every.converted)


def test_the_map_ranks_by_predicted_loss(inspection):
    """Among layers of one size, those that stay are the ones with the largest second order."""
    rows = rows_by(inspection, "nvfp4")
    text = inspection.recipe_map(0.8).text
    size = rows["layers.0.attention.wq"].operations
    same = [n for n in rows if n != "output" and rows[n].operations == size]
    kept = [name for name in same if f" {name}: bf16" in text]
    left = [name for name in same if name not in kept]
    assert kept
    assert left
    assert min(rows[n].loss_second for n in kept) >= max(rows[n].loss_second for n in left)
    mixed = inspection.recipe_map(0.8, "nvfp4", "mxfp8").text
    assert ": mxfp8" in mixed
    assert "bf16" not in mixed


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_layer_without_a_finite_loss_stays_first(inspection, loss):
    one = left_by(inspection, 0.8)[0]
    rows = [replace(row, loss_second=loss) if row.module == one else row for row in inspection.rows]
    assert one not in left_by(replace(inspection, rows=rows), 0.8)


def left_by(inspection, share):
    """Returns the layers that a map converts to nvfp4, as the inspection orders them."""
    text = inspection.recipe_map(share).text
    modules = dict.fromkeys(row.module for row in inspection.rows)
    return [
        name for name in modules if name not in inspection.heads and f" {name}: bf16" not in text
    ]


def test_refusals_of_a_map(inspection):
    with pytest.raises(ValueError, match="expected a share from 0 to 1, got 2"):
        inspection.recipe_map(2)
    with pytest.raises(TypeError, match="expected a share from 0 to 1, got 'a'"):
        inspection.recipe_map("a")
    with pytest.raises(ValueError, match=r"low: expected one of mxfp8, nvfp4, .*, got mxfp4"):
        inspection.recipe_map(0.5, "mxfp4")
    with pytest.raises(ValueError, match=r"high: expected one of mxfp8, nvfp4, .* fp8_rowwise"):
        inspection.recipe_map(0.5, "nvfp4", "fp8_rowwise")


def test_a_map_of_layers_with_recipes_of_their_own():
    """What a recipe does to a layer that was not inspected under it is not known."""
    model = Two()
    mf.quantize_(model, "*: mxfp8; down: nvfp4", keep="nothing")
    found = mf.inspect(model, torch.randn(8, 32))
    assert len(found.recipes) == 2
    with pytest.raises(ValueError, match="low: expected a recipe, inspected in every layer"):
        found.recipe_map(1.0, low="nvfp4", high="mxfp8")


def test_a_map_of_one_layer():
    layer, x = nn.Linear(64, 64), torch.randn(8, 64)
    found = mf.inspect(layer, x, ["nvfp4"], loss=lambda m, x: m(x).square().mean())
    assert found.recipe_map(0.0) == mf.RecipeMap("*: bf16")
    assert found.recipe_map(1.0) == mf.RecipeMap("*: nvfp4")


def test_a_map_of_modules_that_are_not_called():
    """It names modules, also of experts, and leaves heads to mf.quantize_."""

    class Model(Two):
        def __init__(self):
            super().__init__()
            self.moe, self.lm_head = mf.MoE(32, 64, experts=4, top_k=2), nn.Linear(32, 300)

    found = mf.inspect(Model(), torch.randn(8, 32), ["nvfp4"])
    assert dict(found.skipped)["moe.experts"] == NOT_CALLED
    text = found.recipe_map(1.0).text
    assert text == "*: nvfp4; moe.experts: bf16"
    assert dict(mf.quantize_(Model(), text).converted).keys() == {"up", "down"}


def test_text_json_and_picture(inspection, tmp_path):
    titles, _, *table = inspection.table().splitlines()
    assert len(table) == len(inspection.rows) + len(inspection.recipes)
    assert len({len(line) for line in (titles, *table)}) == 1
    for total, recipe in zip(table[-len(inspection.recipes) :], inspection.recipes):
        rows = [
            r for r in inspection.rows if r.recipe == recipe and r.module not in inspection.heads
        ]
        cells = [cell.strip() for cell in total.split("|")[1:-1]]
        operations = sum(row.operations for row in rows)
        mean = sum(row.operations * row.y_error for row in rows) / operations
        assert cells[:2] == ["all, without heads", recipe]
        assert (cells[-5], cells[-1]) == (
            f"{100 * mean:.2f}",
            f"{sum(r.loss_second for r in rows):.1e}",
        )
    assert len(inspection.operand_table().splitlines()) == 6 * len(inspection.rows) + 2
    read = json.loads(inspection.json())
    assert len(read["rows"]) == len(inspection.rows)
    assert read["rows"][0]["operands"][0]["scales"]
    inspection.plot(tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def test_exact_operands_are_null_in_json(tmp_path):
    model = Two()
    with torch.no_grad():
        model.up.weight.fill_(1.0)
    found = mf.inspect(model, torch.randn(8, 32), ["mxfp8", "fp8_rowwise_gw_hp"])
    (row,) = (r for r in found.rows if r.layer == "up" and r.recipe == "mxfp8")
    assert row.operands[1].snr_db == math.inf
    assert [e.operand for e in found.rows[1].operands] == OPERANDS[:4]
    first = json.loads(found.json())["rows"][0]
    assert first["operands"][1]["snr_db"] is None
    found.plot(tmp_path / "map.png")
