"""Cached codes of a shard whose weight does not change: casts are counted, and bytes compared with
a model that caches nothing. Both multiply the same shards: repetitions (exact_sums.py).
"""

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat.distributed.tensor_parallel import QuantizedColwiseParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.support.reuse_counts import Casts
from tests.support.whole_layers import values
from tests.support.worlds import device_of, run_world

RECIPES = [
    "fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "mxfp8", "mxfp4", "nvfp4", "mxfp8_nvfp4",
    "fprop=mxfp8*mxfp8 dgrad=bf16*bf16 wgrad=bf16*bf16",
    "fprop=bf16*bf16 dgrad=e4m3/row*e4m3/row wgrad=bf16*bf16",
]  # fmt: skip
RANKS = 2
WIDTH, INNER, BATCH, TOKENS = 128, 384, 2, 128
UP, DOWN = (INNER // RANKS, WIDTH), (WIDTH, INNER // RANKS)  # shapes of the shards, and of no x, g
TENSOR = {"0": ColwiseParallel(), "2": RowwiseParallel()}
SEQUENCE = {
    "0": QuantizedColwiseParallel(input_layouts=Shard(1)),
    "2": RowwiseParallel(output_layouts=Shard(1)),
}


def built(recipe, mesh=None, plan=TENSOR, reuses=True, device="cpu"):
    """Builds a model of fixed weights; parallel where there is a mesh."""
    model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(values(i, *parameter.shape))
    model.to(device)
    mf.quantize_(model, recipe, data_parallel_rank=0)
    if mesh is not None:
        parallelize_module(model, mesh, plan)
    return model if reuses else without_reuse(model)


def without_reuse(model):
    for layer in layers(model):
        layer.weight_codes = None
    return model


def layers(model):
    return [module for module in model if isinstance(module, mf.Linear)]


def casts(run):
    """Counts the casts of the two weights' shards."""
    with Casts() as seen:
        run()
    return [seen.count[UP], seen.count[DOWN]]


def held(model):
    return [layer.weight_codes.cached is not None for layer in layers(model)]


def batch(seed):
    return values(seed, BATCH, TOKENS, WIDTH).requires_grad_()


def local(t):
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def same(a, b):
    return torch.equal(local(a), local(b))


# ---- training ------------------------------------------------------------------------------------


def step(model, optimizer, i, autocast):
    """Trains four micro-batches; returns outputs, gradients and histories."""
    found, device = [], model[0].weight.device
    for j in range(4):
        x = batch(10 * i + j).detach().to(device).requires_grad_()
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            y = model(x)
        y.float().pow(2).mean().backward()
        found += [y.detach(), x.grad]
    found += [p.grad.full_tensor() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    mf.step(model)
    return found + list(mf.training_state(model).values())


def check_micro_batches(mesh, recipe, plan, autocast, device):
    """Checks the casts: every micro-batch of the first step, then one a step."""
    where = (recipe, plan is SEQUENCE, autocast)
    models = [built(recipe, mesh, plan, reuses, device) for reuses in (True, False)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
    for i, expected in enumerate((2, 1, 1)):
        results, twins = [], step(models[1], optimizers[1], i, autocast)

        def run(i=i, results=results):
            results += step(models[0], optimizers[0], i, autocast)

        counts = casts(run)
        assert counts == [expected] * 2, (*where, i, counts)
        assert len(results) == len(twins), where
        for got, want in zip(results, twins):
            assert same(got, want), where
    for p, q in zip(*(m.parameters() for m in models)):
        assert same(p, q), where


def check_reuse(rank, recipes, kind="cpu"):
    mesh, device = init_device_mesh(kind, (RANKS,)), device_of(rank, kind)
    for recipe in recipes:
        check_micro_batches(mesh, recipe, TENSOR, False, device)
        check_micro_batches(mesh, recipe, SEQUENCE, True, device)


@pytest.mark.slow
def test_micro_batches_quantize_a_shard_once_a_step():
    run_world(RANKS, check_reuse, RECIPES)


# ---- changes -------------------------------------------------------------------------------------


def changes(model):
    weights = [layer.weight for layer in layers(model)]

    def in_place():
        with torch.no_grad():
            for weight in weights:
                weight.mul_(1.5)

    def own_tensor():
        with torch.no_grad():
            for weight in weights:
                weight.to_local().mul_(1.5)

    def uncounted():
        for weight in weights:
            weight.data.to_local().data.mul_(3)
        mf.step(model)

    other = {key: 2 * value.detach().clone() for key, value in model.state_dict().items()}
    optimizers = [
        torch.optim.AdamW(weights, lr=0.3, fused=True),
        torch.optim.SGD(weights, lr=0.3, foreach=True),
    ]
    return {
        "in place": in_place,
        "a rank's own tensor": own_tensor,
        "uncounted, then mf.step": uncounted,
        "load_state_dict": lambda: model.load_state_dict(other),
        "load_state_dict, assign": lambda: model.load_state_dict(other, assign=True),
        "fused optimizer": optimizers[0].step,
        "foreach optimizer": optimizers[1].step,
    }


def check_changes(mesh):
    for name in changes(built("mxfp8", mesh)):
        for recipe in ("mxfp8", "fp8_tensorwise"):
            models = [built(recipe, mesh, reuses=reuses) for reuses in (True, False)]
            x, before = batch(1), None
            for model in models:
                for _ in range(3):
                    before = model(x)
                    before.sum().backward()
            assert held(models[0]) == [True, True], (recipe, name)
            for model in models:
                changes(model)[name]()
                for layer in layers(model) if model is models[1] else ():
                    layer.weight_codes = None
            for _ in range(3):
                got, want = (model(x) for model in models)
                assert not torch.equal(got, before), (recipe, name)
                assert torch.equal(got, want), (recipe, name)


def check_modes(mesh):
    """Checks that no codes are cached without accumulation, nor from an earlier evaluation."""
    model = built("mxfp8", mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        model.eval()
        with torch.no_grad():
            seen = casts(lambda: [model(batch(j)) for j in range(3)])
        assert seen == [2, 2]
        assert held(model) == [True, True]
        model.train()
        for _ in range(2):
            model(batch(i)).sum().backward()
            assert held(model) == [False, False]
            optimizer.step()
            optimizer.zero_grad()


def check_orders(mesh):
    """Checks mf.quantize_ after parallelize_module, and a first forward without gradients."""
    late = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH))
    parallelize_module(late, mesh, TENSOR)
    late.load_state_dict(built("nvfp4", mesh).state_dict())
    mf.quantize_(late, "nvfp4", data_parallel_rank=0)
    twin, x = built("nvfp4", mesh, reuses=False), batch(1)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(late(x), twin(x))
    assert held(late) == [True, True]
    found = [torch.autograd.grad(m(x).sum(), [x, *m.parameters()]) for m in (late, twin)]
    for got, want in zip(*found):
        assert same(got, want)


def check_recomputed(mesh):
    """Checks activation checkpointing, whose step reads a weight twice."""
    model, twin = (built("mxfp4", mesh, reuses=reuses) for reuses in (True, False))
    for i, expected in enumerate((2, 1)):
        found = {}

        def run(m, i=i, found=found):
            x = batch(i)
            y = checkpoint(m, x, use_reentrant=False)
            y.sum().backward()
            found[m] = [y, x.grad, *(p.grad for p in m.parameters())]

        assert casts(lambda run=run: run(model)) == [expected] * 2
        run(twin)
        for got, want in zip(found[model], found[twin]):
            assert same(got, want)
        mf.step(model)


def check_what_fsdp_gathers():
    """Checks that codes of freed memory are not reused: FSDP2 refills it with no write counted."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("data", "tensor"))
    alone, model = built("mxfp8"), built("mxfp8", mesh["tensor"])
    for _ in range(3):
        model(batch(1))
    assert held(model) == [True, True]
    fully_shard(model, mesh=mesh["data"])
    for i in range(3):
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(model(batch(i)), alone(batch(i))), i
            for parameter in (*model.parameters(), *alone.parameters()):
                parameter.data.mul_(1.5)
            mf.step(alone)


def check_converted(mesh):
    """Checks a change of dtype, for which torch swaps the DTensors."""
    model, twin = (built("mxfp8", mesh, reuses=reuses) for reuses in (True, False))
    with torch.no_grad():
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            for m in (model, twin):
                m.to(dtype)
            for _ in range(3):
                assert torch.equal(*(m(batch(1).to(dtype)) for m in (model, twin))), dtype
            assert held(model) == [True, True], dtype


def check_others(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    check_changes(mesh)
    check_modes(mesh)
    check_orders(mesh)
    check_recomputed(mesh)
    check_converted(mesh)
    check_what_fsdp_gathers()


def test_a_changed_shard_is_quantized_again():
    run_world(RANKS, check_others)
