"""A fused norm's bits are those of the same model whose norms return values: results, gradients,
amax histories; in eager mode, compiled and recomputed; and for whatever else reads the result.
"""

import copy
import pickle

import minifloat as mf
import pytest
import torch
import torch.nn.functional as F
from minifloat.nn.fuse.deferred import Deferred, DeferredNorm
from minifloat.nn.fuse.norms import DeferringNorm
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.compiled import compiled
from tests.support.fused_models import NORMS, PRESETS, RUNS, WIDTH, block, hidden, results, unfused
from tests.support.same_bits import require_same_results

STOCHASTIC_INPUT = "fprop=nvfp4+sr*nvfp4 dgrad=mxfp8*mxfp8 wgrad=mxfp8*mxfp8+sr"


def norm_of(dtype=torch.bfloat16, kind="rms", recipe="nvfp4"):
    """Returns a fused norm and the layer that reads it."""
    torch.manual_seed(0)
    model = nn.Sequential(NORMS[kind](WIDTH), nn.Linear(WIDTH, WIDTH)).to(dtype)
    mf.quantize_(model, recipe, fuse=True, verbose=False)
    assert isinstance(model[0], DeferringNorm)
    return model


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("recipe", PRESETS)
def test_every_preset(recipe, run):
    fused = block(recipe)
    plain = unfused(fused)
    require_same_results(results(fused, RUNS[run](fused)), results(plain, RUNS[run](plain)))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", NORMS)
def test_every_kind_and_dtype(kind, dtype, run):
    fused = block("mxfp8", kind, dtype, bias=True)
    plain = unfused(fused)
    require_same_results(results(fused, RUNS[run](fused)), results(plain, RUNS[run](plain)))


def test_a_checkpoint_in_compiled_code():
    fused = block("fp8_rowwise")
    plain = unfused(fused)
    found = [
        results(m, compiled(lambda x, m=m: checkpoint(m, x, use_reentrant=False)))
        for m in (fused, plain)
    ]
    require_same_results(*found)


@pytest.mark.parametrize("run", ["eager", "checkpoint", "compiled"])
def test_delayed_histories_over_steps(run):
    fused = norm_of(recipe="fp8_delayed")
    plain = unfused(fused)
    runs = [(m, RUNS[run](m)) for m in (fused, plain)]
    for seed in range(3):
        require_same_results(*[results(m, call, hidden(seed=seed)) for m, call in runs])
        for model, _ in runs:
            mf.step(model)
    assert fused[1].amax_history[0, 0] > 0


@pytest.mark.parametrize("recipe", ["fp8_delayed", STOCHASTIC_INPUT])
def test_norms_whose_readers_share_no_codes_stay(recipe):
    model = block(recipe)
    assert not any(isinstance(module, DeferringNorm) for module in model.modules())


@pytest.mark.parametrize("run", ["eager", "checkpoint", "compiled"])
def test_stochastic_inputs_draw_from_the_readers_stream(run):
    fused = norm_of(recipe=STOCHASTIC_INPUT)
    plain = unfused(fused)
    require_same_results(results(fused, RUNS[run](fused)), results(plain, RUNS[run](plain)))


def test_codes_are_cast_once_for_all_readers(monkeypatch):
    model = block("mxfp8")
    calls = []
    cast = DeferredNorm._cast
    monkeypatch.setattr(DeferredNorm, "_cast", lambda *a: calls.append(a) or cast(*a))
    model(hidden())
    assert len(calls) == 2  # wq, wk and wv; w1 and w3


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_evaluation_and_inference(mode, grad):
    fused = getattr(norm_of(recipe="fp8_delayed"), mode)()
    plain = unfused(fused)
    for context in (torch.no_grad, torch.inference_mode):
        with (
            context(mode=not grad)
            if context is torch.inference_mode
            else torch.set_grad_enabled(grad)
        ):
            x = hidden().detach()
            assert torch.equal(fused(x), plain(x))


def test_frozen_norms_and_layers():
    for frozen in (("norm",), ("wq", "w1"), ("norm", "w"), ("wk", "w3")):
        fused = block("mxfp8")
        for name, parameter in fused.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen))
        plain = unfused(fused)
        require_same_results(results(fused), results(plain))


