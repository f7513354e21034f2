"""mf.inspect under FSDP2 and tensor parallelism: what it reads is what one process reads."""

import minifloat as mf
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.sharded_models import WIDTH, Model, batch
from tests.support.worlds import run_world


class Mixed(nn.Module):
    """Dense blocks, a layer and experts, of which each may be a unit of FSDP2."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.dense = Model()
        self.layer = nn.Linear(16, WIDTH)
        self.moe = mf.MoE(WIDTH, 32, experts=4, top_k=2, bias=True)

    def forward(self, x):
        return self.moe(self.layer(self.dense(x)))


def loss_of(model, x):
    return model(x).square().mean()


UNITS = {
    "blocks": lambda m: [*m.dense.blocks],
    "single layers": lambda m: [m.layer, m.dense.head, *(b.up for b in m.dense.blocks)],
    "experts": lambda m: [m.moe.experts],
    "a block, and its layers": lambda m: [m.dense.blocks[0].down, m.dense.blocks[0], m.moe],
}


def check_units(rank, name):
    plain, sharded = Mixed(), Mixed()
    for model in (plain, sharded):
        mf.quantize_(model, "fp8_rowwise", keep="nothing")
    for unit in UNITS[name](sharded):
        fully_shard(unit)
    fully_shard(sharded)
    x = batch(0, rank)
    want = mf.inspect(plain, x, ["mxfp8"], loss=loss_of)
    found = mf.inspect(sharded, x, ["mxfp8"], loss=loss_of)
    assert found.skipped == want.skipped
    assert [row.layer for row in found.rows] == [row.layer for row in want.rows]
    for row, other in zip(found.rows, want.rows):
        assert row.y_error == pytest.approx(other.y_error, rel=1e-5)
        assert row.loss_second == pytest.approx(other.loss_second, rel=1e-4)


@pytest.mark.parametrize("name", UNITS)
def test_units_of_fsdp2(name):
    run_world(2, check_units, name)


def check_cut(rank):
    model = nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    found = mf.inspect(model[:1], torch.ones(32, 32), ["mxfp8"], loss=loss_of)
    assert found.skipped == (("0", "tensor parallelism cuts its weight"),)


def check_cut_experts(rank):
    model = mf.MoE(WIDTH, 32, experts=4, top_k=2, bias=True)
    mesh = init_device_mesh("cpu", (2,))
    for name, parameter in [*model.experts.named_parameters(recurse=False)]:
        cut = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Replicate()]))
        setattr(model.experts, name, cut)
    found = mf.inspect(model, batch(0), ["mxfp8"], loss=loss_of)
    assert {why for name, why in found.skipped if name.startswith("experts")} == {
        "tensor parallelism cuts its weight"
    }


@pytest.mark.parametrize("check", [check_cut, check_cut_experts])
def test_what_tensor_parallelism_cuts(check):
    run_world(2, check)
