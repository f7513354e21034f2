"""A layer over the ranks of a mesh: operands with one process's bytes, results within sums' order.

Products of shards read the same operands as one process does, so a result differs by the order of
sums alone (exact_sums.order_bound), which includes one rounding of each term by the factor. Row
factors, the bias, the result's dtype and the sum over the ranks are at most 4 + ranks more
roundings of both results together.
"""

from typing import NamedTuple

import minifloat as mf
import torch
import torch.distributed as dist
from minifloat.spec import Spec
from minifloat.tensor.directions import slice_elements
from minifloat.tensor.quantized import raw_scale
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.exact_sums import require_same_sums
from tests.support.same_bits import same_bytes
from tests.support.whole_layers import PLACES, Case
from tests.support.worlds import device_of

RESULTS = ("y", "dx", "dW", "db")


class Operand(NamedTuple):
    codes: torch.Tensor
    scale: torch.Tensor
    amax: torch.Tensor


class Recorded(TorchDispatchMode):
    """The operands that products read, by their position in the product."""

    def __init__(self):
        super().__init__()
        self.operands = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.minifloat.scaled_mm.default:
            first = len(self.operands)
            self.operands[first] = Operand(*args[:3])
            self.operands[first + 1] = Operand(*args[3:6])
        return func(*args, **(kwargs or {}))


def piece_of(whole, dim, rank, world):
    """Returns this rank's shard of an operand as read, along its dimension `dim`."""
    length = whole.shape[dim] // world
    if isinstance(whole, torch.Tensor):
        return whole.narrow(dim, rank * length, length)
    return slice_elements(whole, dim, rank * length, (rank + 1) * length)


def check_operands(case, recorded, dim, rank, world, where):
    """Compares the rank's operands with the whole's bytes. x, w, g are cut along the dimensions."""
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
        assert same_bytes(got.scale, raw_scale(want)), (where, name, "scale")
        if not Spec.parse(want.spec).is_delayed:  # there it is the current amax
            assert same_bytes(got.amax, want.amax), (where, name, "amax")


def magnitudes(case):
    """Computes S of y, dx, dW, db: products of the operands' absolute values."""

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
    for name, a, b, (s, k) in zip(RESULTS, got, want, magnitudes(case)):
        require_same_sums(a, b, s, k, f"{where} {name}", roundings=4 + world, unit=unit)


def run_layer(case, mesh, dim, x_placement):
    """Runs the layer over the mesh; returns whole y, dx, dW, db, and the history."""
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


def check_layers(rank, recipes, kind="cpu", compare=assert_close):
    """Calls compare(got, want, case, ranks, where) for y, dx, dW, db."""
    world = dist.get_world_size()
    mesh = init_device_mesh(kind, (world,))
    for recipe in recipes:
        case = Case(recipe, device=device_of(rank, kind))
        want, history = case.alone()
        for dim, x_placement in ((0, Replicate()), (0, Shard(1)), (0, Shard(0)), (1, Shard(2))):
            where = (recipe, dim, x_placement, world)
            with Recorded() as recorded:
                got, own_history = run_layer(case, mesh, dim, x_placement)
            check_operands(case, recorded, dim, rank, world, where)
            compare(got, want, case, world, where)
            if history is not None:
                assert torch.equal(own_history, history), where
