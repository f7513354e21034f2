"""Models under torch.compile and torch.export.

Eager and compiled models run the same products: repetitions (exact_sums.py).
"""

import minifloat as mf
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

# aot_eager traces, partitions and functionalizes as inductor does, and runs the same ops.
BACKEND = "aot_eager"
# More than one block each: torch gives a dimension of size 1 (one column of scales) its own graph.
BATCHES = (200, 130, 136, 1000, 513)


def build(recipe, kind=nn.Sequential, **arguments):
    torch.manual_seed(0)
    model = kind(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32, bias=False))
    mf.quantize_(model, recipe, **arguments)
    return model


def results(model, run, n):
    """Returns the output, every gradient, and the state after one step."""
    torch.manual_seed(n)
    x, g = torch.randn(n, 64, requires_grad=True), torch.randn(n, 32)
    model.zero_grad()
    y = run(x)
    y.backward(g)
    mf.step(model)
    return [
        y.detach(),
        x.grad,
        *(p.grad.clone() for p in model.parameters()),
        *mf.training_state(model).values(),
    ]


def require_equal(eager, compiled):
    assert len(eager) == len(compiled)
    for a, b in zip(eager, compiled):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed", "mxfp8_nvfp4", "fp8_rowwise_gw_hp"])
def test_one_graph_for_five_batch_sizes(recipe):
    eager, model = build(recipe), build(recipe)
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for n in BATCHES:
        require_equal(results(eager, eager, n), results(model, compiled, n))
    assert counter.frame_count == 1


@pytest.mark.parametrize("recipe", ["mxfp8_2d", "nvfp4", "mxfp8_nvfp4", "fp8_rowwise"])
def test_primary_weights_compile(recipe):
    eager, model = build(recipe, primary=True), build(recipe, primary=True)
    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for n in BATCHES[:3]:
        require_equal(results(eager, eager, n), results(model, compiled, n))
        for m in (eager, model):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
    assert counter.frame_count == 1


def test_blocks_that_compile_alone_share_one_graph():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

        def forward(self, x):
            return x + self.mlp(x)

    def build_blocks():
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 32))
        mf.quantize_(model, "nvfp4")
        return model

    eager, model = build_blocks(), build_blocks()
    counter = CompileCounterWithBackend(BACKEND)
    for block in model[:4]:
        block.compile(backend=counter, fullgraph=True)
    for _ in range(2):
        require_equal(results(eager, eager, 136), results(model, model, 136))
    assert counter.frame_count == 1


def test_autocast_and_checkpoint_under_compile():
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = checkpoint(self[0], x, use_reentrant=False)
                return self[2](self[1](y)).float()

    eager, model = build("nvfp4", Checkpointed), build("nvfp4", Checkpointed)
    compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
    for _ in range(2):
        require_equal(results(eager, eager, 136), results(model, compiled, 136))


def test_quantize_compiles():
    def cast(x):
        q = mf.tensor.quantize(x, "nvfp4+sr", seed=3)
        return q.codes, q.scale.view(torch.uint8), q.amax

    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(cast, backend=counter, fullgraph=True, dynamic=True)
    for n in BATCHES[:3]:
        x = torch.randn(n, 64)
        require_equal(cast(x), compiled(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("spec", ["nvfp4+sr", "e4m3/row", "mxfp8+rht64"])
def test_groups_compile(spec, columnwise):
    def cast(x, offs, ids):
        groups = mf.tensor.group_table(offs, x.shape[0])
        options = {"columnwise": columnwise, "groups": groups}
        q = mf.tensor.quantize(x, spec, seed=3, row_ids=ids, first_expert=1, **options)
        return (
            groups,
            q.codes,
            q.scale.view(torch.uint8),
            mf.tensor.dequantize(q),
            *some_amax(x, options),
        )

    def some_amax(x, options):
        return () if "mxfp8" in spec else (mf.tensor.amax(x, spec, **options),)

    counter = CompileCounterWithBackend(BACKEND)
    compiled = torch.compile(cast, backend=counter, fullgraph=True, dynamic=True)
    for n in BATCHES:
        args = torch.randn(n, 64), torch.tensor([0, 70, 70, n]).int(), torch.arange(n).int()
        eager, got = cast(*args), compiled(*args)
        if columnwise:  # bytes past the last group are unspecified
            unit = {"e4m3/row": 16, "nvfp4+sr": 32, "mxfp8+rht64": 64}[spec]
            end = eager[0][{16: 1, 32: 2, 64: 3}[unit], -1].item()
            eager, got = ([written(t, end, eager[3]) for t in run] for run in (eager, got))
        require_equal(eager, got)
    assert counter.frame_count == 1


def written(t, end, values):
    """Returns the part of t in the first `end` columns of `values`, if t has columns of them."""
    if t.shape[:1] != values.shape[:1]:
        return t
    return t[:, : t.shape[1] * end // values.shape[1]]


@pytest.mark.slow
def test_inductor():
    eager, model = build("nvfp4"), build("nvfp4")
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for n in BATCHES[:2]:
        a, b = results(eager, eager, n), results(model, compiled, n)
        # Inductor's GELU differs in the last bits, and so do the layers after it.
        for got, want in zip(b, a):
            assert torch.allclose(got, want, rtol=0.1, atol=0.1 * want.abs().max())
        assert torch.equal(a[-1], b[-1])


@pytest.mark.parametrize("training", [False, True])
def test_export(training):
    model = build("nvfp4").train(training)
    x = torch.randn(200, 64)
    batch = torch.export.Dim("batch", min=32, max=4096)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    targets = {str(node.target) for node in program.graph.nodes}
    assert any("minifloat.linear" in target for target in targets)
    with torch.no_grad():
        for n in (200, 333):
            x = torch.randn(n, 64)
            assert torch.equal(program.module()(x), model(x))
