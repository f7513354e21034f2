"""Several GPUs over NCCL: gathered, sharded and parallel weights have the whole's bytes.

pytest tests/gpu/test_worlds.py                  two GPUs, a process each
pytest tests/gpu/test_worlds.py --device cpu     the same over gloo: tests the tests
"""

from __future__ import annotations

import os
import socket

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from sweep import require_same
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

pytestmark = pytest.mark.gpu

RANKS = 2
WIDTH, INNER, TOKENS = 128, 256, 64
GATHERED = ["fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp4", "nvfp4"]
SHAPES = [(256, 192), (72, 80)]  # N, K: whole blocks, and shards that end inside one
MASTERS = ["e4m3/tensor", "e4m3/128x128", "mxfp8", "nvfp4/16x16"]
# Scales that are powers of two, and small integers: every fp32 sum is exact, in any order.
PARALLEL = ["fp8_rowwise", "mxfp8", "mxfp4"]


def run_ranks(device: torch.device, fn) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs, torch sees {torch.cuda.device_count()}")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(rank_main, args=(device.type, port, fn), nprocs=RANKS)


def rank_main(rank: int, kind: str, port: int, fn) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device(kind, rank if kind == "cuda" else None)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=RANKS)
    try:
        fn(rank, device)
    finally:
        dist.destroy_process_group()


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def require_same_parts(got: mf.Quantized, want: mf.Quantized, what: str) -> None:
    for name in ("codes", "scale", "amax"):
        require_same(getattr(got, name), getattr(want, name), f"{what}, {name}")


# ---- FSDP2 ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """What is sharded: its layer's weight is whole inside the forward."""

    def __init__(self, n: int, k: int) -> None:
        super().__init__()
        self.layer = nn.Linear(k, n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def check_weight(recipe: str, n: int, k: int, device: torch.device) -> None:
    """The rowwise codes before forward, the columnwise ones before backward, twice."""
    weight = normal(n, n, k)
    model = nn.Sequential(Block(n, k), nn.Identity())
    with torch.no_grad():
        model[0].layer.weight.copy_(weight)
    model.to(device)
    mf.quantize_(model, recipe, verbose=False)
    layer = model[0].layer
    fully_shard(model[0])
    fully_shard(model)
    specs = layer.recipe.fprop.b, layer.recipe.dgrad.b
    seen: list[str] = []

    def check(columnwise: bool) -> None:
        whole = layer.weight
        if not isinstance(whole, mf.QuantizedTensor):
            seen.append("values")  # shards end inside a transform
            return
        got = whole.columnwise if columnwise else whole.rowwise
        want = mf.quantize(weight, specs[columnwise], columnwise=columnwise)
        require_same_parts(got, want, f"{recipe}, {n}x{k}, columnwise {columnwise}")
        seen.append("codes")

    layer.register_forward_hook(lambda *_: check(False))
    x = normal(1, 3, k).to(device).requires_grad_()
    for _ in range(2):
        y = model(x)
        y.register_hook(lambda g: check(True))
        y.sum().backward()
        mf.step(model)
    fits = "rht" not in specs[1] or n // RANKS % 16 == 0
    assert seen == ["codes" if fits else "values"] * 4, (recipe, n, k, seen)


def check_gathered(rank: int, device: torch.device) -> None:
    for recipe in GATHERED:
        for shape in SHAPES:
            check_weight(recipe, *shape, device)


def test_gathered_weights(device):
    run_ranks(device, check_gathered)


# ---- Sharded masters -----------------------------------------------------------------------------


def check_masters(rank: int, device: torch.device) -> None:
    n, k = 130, 48
    cut = 1001  # odd, inside a block
    weights, masters, starts = [], [], []
    for i, spec in enumerate(MASTERS):
        zero = torch.zeros(n, k, device=device, dtype=torch.bfloat16)
        weights.append(mf.QuantizedTensor.from_tensor(zero, spec, spec))
        flat = normal(i, n * k).to(device)
        masters.append(flat[:cut] if rank == 0 else flat[cut:])
        starts.append(0 if rank == 0 else cut)
    fragments = None
    mf.quantize_master_weights(weights, masters, starts, dist.group.WORLD, fragments)
    for i, (spec, weight) in enumerate(zip(MASTERS, weights)):
        values = normal(i, n * k).view(n, k).bfloat16()
        want = mf.QuantizedTensor.from_tensor(values, spec, spec)
        require_same(weight.rowwise.scale, want.rowwise.scale, f"{spec}: scale")
        bits = 4 if "nvfp4" in spec else 8
        low, high = (0, cut) if rank == 0 else (cut + 1, n * k)
        begin, end = low * bits // 8 + (bits == 4), high * bits // 8 - (bits == 4)
        got, wanted = weight.rowwise.codes.view(-1), want.rowwise.codes.view(-1)
        require_same(got[begin:end], wanted[begin:end], f"{spec}: codes")


def test_sharded_masters(device):
    run_ranks(device, check_masters)


# ---- Tensor parallel -----------------------------------------------------------------------------


def integers(seed: int, *shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def mlp(recipe: str, device: torch.device) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH))
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(i, *parameter.shape))
    model.to(device)
    mf.quantize_(model, recipe, data_parallel_rank=0, verbose=False)
    return model


def check_parallel(rank: int, device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (RANKS,))
    for recipe in PARALLEL:
        alone, parallel = mlp(recipe, device), mlp(recipe, device)
        parallelize_module(parallel, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        results = []
        for model in (alone, parallel):
            x = integers(9, TOKENS, WIDTH).to(device).requires_grad_()
            y = model(x)
            y.backward(integers(10, TOKENS, WIDTH).to(device))
            results.append((y, x.grad))
        for name, got, want in zip(("y", "dx"), results[1], results[0]):
            error = float((got - want).norm() / want.norm())
            # Exact but where FP8 tensor cores cut sums: tests/gpu/test_layers.py, tolerance.
            assert error <= 2.0**-7, f"{recipe} {name}: {error}"


def test_tensor_parallel(device):
    run_ranks(device, check_parallel)