def test_a_second_reader_that_is_no_layer():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.RMSNorm(WIDTH)
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.layer(self.norm(x))

    torch.manual_seed(0)
    fused = Two().bfloat16()
    mf.quantize_(fused, "mxfp8", fuse=True, verbose=False)
    plain = unfused(fused)

    def both(model, values_first):
        def run(x):
            y = model.norm(x)
            first = F.relu(y) if values_first else model.layer(y)
            second = model.layer(y) if values_first else F.relu(y)
            return first + second * 2

        return run

    for values_first in (True, False):
        for wrap in (lambda run: run, compiled):
            got, want = (results(m, wrap(both(m, values_first))) for m in (fused, plain))
            if values_first:  # both readers' gradients are summed at the values
                require_same_results(got, want)
            assert torch.equal(got["y"], want["y"])
            for name in want:  # two gradients, summed in either order
                torch.testing.assert_close(got[name], want[name], rtol=2**-7, atol=2**-9)


READS = {
    "add": lambda y: y + 1,
    "radd": lambda y: 1 - y,
    "tensor first": lambda y: torch.ones(WIDTH, dtype=y.dtype) * y,
    "index": lambda y: y[0, 1:3],
    "iterate": lambda y: torch.stack(list(y)),
    "method": lambda y: y.view(-1, WIDTH).sum(0),
    "function": lambda y: F.linear(y, torch.ones(3, WIDTH, dtype=y.dtype)),
    "list": lambda y: torch.cat([y, y], -1),
    "compare": lambda y: y == y,
    "dtype": lambda y: y.to(torch.float32),
    "keyword": lambda y: torch.mul(input=y, other=y),
    "in place": lambda y: y.add_(2),
    "in place operator": lambda y: y.__iadd__(2),
    "set item": lambda y: (y.__setitem__(0, 3), y * 1)[1],
    "out": lambda y: torch.add(y, 1, out=torch.empty(y.shape, dtype=y.dtype)),
}


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("read", READS)
def test_anything_reads_the_plain_tensor(read, is_compiled):
    model = norm_of()
    norm, plain = model[0], unfused(model)[0]

    def run(norm):
        call = lambda x: READS[read](norm(x))  # noqa: E731
        return compiled(call) if is_compiled else call

    x = hidden()
    with torch.set_grad_enabled(read not in ("out", "set item", "iterate")):
        assert isinstance(norm(x), Deferred)
        got, want = run(norm)(x), run(plain)(x)
    assert type(got) is torch.Tensor
    assert torch.equal(got, want)
    assert got.requires_grad == want.requires_grad
    if want.requires_grad:
        grads = [torch.autograd.grad(y.float().square().sum(), x)[0] for y in (got, want)]
        assert torch.equal(*grads)


def test_shape_dtype_and_device_compute_nothing():
    x = hidden()
    y = norm_of()[0](x)
    assert (y.shape, y.size(-1), y.dim(), y.ndim, y.numel()) == (x.shape, WIDTH, 3, 3, x.numel())
    assert (y.dtype, y.device, y.requires_grad, len(y)) == (x.dtype, x.device, True, 2)
    assert (y.is_nested, y.is_meta, y.is_cuda, y.is_computed) == (False,) * 4
    assert "DeferredNorm" in repr(y)
    assert y.is_computed


def test_layers_read_what_was_written_to_the_values():
    model = norm_of()
    plain = unfused(model)
    for wrap in (lambda run: run, compiled):
        got, want = (wrap(lambda x, m=m: m[1](m[0](x).mul_(2)))(hidden()) for m in (model, plain))
        assert torch.equal(got, want)

    def kept(model, x):
        y = model[0](x)
        y.mul_(2)
        return model[1](y)

    for wrap in (lambda run: run, compiled):
        got, want = (wrap(lambda x, m=m: kept(m, x))(hidden()) for m in (model, plain))
        assert torch.equal(got, want)


