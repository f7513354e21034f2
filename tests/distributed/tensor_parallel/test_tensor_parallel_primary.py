"""Primary weights under torch's parallel styles: a rank's parameter is the whole's codes, cut."""

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.exact_sums import integers
from tests.support.parallel_layers import Recorded, assert_close, check_operands, run_layer
from tests.support.parallel_models import PLANS, WIDTH, Block, built, train_step
from tests.support.same_bits import require_same_weight
from tests.support.whole_layers import BATCH, PLACES, TOKENS, Case
from tests.support.worlds import device_of, run_world

RECIPES = [
    "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp8_2d", "mxfp4", "nvfp4",
    "mxfp8_nvfp4",
]  # fmt: skip


def piece_of(whole, dim, rank, world):
    length = whole.shape[dim] // world
    return whole.narrow(dim, rank * length, length)


class PrimaryCase(Case):
    """A layer's inputs and one process's results, as in Case, with a weight that is codes."""

    def __init__(self, recipe, device="cpu"):
        super().__init__(recipe, device=device)
        specs = self.recipe.fprop.b, self.recipe.dgrad.b
        self.w = mf.QuantizedTensor.from_tensor(self.w.detach(), *specs).requires_grad_()


# ---- a layer -------------------------------------------------------------------------------------


def check_shards(case, rank, world, mesh, dim):
    """Checks distribute_tensor: it sends rank 0's codes, or with no source cuts each rank's own."""
    w = case.w.detach()
    other = w if rank == 0 else mf.QuantizedTensor.from_tensor(-w.dequantize(), *w.specs)
    where = (case.recipe, dim, world)
    cut = distribute_tensor(other, mesh, [Shard(dim)])
    require_same_weight(cut.to_local(), piece_of(w, dim, rank, world), where)
    require_same_weight(distribute_tensor(other, mesh, [Replicate()]).to_local(), w, where)
    local = distribute_tensor(w, mesh, [Shard(dim)], src_data_rank=None)
    require_same_weight(local.to_local(), piece_of(w, dim, rank, world), where)


def check_primary_layers(rank, recipes, kind="cpu", compare=assert_close):
    world = dist.get_world_size()
    mesh = init_device_mesh(kind, (world,))
    for recipe in recipes:
        case = PrimaryCase(recipe, device_of(rank, kind))
        want, _ = case.alone()
        for dim, x_placement in ((0, Replicate()), (0, Shard(1)), (1, Shard(2))):
            where = (recipe, dim, x_placement, world)
            check_shards(case, rank, world, mesh, dim)
            with Recorded() as recorded:
                got, _ = run_layer(case, mesh, dim, x_placement)
            assert len(recorded.operands) == len(PLACES)
            check_operands(case, recorded, dim, rank, world, where)
            compare(got, want, case, world, where)


@pytest.mark.parametrize("world", [2, 4])
def test_layer_is_one_process(world):
    run_world(world, check_primary_layers, RECIPES)


# ---- a model -------------------------------------------------------------------------------------


