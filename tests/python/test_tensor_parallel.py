"""Tensor and sequence parallel: each cast gives a shard the whole's bytes, and so the layers follow.

Products of shards read the same operands as one process does, so a result differs by the order of
sums alone. Of k products, with S the sum of their absolute values, two orders in fp32 differ by at
most 2 γ S, γ = k u / (1 - k u), u = 2^-24 (the standard bound of a sum in any order); the factor,
the bias and the sum over the ranks are at most 4 + ranks more roundings of each result.
"""

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat import tensor_parallel
from minifloat._native import ops
from minifloat.dtensor import QuantizedColwiseParallel
from minifloat.dtensor import linear as sharded_linear
from minifloat.parts import cut
from minifloat.tensor_parallel import PLACES, has_flag
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from worlds import run_world

BATCH, TOKENS = 2, 128  # 32 tokens a rank in each of a batch, over 4 ranks
RECIPES = [
    "fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_blockwise", "mxfp8",
    "mxfp8_2d", "mxfp4", "nvfp4", "nvfp4_pow2", "mxfp8_nvfp4", "nvfp4_mxfp8", "bf16",
    "fprop=nvfp4+sr+rht*nvfp4+rht dgrad=e4m3/row+sr*mxfp8+sr wgrad=e4m3/row+exact*mxfp4",
]  # fmt: skip


def sizes(recipe):
    """(N, K): 128-blocks want 128 a rank, all else 32."""
    unit = 128 if "blockwise" in recipe else 32
    return 4 * unit, 8 * unit


def values(seed, *shape):
    """Rows of very different size, so that an amax of one shard is not another's."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return x * torch.randn(*shape[:-1], 1, generator=generator).exp2()


# ---- one layer -----------------------------------------------------------------------------------


class Case:
    """A layer's inputs, whole, the same on every rank, and what one process makes of them."""

    def __init__(self, recipe, dtype=torch.float32, poisoned=False):
        self.recipe = mf.Recipe(recipe)
        n, k = sizes(recipe)
        self.x = values(1, BATCH, TOKENS, k).to(dtype).requires_grad_()
        self.w = values(2, n, k).requires_grad_()
        self.b = values(3, 1, n)[0].requires_grad_()
        self.g = values(4, BATCH, TOKENS, n).to(dtype)
        if poisoned:
            with torch.no_grad():
                self.x[0, -1, 5] = float("nan")
                self.w[3, -1] = float("inf")
            self.g[-1, -1, -1] = float("nan")
        self.rng = torch.tensor([7, 3, 11])
        self.history = torch.zeros(6, 5)
        self.history[:, 0] = torch.tensor([3.0, 2.5, 7.0, 2.0, 5.0, 3.5])

    def state(self):
        is_delayed = self.recipe.is_delayed
        return {
            "rng": self.rng if self.recipe.is_stochastic else None,
            "amax_history": self.history.clone() if is_delayed else None,
        }

    def alone(self):
        """y, dx, dW, db of one process, and its history."""
        state = self.state()
        y = mf.linear(self.x, self.w, self.b, self.recipe, **state)
        found = torch.autograd.grad(y, (self.x, self.w, self.b), self.g)
        return (y.detach(), *found), state["amax_history"]

    def operand(self, place):
        """One operand of one process: Quantized, or values under bf16."""
        product = (self.recipe.fprop, self.recipe.dgrad, self.recipe.wgrad)[place // 2]
        spec, name = (product.a, product.b)[place % 2], PLACES[place]
        x = {"x": self.x, "w": self.w.to(self.x.dtype), "g": self.g}[name[0]].detach()
        x = x.reshape(-1, x.shape[-1])
        columnwise = place >= 3
        if spec == "bf16":
            return x.t() if columnwise else x
        amax = self.history[place, 0] if has_flag(spec, "delayed") else None
        stream = ops.stream(name)
        specs = ("", spec) if columnwise else (spec, "")
        out = ops.quantize(
            x, *specs, amax_row=None if columnwise else amax, amax_col=amax if columnwise else None,
            rng=self.rng, stream_row=stream, stream_col=stream,
        )  # fmt: skip
        return mf.quantized.read_direction(out, x, spec, columnwise)


class Recorded:
    """The operands that products read, by place."""

    def __init__(self, monkeypatch):
        self.operands = {}
        multiply = tensor_parallel.multiply

        def recording(a, b, product, k, bias, dtype):
            first = len(self.operands)
            self.operands[first], self.operands[first + 1] = a, b
            return multiply(a, b, product, k, bias, dtype)

        monkeypatch.setattr(tensor_parallel, "multiply", recording)


def same_bytes(a, b):
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return a.shape == b.shape and torch.equal(
        a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)
    )


