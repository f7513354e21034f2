"""Tensor-parallel layers under torch.compile(fullgraph=True): eager's operands, and its results.

Eager and compiled layers run the same products on the same shards: repetitions (exact_sums.py).
Inductor's own kernels are compared where sums are exact.
"""

from itertools import cycle, product

import minifloat as mf
import pytest
import torch
import torch._inductor.config
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from minifloat.distributed.tensor_parallel import QuantizedColwiseParallel
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support import worlds
from tests.support.exact_sums import integers
from tests.support.parallel_layers import RESULTS, Recorded, check_operands
from tests.support.parallel_models import PLANS, WIDTH, built, train_step
from tests.support.whole_layers import BATCH, TOKENS, Case, values
from tests.support.worlds import run_world

# aot_eager traces, partitions and functionalizes as inductor does, and runs the same ops.
BACKEND = "aot_eager"
PRESETS = [name for name in mf.presets() if name != "bf16"]
DIM, HIDDEN, HEAD = 256, 512, 64  # of the transformer: 128-blocks want 128 a rank
RECIPES = [
    *mf.presets(),
    "fprop=nvfp4+sr+rht*nvfp4+rht dgrad=e4m3/row+sr*mxfp8+sr wgrad=e4m3/row+exact*mxfp4",
]
CUTS = ((0, Shard(1)), (1, Shard(2)))  # of W, and of x
MORE_CUTS = ((0, Replicate()), (0, Shard(0)))


# ---- one layer -----------------------------------------------------------------------------------


def run_layer(case, mesh, dim, x_placement, compiler):
    """Returns local y, dx, dW, db and the history of mf.linear over the mesh, run by `compiler`."""
    state = case.state()
    x = distribute_tensor(case.x.detach(), mesh, [x_placement]).requires_grad_()
    w = distribute_tensor(case.w.detach(), mesh, [Shard(dim)]).requires_grad_()
    b_placement = Shard(0) if dim == 0 else Replicate()
    b = distribute_tensor(case.b.detach(), mesh, [b_placement]).requires_grad_()
    g = distribute_tensor(case.g, mesh, [Shard(2) if dim == 0 else Replicate()])

    def layer(x, w, b, rng, amax_history):
        return mf.linear(x, w, b, case.recipe, rng=rng, amax_history=amax_history)

    y = compiler(layer)(x, w, b, state["rng"], state["amax_history"])
    assert y.placements == ((Shard(2),) if dim == 0 else (Partial(),))
    found = torch.autograd.grad(y, (x, w, b), g)
    return [t.to_local() for t in (y.detach(), *found)], state["amax_history"]


def eager(layer):
    return layer


def recording_backend(recorded):
    """Returns aot_eager with graphs that run below `recorded`, which sees operands at run time."""

    def compiler(module, inputs):
        def run(*args):
            with recorded:
                return module(*args)

        return make_boxed_func(run)

    partition = min_cut_rematerialization_partition
    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)