def whole(parameter):
    """Returns the whole of a parameter or gradient that may be sharded."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def check_training(rank):
    """Checks that results and optimizer steps have one process's bytes.

    The sums of the first step are exact, and no scale depends on another rank's values.
    """
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    weights = integers(11, BATCH, TOKENS, WIDTH)
    for recipe in ("mxfp8", "mxfp8_2d", "mxfp4"):
        for name, plan in PLANS.items():

            def own(t, is_cut=name != "tensor"):
                return t.chunk(world, 1)[rank] if is_cut else t

            alone, model = primary(recipe), primary(recipe)
            parallelize_module(model[0], mesh, plan)
            optimizers = [torch.optim.SGD(m.parameters(), lr=2.0**-10) for m in (alone, model)]
            for step in range(3):
                where, x = (recipe, name, step), integers(step, BATCH, TOKENS, WIDTH)
                y, dx = train_step(alone, x, weights)
                got_y, got_dx = train_step(model, own(x), own(weights))
                if step == 0:  # later weights are no small integers
                    assert torch.equal(got_y, own(y)), where
                    assert torch.equal(got_dx, own(dx)), where
                for p, q in zip(model.parameters(), alone.parameters()):
                    if step == 0:
                        assert torch.equal(whole(p.grad), q.grad), where
                    p.grad = distribute_tensor(q.grad, mesh, p.placements)
                for m, optimizer in zip((alone, model), optimizers):
                    optimizer.step()
                    optimizer.zero_grad()
                    mf.step(m)
                for key, dim in (("up", 0), ("down", 1)):
                    got, want = (getattr(m[0], key).weight.detach() for m in (model, alone))
                    require_same_weight(
                        got.to_local(), piece_of(want, dim, rank, world), (*where, key)
                    )


def primary(recipe):
    model = mf.restore_(built(recipe))
    mf.quantize_(model, recipe, primary=True, data_parallel_rank=0)
    return model


def check_state(rank, folder):
    """Checks the codes in state dicts and checkpoints, and the values that mf.restore_ makes."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone, model, other = (primary("nvfp4") for _ in range(3))
    for m in (model, other):
        parallelize_module(m[0], mesh, PLANS["tensor"])
    of_ranks, of_one = f"{folder}/ranks", f"{folder}/one{rank}"
    dcp.save({"model": model.state_dict()}, checkpoint_id=of_ranks)
    dcp.save({"model": alone.state_dict()}, checkpoint_id=of_one, no_dist=True)
    codes = model[0].up.weight.to_local().detach()
    for checkpoint in (None, of_ranks, of_one):
        with torch.no_grad():
            other[0].up.weight.mul_(3)
        state = {"model": model.state_dict() if checkpoint is None else other.state_dict()}
        if checkpoint is not None:
            dcp.load(state, checkpoint_id=checkpoint, no_dist=checkpoint == of_one)
        other.load_state_dict(state["model"])
        require_same_weight(other[0].up.weight.to_local().detach(), codes, checkpoint)
    x = integers(1, BATCH, TOKENS, WIDTH)
    assert torch.equal(model(x), other(x))
    with pytest.raises(CheckpointException, match="a write to it would not reach the whole"):
        dcp.load({"model": alone.state_dict()}, checkpoint_id=of_ranks, no_dist=True)
    mf.restore_(model)
    assert type(model[0].up.weight.to_local()) is torch.Tensor
    assert torch.equal(model[0].up.weight.to_local(), codes.dequantize())
    assert model[0].up.weight.requires_grad


def check_refusals(rank):
    """Checks that every rank refuses a wrong cut, and that the layer keeps its weight."""
    mesh = init_device_mesh("cpu", (2,))
    for recipe, n, words in (
        ("mxfp8", 96, r"cut of mxfp8 at multiples of its block, 32, got \[0, 48\) of 96"),
        ("nvfp4", 48, r"cut of nvfp4/16x16 at multiples of its block, 16, got \[0, 24\) of 48"),
        ("fp8_tensorwise", 65, r"as a multiple of their number, got a last shard \(32, 64\)"),
    ):
        model = nn.Sequential(nn.Linear(64, n))
        mf.quantize_(model, recipe, primary=True, data_parallel_rank=0)
        before = model[0].weight
        with pytest.raises(ValueError, match=words):
            parallelize_module(model, mesh, {"0": ColwiseParallel()})
        assert model[0].weight is before
    late = nn.Sequential(Block())
    parallelize_module(late[0], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with pytest.raises(ValueError, match="its weight is a DTensor"):
        mf.quantize_(late, "mxfp8", primary=True)


def check_models(rank, folder):
    check_training(rank)
    check_state(rank, folder)
    check_refusals(rank)


def test_models(tmp_path):
    run_world(2, check_models, str(tmp_path))