def piece_of(whole, dim, rank, world):
    """Of an operand as read: this rank's part along its dimension `dim`."""
    length = whole.shape[dim] // world
    if isinstance(whole, torch.Tensor):
        return whole.narrow(dim, rank * length, length)
    return cut(whole, dim, rank * length, (rank + 1) * length)


def check_operands(case, recorded, dim, rank, world, where):
    """The rank's operands are the whole's bytes. x, w, g as read lie cut along these dimensions."""
    along = (
        {"x/fprop": None, "w/fprop": 0, "g/dgrad": 1, "w/dgrad": 1, "g/wgrad": 0, "x/wgrad": None},
        {"x/fprop": 1, "w/fprop": 1, "g/dgrad": None, "w/dgrad": 0, "g/wgrad": None, "x/wgrad": 0},
    )[dim]
    assert len(recorded.operands) == len(PLACES), where
    for place, name in enumerate(PLACES):
        want = case.operand(place)
        if along[name] is not None:
            want = piece_of(want, along[name], rank, world)
        got = recorded.operands[place]
        if isinstance(want, torch.Tensor):
            assert same_bytes(got.codes, want), (where, name)
            continue
        assert same_bytes(got.codes, want.codes), (where, name, "codes")
        assert same_bytes(got.scale, mf.quantized.raw_scale(want)), (where, name, "scale")
        if not has_flag(want.spec, "delayed"):  # there it is this step's own, for the history
            assert same_bytes(got.amax, want.amax), (where, name, "amax")


def magnitudes(case):
    """S of y, dx, dW, db: products of the operands' absolute values."""

    def absolute(place):
        operand = case.operand(place)
        x = operand if isinstance(operand, torch.Tensor) else operand.dequantize()
        return x.double().abs()

    def product(a, b):
        a, b = absolute(a), absolute(b)
        return a @ b.t(), a.shape[1]

    (y, k), (dx, n), (dw, m) = product(0, 1), product(2, 3), product(4, 5)
    y = y + case.b.detach().double().abs()
    db = case.g.double().abs().sum((0, 1))
    return (y.view(*case.g.shape), k), (dx.view(case.x.shape), n), (dw, m), (db, m)


def assert_close(got, want, case, world, where):
    unit = torch.finfo(case.x.dtype).eps / 2  # of one rounding of a result
    for name, a, b, (s, k) in zip(("y", "dx", "dW", "db"), got, want, magnitudes(case)):
        u = 2.0**-24
        bound = (2 * k * u / (1 - k * u) + (4 + world) * unit) * s
        worst = ((a.double() - b.double()).abs() - bound).max().item()
        assert worst <= 0, (where, name, worst)


def run_layer(case, mesh, dim, x_placement):
    """y, dx, dW, db whole, and the history, of the layer over the mesh."""
    state = case.state()
    x = distribute_tensor(case.x.detach(), mesh, [x_placement]).requires_grad_()
    w = distribute_tensor(case.w.detach(), mesh, [Shard(dim)]).requires_grad_()
    b = distribute_tensor(
        case.b.detach(), mesh, [Shard(0) if dim == 0 else Replicate()]
    ).requires_grad_()
    y = mf.linear(x, w, b, case.recipe, **state)
    assert y.placements == ((Shard(2),) if dim == 0 else (Partial(),))
    g = distribute_tensor(case.g, mesh, [Shard(2) if dim == 0 else Replicate()])
    found = torch.autograd.grad(y, (x, w, b), g)
    return [t.full_tensor() for t in (y.detach(), *found)], state["amax_history"]