def check_layers(rank, cases):
    """Checks that compiled operands have the whole's bytes, and results those of eager layers."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for where in cases:
        recipe, (dim, x_placement) = where
        case = Case(recipe)
        torch._dynamo.reset()
        recorded = Recorded()
        counter = CompileCounterWithBackend(recording_backend(recorded))

        def compiled(layer, counter=counter):
            return torch.compile(layer, backend=counter, fullgraph=True)

        want, want_history = run_layer(case, mesh, dim, x_placement, eager)
        got, history = run_layer(case, mesh, dim, x_placement, compiled)
        assert counter.frame_count == 1, where
        check_operands(case, recorded, dim, rank, world, where)
        for name, a, b in zip(RESULTS, got, want):
            assert torch.equal(a, b), (where, name)
        if want_history is not None:
            assert torch.equal(history, want_history), where


def test_compiled_layer_is_the_eager_one():
    # Eager layers visit every recipe in every cut (test_tensor_parallel.py): graphs differ little.
    run_world(2, check_layers, list(zip(RECIPES, cycle(CUTS))))


def test_compiled_layer_of_whole_and_of_batched_inputs():
    run_world(2, check_layers, list(product(["nvfp4", "fp8_delayed", "fp8_rowwise"], MORE_CUTS)))


# ---- a model, compiled block by block ------------------------------------------------------------


class Attention(nn.Module):
    """A transformer's attention under tensor parallelism: q, k and v read one input."""

    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (
            w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention = Attention()
        self.w1, self.w3 = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        h = self.mlp_norm(x)
        return x + self.w2(nn.functional.silu(self.w1(h)) * self.w3(h))


def transformer(recipe, mesh, quantized, blocks=2):
    """Shards as torchtitan does: cuts tokens between layers, gathers them for q, k, v, w1, w3."""
    torch.manual_seed(0)
    model = nn.Sequential(*(TransformerBlock() for _ in range(blocks)))
    mf.quantize_(model, recipe, data_parallel_rank=0)
    style = QuantizedColwiseParallel if quantized else ColwiseParallel
    into, out = style(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    plan = {
        "attention_norm": SequenceParallel(),
        "mlp_norm": SequenceParallel(),
        **dict.fromkeys(("attention.wq", "attention.wk", "attention.wv", "w1", "w3"), into),
        **dict.fromkeys(("attention.wo", "w2"), out),
    }
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


def train(model, optimizer, mesh, steps=2):
    """Trains some steps on this rank's tokens; returns outputs, gradients and state."""
    found = []
    for step in range(steps):
        x = values(step, BATCH, TOKENS, DIM).chunk(mesh.size(), 1)[mesh.get_local_rank()]
        x = x.contiguous().requires_grad_()
        y = model(x)
        (y.float() ** 2).mean().backward()
        found += [y.detach(), x.grad, *(p.grad.to_local().clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        mf.step(model)
        found += list(mf.training_state(model).values())
    return found


def check_blocks(rank, recipes):
    """Checks two steps of two blocks that share one graph."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for recipe in recipes:
        torch._dynamo.reset()
        results = []
        for is_compiled in (False, True):
            model = transformer(recipe, mesh, quantized=True)
            counter = CompileCounterWithBackend(BACKEND)
            for block in model if is_compiled else ():
                block.compile(backend=counter, fullgraph=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            results.append(train(model, optimizer, mesh))
            assert counter.frame_count == int(is_compiled), recipe
        assert len(results[0]) == len(results[1]), recipe
        for i, (want, got) in enumerate(zip(*results)):
            assert torch.equal(got, want), (recipe, i)


@pytest.mark.slow
@pytest.mark.parametrize("recipes", [PRESETS[0::2], PRESETS[1::2]])
def test_blocks_compile_alone(recipes):
    run_world(2, check_blocks, recipes)


# ---- inductor ------------------------------------------------------------------------------------


def check_inductor(rank, recipe, name):
    """Checks inductor's kernels outside the casts: sums are exact, so no byte changes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x, weights = (integers(seed, BATCH, TOKENS, WIDTH) for seed in (10, 11))
    if name != "tensor":
        x, weights = (t.chunk(mesh.size(), 1)[rank].contiguous() for t in (x, weights))
    eager, model = built(recipe), built(recipe)
    for m in (eager, model):
        parallelize_module(m[0], mesh, PLANS[name])
    model[0].compile(fullgraph=True)
    with torch._inductor.config.patch(compile_threads=1):
        want, got = (train_step(m, x, weights) for m in (eager, model))
    for a, b in zip(got, want):
        assert torch.equal(a, b)
    for p, q in zip(model.parameters(), eager.parameters()):
        assert torch.equal(p.grad.to_local(), q.grad.to_local())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", "quantized"])
def test_inductor(name, monkeypatch):
    monkeypatch.setattr(worlds, "SECONDS", 600)  # the compiler's
    run_world(2, check_inductor, "fp8_rowwise", name)
