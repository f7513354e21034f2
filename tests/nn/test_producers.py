"""Which norms mf.quantize_ fuses, what the report says, and how a norm is kept and restored."""

import copy
import io
import pickle

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from minifloat.nn.fuse.deferred import Deferred
from minifloat.nn.fuse.module_trace import trace_forward
from minifloat.nn.fuse.norms import DeferringNorm, ForeignRMSNorm, LayerNorm, RMSNorm, adopt_norm
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.support.fused_models import (
    NORMS,
    WIDTH,
    Block,
    LlamaRMSNorm,
    block,
    hidden,
    results,
    unfused,
)
from tests.support.same_bits import require_same_results


class Reads(nn.Module):
    """A norm, two layers, and a forward of the test's."""

    def __init__(self, forward, norm=None, other=None):
        super().__init__()
        self.norm = norm or nn.RMSNorm(WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.other = other or nn.Identity()
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


class Gated(nn.Module):
    """A feed-forward whose activation is a module."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act = nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


def report_of(forward, recipe="mxfp8", **parts):
    model = Reads(forward, **parts).bfloat16()
    report = mf.quantize_(model, recipe, fuse=True, verbose=False)
    return model, report


def test_report():
    torch.manual_seed(0)
    model = nn.Sequential(Block(), nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 8))
    report = mf.quantize_(model, "0.*: fp8_rowwise", fuse=True, verbose=False)
    assert report.fused[:2] == [
        (
            "0.attention_norm",
            "fused with the casts of 0.attention.wq, 0.attention.wk, 0.attention.wv",
        ),
        ("0.ffn_norm", "fused with the casts of 0.feed_forward.w1, 0.feed_forward.w3"),
    ]
    assert report.fused[2:] == [("0.feed_forward", "w1, w3, w2 and silu are one op")]
    assert report.not_fused == []  # no layer that reads the last norm is converted
    assert "  * 0.ffn_norm" in str(report)
    assert str(report).startswith("minifloat: 7 converted, 1 not\n")
    assert type(model[1]) is nn.RMSNorm


def test_models_of_fake_tensors_are_fused():
    for make in (
        lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 8)),
        lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)),
        lambda: nn.Sequential(LlamaRMSNorm(WIDTH), nn.Linear(WIDTH, 8)),
        Gated,
    ):
        expected = mf.quantize_(make(), "mxfp8", fuse=True, verbose=False)
        with FakeTensorMode():
            report = mf.quantize_(make(), "mxfp8", fuse=True, verbose=False)
        assert report.fused
        assert report.fused == expected.fused


NOT_FUSED = {
    "a second reader": (
        lambda m, x: m.first(y := m.norm(x)) + F.relu(y),
        "the function relu reads it",
    ),
    "a method": (lambda m, x: m.first(y := m.norm(x)) + y.view(-1), "the method view reads it"),
    "returned": (lambda m, x: (m.first(y := m.norm(x)), y), "the caller of forward reads it"),
    "a module": (
        lambda m, x: m.first(y := m.norm(x)) + m.other(y),
        "other, a Identity, reads it",
    ),
    "a list": (
        lambda m, x: m.first(y := m.norm(x)) + m.second([y]),
        "second reads it beside other values",
    ),
    "in place": (
        lambda m, x: (y := m.norm(x), a := m.first(y), x.add_(1), a + m.second(y))[-1],
        "a tensor is modified in place before all have read it",
    ),
    "no trace": (lambda m, x: torch.from_numpy(x) + m.first(m.norm(x)), "forward of Reads cannot"),
}


@pytest.mark.parametrize("case", NOT_FUSED)
def test_not_fused_and_why(case):
    forward, reason = NOT_FUSED[case]
    model, report = report_of(forward)
    assert type(model.norm) is nn.RMSNorm
    assert report.fused == []
    ((name, found),) = report.not_fused
    assert name == "norm"
    assert reason in found
    assert f"- norm    not fused: {found}" in str(report)


def test_in_place_operators_and_modules():
    def operator(m, x):
        y = m.norm(x)
        x += 1
        return m.first(y)

    def item(m, x):
        y = m.norm(x)
        x[0] = 1
        return m.first(y)

    def module(m, x):
        y = m.norm(x)
        return m.other(x) + m.first(y)

    def later(m, x):
        y = m.first(m.norm(x))
        y += 1
        return y

    assert report_of(operator)[1].not_fused
    assert report_of(item)[1].not_fused
    assert report_of(module, other=nn.ReLU(inplace=True))[1].not_fused
    assert report_of(module)[1].fused
    assert report_of(later)[1].fused


def test_readers_in_high_precision():
    _, report = report_of(lambda m, x: m.first(m.norm(x)), "fp8_rowwise_gw_hp")
    assert report.not_fused == [("norm", "first reads it in high precision")]


MIXED = "fprop=nvfp4+pow2*nvfp4 dgrad=nvfp4*nvfp4 wgrad=nvfp4*nvfp4"


@pytest.mark.parametrize(
    ("recipe", "is_fused"),
    [("nvfp4_pow2", False), ("mxfp4", True), ("nvfp4", True), (MIXED, True)],
)
def test_casts_that_write_fp8(recipe, is_fused):
    model, report = report_of(lambda m, x: m.first(m.norm(x)), recipe)
    assert bool(report.fused) == is_fused
    assert isinstance(model.norm, DeferringNorm) == is_fused
    if not is_fused:
        assert report.not_fused == [("norm", "on Hopper a cast of its values writes FP8 at once")]


def test_one_reader_whose_cast_writes_fp8():
    model = Reads(lambda m, x: m.first(y := m.norm(x)) + m.second(y)).bfloat16()
    report = mf.quantize_(model, "first: mxfp8; second: nvfp4_pow2", fuse=True, verbose=False)
    assert report.not_fused == [("norm", "on Hopper a cast of its values writes FP8 at once")]


def test_a_layer_that_is_not_converted():
    model = Reads(lambda m, x: m.first(y := m.norm(x)) + m.second(y)).bfloat16()
    report = mf.quantize_(model, "mxfp8", ["second"], fuse=True, verbose=False)
    assert report.not_fused == [("norm", "second, a Linear, reads it")]


def test_forwards_that_look_at_values():
    def forward(m, x):
        y = m.norm(x)
        if y.shape[0] > 1 and len(x) > 0:
            _batch, *_ = y.shape
        for _ in range(int(x.shape[1] > 0)):
            x = x * 1.0
        while x.sum() == 12345.0 and not x.any():
            x = x + 1
        return m.first(y) + x

    assert report_of(forward)[1].fused


def test_a_trace_ends_and_changes_nothing():
    class Endless(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0
            self.register_buffer("count", torch.zeros(1))
            self.inner = nn.Linear(2, 2)

        def forward(self, x):
            self.calls += 1
            self.last = x
            self.count += 1
            self.count.add_(1)
            self.inner = nn.Identity()
            while x.any():
                x = x + 1
            return x

    module = Endless()
    before = dict(module.__dict__)
    inner = module.inner
    assert trace_forward(module) is None
    assert module.__dict__ == before
    assert module.inner is inner
    assert module.count.item() == 0
    with torch.no_grad():
        assert module(torch.zeros(2)).sum() == 0
    assert module.calls == 1


def test_one_norm_with_two_calls():
    model, report = report_of(lambda m, x: m.first(m.norm(x)) + m.second(m.norm(x + 1)))
    assert report.fused == [("norm", "fused with the casts of first, second")]
    require_same_results(results(model), results(unfused(model)))
    _, report = report_of(lambda m, x: m.first(m.norm(x)) + m.norm(x + 1))
    assert report.not_fused == [("norm", "the function add reads it")]


def test_layers_of_two_recipes():
    torch.manual_seed(0)
    model = Reads(lambda m, x: m.first(y := m.norm(x)) + m.second(y)).bfloat16()
    report = mf.quantize_(model, "first: mxfp8; second: fp8_rowwise", fuse=True, verbose=False)
    assert report.fused
    require_same_results(results(model), results(unfused(model)))


@pytest.mark.parametrize(
    ("kind", "cls"), [("rms", RMSNorm), ("layer", LayerNorm), ("rms_rounded", ForeignRMSNorm)]
)
def test_kept_and_restored(kind, cls):
    torch.manual_seed(0)
    model = Block(kind)
    before = copy.deepcopy(model)
    norm, state = model.ffn_norm, dict(model.ffn_norm.__dict__)
    parameters = dict(model.named_parameters())
    mf.quantize_(model, "mxfp8", fuse=True, verbose=False)
    assert model.ffn_norm is norm
    assert type(norm) is cls
    assert isinstance(norm, NORMS[kind]) or cls is ForeignRMSNorm
    assert "deferred" in repr(norm)
    assert list(model.state_dict()) == list(before.state_dict())
    assert all(p is parameters[name] for name, p in model.named_parameters())
    model.load_state_dict(before.state_dict())
    mf.restore_(model)
    assert type(norm) is NORMS[kind]
    assert norm.__dict__ == state
    assert repr(model) == repr(before)
    x = hidden(torch.float32)
    assert torch.equal(model(x), before(x))


def test_copies_and_files():
    model = block("mxfp8", "rms_rounded")
    want = results(model)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(stream, weights_only=False),
    ]
    for twin in copies:
        require_same_results(results(twin), want)
        assert isinstance(twin.ffn_norm(hidden()), Deferred)
        assert twin.ffn_norm.readers[0] is twin.feed_forward
        assert type(mf.restore_(twin).ffn_norm) is LlamaRMSNorm


def test_fuse_false():
    model = block(fuse=False)
    assert type(model.ffn_norm) is nn.RMSNorm
    with pytest.raises(TypeError, match="fuse"):
        block(fuse="no")


def test_two_calls_for_one_model():
    torch.manual_seed(0)
    model = Block().bfloat16()
    first = mf.quantize_(model, "mxfp8", ["feed_forward"], fuse=True, verbose=False)
    second = mf.quantize_(model, "fp8_rowwise", fuse=True, verbose=False)
    assert [name for name, _ in first.fused] == ["attention_norm"]
    assert [name for name, _ in second.fused] == ["ffn_norm", "feed_forward"]
    require_same_results(results(model), results(unfused(model)))


def test_an_error_leaves_norms_alone(monkeypatch):
    model = Block()
    classes = [type(m) for m in model.modules()]
    state = [dict(m.__dict__) for m in model.modules() if "Norm" in type(m).__name__]
    monkeypatch.setattr("minifloat.nn.fuse.producers.adopt_norm", failing_after(model.ffn_norm))
    with pytest.raises(ZeroDivisionError):
        mf.quantize_(model, "mxfp8", fuse=True, verbose=False)
    assert [type(m) for m in model.modules()] == classes
    assert [dict(m.__dict__) for m in model.modules() if "Norm" in type(m).__name__] == state


def failing_after(norm):
    """Returns adopt_norm, with an error after it has converted this norm."""

    def adopt(module, *args):
        adopt_norm(module, *args)
        assert 1 / (module is not norm)

    return adopt


def test_norms_that_are_no_such_norm():
    class TimesTwoRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states) * 2

    class OnePlusRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(WIDTH))
            self.variance_epsilon = 1e-6

        def forward(self, x):
            return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.variance_epsilon)

    class MyRMSNorm(nn.RMSNorm):
        pass

    for norm in (TimesTwoRMSNorm(WIDTH), OnePlusRMSNorm(), MyRMSNorm(WIDTH), nn.RMSNorm((2, 64))):
        model, report = report_of(lambda m, x: m.first(m.norm(x)), norm=norm)
        assert not isinstance(model.norm, DeferringNorm)
        assert report.fused == report.not_fused == []


@pytest.mark.parametrize("cls", [nn.RMSNorm, nn.LayerNorm])
def test_a_norm_of_torch_whose_forward_is_patched(cls, monkeypatch):
    own = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, x: own(self, x) * 1.001)
    model, report = report_of(lambda m, x: m.first(m.norm(x)), norm=cls(WIDTH))
    assert type(model.norm) is cls
    assert report.fused == report.not_fused == []


def test_a_norm_without_weight_and_eps():
    norm = nn.RMSNorm(WIDTH, elementwise_affine=False)
    model, report = report_of(lambda m, x: m.first(m.norm(x)), norm=norm)
    assert report.fused
    require_same_results(results(model), results(unfused(model)))
    x = torch.full((4, WIDTH), 1e-5, dtype=torch.bfloat16)  # eps matters
    torch.testing.assert_close(model.norm(x) + 0, F.rms_norm(x, (WIDTH,)), rtol=2**-8, atol=0)


def test_transformer_encoder_layers_of_torch():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(WIDTH, 4, 128, 0.0, batch_first=True, norm_first=True)
    report = mf.quantize_(model.bfloat16(), "mxfp8", fuse=True, verbose=False)
    assert ("norm2", "fused with the casts of linear1") in report.fused
    require_same_results(results(model), results(unfused(model)))


def test_sequential_and_wrapped_readers():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), checkpoint_wrapper(nn.Linear(WIDTH, WIDTH)))
    report = mf.quantize_(model.bfloat16(), "mxfp8", fuse=True, verbose=False)
    assert report.fused == [("0", "fused with the casts of 1")]
    require_same_results(results(model), results(unfused(model)))