def check_layers(rank, recipes):
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for recipe in recipes:
        case = Case(recipe)
        want, history = case.alone()
        for dim, x_placement in ((0, Replicate()), (0, Shard(1)), (0, Shard(0)), (1, Shard(2))):
            if x_placement == Shard(0) and world > BATCH:
                continue
            where = (recipe, dim, x_placement, world)
            with pytest.MonkeyPatch.context() as monkeypatch:
                recorded = Recorded(monkeypatch)
                got, own_history = run_layer(case, mesh, dim, x_placement)
            check_operands(case, recorded, dim, rank, world, where)
            assert_close(got, want, case, world, where)
            if history is not None:
                assert torch.equal(own_history, history), where


@pytest.mark.parametrize("world", [2, 4])
def test_layer_is_one_process(world):
    run_world(world, check_layers, RECIPES)


# ---- models --------------------------------------------------------------------------------------
# Small integers, and formats whose scales are powers of two: every fp32 sum is exact in any order,
# so that a model over ranks is one process to the bit.

WIDTH, INNER = 128, 256
EXACT = ["fp8_rowwise", "mxfp8", "mxfp8_2d", "mxfp4", "fprop=mxfp8*mxfp8+sr dgrad=mxfp8*mxfp8+sr wgrad=mxfp4+sr*mxfp4"]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def integers(seed, *shape):
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def built(recipe, data_parallel_rank=0):
    model = nn.Sequential(Block(), nn.Identity())
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(i, *parameter.shape))
    mf.quantize_(model, recipe, data_parallel_rank=data_parallel_rank, verbose=False)
    return model


PLANS = {
    "tensor": {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "sequence": {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
    "quantized": {
        "norm": SequenceParallel(),
        "up": QuantizedColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    },
}  # fmt: skip


def train_step(model, x, weights):
    """Output and gradients of a loss whose own gradient is small integers."""
    x = x.clone().requires_grad_()
    y = model(x)
    (y * weights).sum().backward()
    return y.detach(), x.grad


def check_models(rank, recipes):
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // 2 or 1, 2), mesh_dim_names=("dp", "tp"))
    x, weights = integers(10, BATCH, TOKENS, WIDTH), integers(11, BATCH, TOKENS, WIDTH)
    for recipe in recipes:
        alone = built(recipe)
        y, dx = train_step(alone, x, weights)
        for name, plan in PLANS.items():
            tp = mesh["tp"] if world > 2 else init_device_mesh("cpu", (world,))
            mine, here = tp.get_local_rank(), (recipe, name, world)
            model = built(recipe)
            parallelize_module(model[0], tp, plan)
            if world > 2:
                fully_shard(model[0], mesh=mesh["dp"])
                fully_shard(model, mesh=mesh["dp"])

            def own(t, is_cut=name != "tensor", mine=mine):
                return t.chunk(2, 1)[mine] if is_cut else t

            got_y, got_dx = train_step(model, own(x), own(weights))
            assert torch.equal(got_y, own(y)), here
            assert torch.equal(got_dx, own(dx)), here
            for (key, p), q in zip(model.named_parameters(), alone.parameters()):
                assert torch.equal(p.full_tensor(), q), (here, key)
                assert torch.equal(p.grad.full_tensor(), q.grad), (here, key)
            assert set(model.state_dict()) == set(alone.state_dict()), here


@pytest.mark.parametrize("world", [2, 4])
def test_model_is_one_process(world):
    """Over 2 ranks tensor parallel alone, over 4 with FSDP2; tensor and sequence parallel."""
    run_world(world, check_models, EXACT)