def test_a_write_to_the_norms_input_is_an_error():
    model = norm_of()
    x = hidden().detach()
    y = model[0](x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model[1](y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y + 1


def test_copies_and_pickles_are_plain():
    x = hidden().detach()
    y = norm_of()[0](x)
    with torch.no_grad():
        assert torch.equal(copy.copy(y), y.values())
    norm = norm_of()[0].requires_grad_(False)
    y = norm(x)
    assert torch.equal(pickle.loads(pickle.dumps(y)), y.values())
    assert torch.equal(copy.deepcopy(y), y.values())
    assert y.float().numpy().shape == x.shape


def test_autocast_leaves_the_norm_to_torch():
    fused = block("mxfp8", dtype=torch.float32)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16):
        y = fused.attention_norm(hidden(torch.float32))
        assert type(y) is torch.Tensor
        assert torch.equal(y, nn.RMSNorm.forward(fused.attention_norm, hidden(torch.float32)))
        assert fused(hidden(torch.float32)).dtype == torch.float32


def test_a_result_of_outside_autocast_is_read_as_values():
    model = norm_of(torch.float32)
    plain = unfused(model)
    x = hidden(torch.float32)
    got, want = model[0](x), plain[0](x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model[1](got), plain[1](want))
    assert got.is_computed


def test_dtypes_that_differ_are_left_to_torch():
    norm = norm_of(torch.float32)[0]
    x = hidden()
    with pytest.warns(UserWarning, match="Mismatch dtype"):
        assert torch.equal(norm(x), nn.RMSNorm.forward(norm, x))
    assert type(norm(hidden(torch.float64).detach())) is torch.Tensor


@pytest.mark.parametrize("where", ["attention_norm", "attention", "attention.wq"])
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_see_tensors(where, kind):
    fused = block("mxfp8")
    plain = unfused(fused)
    seen = []

    def hook(module, *values):
        seen.extend(v for value in values for v in (value if type(value) is tuple else (value,)))

    register = {"forward_pre": "register_forward_pre_hook"}.get(kind, f"register_{kind}_hook")
    getattr(fused.get_submodule(where), register)(hook)
    require_same_results(results(fused), results(plain))
    assert seen
    assert not any(isinstance(value, Deferred) for value in seen)


def test_a_submodule_that_is_called_directly():
    fused = block("mxfp8")
    plain = unfused(fused)
    x = hidden()
    assert torch.equal(
        fused.attention(fused.attention_norm(x)), plain.attention(plain.attention_norm(x))
    )
    assert torch.equal(fused.attention(x), plain.attention(x))


def test_a_checkpoint_of_a_reader():
    fused = block("mxfp8")
    plain = unfused(fused)

    def run(model, **options):
        def call(x):
            y = checkpoint(model.attention, model.attention_norm(x), **options)
            return model.feed_forward(model.ffn_norm(x + y))

        return call

    got, want = (results(m, run(m, use_reentrant=False)) for m in (fused, plain))
    require_same_results(got, want)
    compiled_ones = (results(m, compiled(run(m, use_reentrant=False))) for m in (fused, plain))
    require_same_results(*compiled_ones)
    reentrant = run(fused, use_reentrant=True)
    with (
        pytest.warns(UserWarning, match="None of the inputs have requires_grad"),
        pytest.raises(RuntimeError, match="use_reentrant=False"),
    ):
        reentrant(hidden())


def test_a_compiled_norm_and_a_compiled_reader():
    fused = block("mxfp8")
    plain = unfused(fused)
    want = results(plain)
    for name in ("attention_norm", "attention"):
        model = copy.deepcopy(fused)
        module = model.get_submodule(name)
        module.forward = torch.compile(module.forward, fullgraph=True, backend="aot_eager")
        require_same_results(results(model), want)


def test_micro_batches_and_a_frozen_model_reuse_codes():
    fused = block("nvfp4")
    plain = unfused(fused)
    for seed in (1, 2, 3):
        x = hidden(seed=seed)
        for model in (fused, plain):
            model(x).sum().backward()
    grads = [[p.grad for p in m.parameters()] for m in (fused, plain)]
    assert all(torch.equal(a, b) for a, b in zip(*grads))
