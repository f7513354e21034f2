"""Behaviour of CUDA only: no wait for the device, fresh random bits in graphs, bounded memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import minifloat as mf
import pytest
import torch
from minifloat._native import ops
from torch import Tensor, nn

from tests.gpu.layer_cases import build, layer_data, require_close
from tests.support.graphs import captured
from tests.support.same_bits import require_same

pytestmark = pytest.mark.gpu

PRESETS = mf.presets()


@contextlib.contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("recipe", PRESETS)
def test_nothing_waits_for_the_device(cuda, recipe):
    model = build(recipe, cuda) if recipe != "bf16" else nn.Linear(128, 64).to(cuda, torch.bfloat16)
    x = torch.randn(96, 128, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    for mode in ("default", "error"):  # the first run may allocate lasting state
        with sync_debug_mode(mode):
            model(x).sum().backward()
            mf.step(model)


def test_no_cast_waits_for_the_device(cuda):
    x = torch.randn(128, 256, device=cuda)
    rng, amax = torch.tensor([1, 2], device=cuda), torch.tensor(3.0, device=cuda)
    scale = torch.ones(128, 8, dtype=torch.uint8, device=cuda)
    offs = torch.tensor([0, 100, 128], dtype=torch.int32, device=cuda)
    with sync_debug_mode("error"):
        codes, scales, used, *_ = ops.quantize(x, "nvfp4+sr", "nvfp4+sr+rht", rng=rng)
        ops.quantize(x, "nvfp4", "e4m3/row", amax_row=amax)
        ops.amax(x, "e4m3/row", True)
        ops.dequantize(codes, scales, used, "nvfp4", 256)
        ops.hadamard(x, 128, True)
        ops.swizzle_scales(scale, offs=offs, groups="m")
        ops.transpose_codes(codes, 256)


def test_a_graph_replays_with_fresh_bits_and_eagers_bytes(cuda):
    x = torch.randn(128, 256, device=cuda, dtype=torch.bfloat16)
    rng = torch.tensor([5, 0, 9], device=cuda)
    specs = ("nvfp4+sr", "nvfp4+sr+rht")
    graph, out = captured(lambda: ops.quantize(x, *specs, rng=rng))
    seen = []
    for count in (3, 4, 3):
        rng[1] = count
        graph.replay()
        for got, want in zip(out, ops.quantize(x, *specs, rng=rng)):
            require_same(got, want, f"replay at count {count}")
        seen.append(out[0].clone())
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[1])


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed", "fp8_rowwise", "fp8_blockwise"])
def test_a_layers_forward_and_backward_in_a_graph(cuda, recipe):
    """Captures the hook that advances rng too: each replay is the next eager step."""
    eager, model = build(recipe, cuda), build(recipe, cuda)
    x, _, _, g = (t.to(cuda) for t in layer_data((96, 128, 64), torch.bfloat16))
    inputs = [x.clone().requires_grad_() for _ in range(2)]

    def run(m: nn.Module, leaf: Tensor) -> list[Tensor]:
        y = m(leaf)
        gradients = torch.autograd.grad(y, [leaf, *m.parameters()], g)
        mf.step(m)
        return [y.detach(), *gradients]

    graph, out = captured(lambda: run(model, inputs[0]))
    mf.load_training_state(model, mf.training_state(eager))  # as it was before the warm-up
    replays = []
    for step in range(3):
        graph.replay()
        for i, (got, want) in enumerate(zip(out, run(eager, inputs[1]))):
            require_close(got, want, 2.0**-8, f"{recipe} replay {step}, result {i}")
        replays.append(out[1].clone())
    if mf.Recipe(recipe).is_stochastic:
        assert not torch.equal(replays[0], replays[1])
    for name, state in mf.training_state(eager).items():
        require_same(mf.training_state(model)[name], state, f"{recipe} {name}")


def test_replays_read_the_weight_as_it_then_is(cuda):
    """Quantizes a cached weight again in the graph, and in eager forwards after a replay.

    torch does not count the writes of a replay."""
    model = build("nvfp4", cuda)
    weight = model[0].weight
    x = torch.randn(96, 128, device=cuda, dtype=torch.bfloat16)
    factor = torch.tensor(1.0, device=cuda, dtype=torch.bfloat16)
    for _ in range(3):
        model(x).sum().backward()
    assert model[0].weight_codes.cached is not None
    with torch.no_grad():

        def run() -> Tensor:
            weight.mul_(factor)
            return model(x)

        graph, out = captured(run)
        for f in (2.0, 0.5, -1.0):
            factor.fill_(f)
            graph.replay()
            for _ in range(3):
                require_same(model(x), out, f"after a replay times {f}")


def test_each_stream_quantizes_for_itself(cuda):
    """Runs q, k and v on three streams, and reads a weight on another stream than before."""
    projections = nn.ModuleDict({n: nn.Linear(128, 128) for n in ("wq", "wk", "wv")})
    mf.quantize_(projections, "mxfp8")
    projections.to(cuda, torch.bfloat16)
    x = torch.randn(4096, 128, device=cuda, dtype=torch.bfloat16)
    with torch.no_grad():
        want = [layer(x) for layer in projections.values()]
        for _ in range(3):
            got = []
            for layer in projections.values():
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    got.append(layer(x))
                torch.cuda.current_stream().wait_stream(stream)
            for a, b in zip(got, want):
                require_same(a, b, "on a stream of its own")


def test_out_of_memory_leaves_a_layer_usable(cuda):
    model = build("nvfp4", cuda)
    x = torch.randn(64, 128, device=cuda, dtype=torch.bfloat16)
    want = model.eval()(x)
    large = torch.zeros(1 << 20, 128, device=cuda, dtype=torch.bfloat16)
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (64 << 20)
    total = torch.cuda.get_device_properties(cuda).total_memory
    torch.cuda.set_per_process_memory_fraction(room / total, cuda)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            model(large)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert torch.equal(model(x), want)


def test_compiled(cuda):
    """Allows for Inductor's GELU, which differs in the last bits."""
    eager, model = build("nvfp4", cuda), build("nvfp4", cuda)
    compiled = torch.compile(model, fullgraph=True)
    x, _, _, g = (t.to(cuda) for t in layer_data((96, 128, 64), torch.bfloat16))
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [eager(leaves[0]), compiled(leaves[1])]
        require_close(outputs[1], outputs[0], 2.0**-5, "compiled y")
        for y in outputs:
            y.backward(g)
        require_close(leaves[1].grad, leaves[0].grad, 2.0**-5, "compiled dx")
    state = mf.training_state(eager)["rng"]
    require_same(mf.training_state(model)["rng"], state, "rng")
