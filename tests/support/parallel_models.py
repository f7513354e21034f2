"""A model under torch's parallel styles, alone and with FSDP2: one process's bytes.

Small integers, and formats whose scales are powers of two: every fp32 sum is exact in any order.
test_exact_sums.py checks that for each recipe of EXACT.
"""

import minifloat as mf
import torch
import torch.distributed as dist
from minifloat.distributed.tensor_parallel import QuantizedColwiseParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.support.exact_sums import integers
from tests.support.whole_layers import BATCH, TOKENS
from tests.support.worlds import device_of

WIDTH, INNER = 128, 256
EXACT = [
    "fp8_rowwise",
    "mxfp8",
    "mxfp8_2d",
    "mxfp4",
    "fprop=bf16*bf16 dgrad=mxfp8*mxfp8 wgrad=bf16*bf16",
    "fp8_rowwise_gw_hp",
    "fprop=mxfp8*mxfp8+sr dgrad=mxfp8*mxfp8+sr wgrad=mxfp4+sr*mxfp4",
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def built(recipe, data_parallel_rank=0, device="cpu", recompute=None):
    model = nn.Sequential(Block(), nn.Identity())
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(integers(i, *parameter.shape))
    model.to(device)
    rank = data_parallel_rank
    mf.quantize_(model, recipe, data_parallel_rank=rank, recompute=recompute)
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
    """Computes output and gradients of a loss whose gradient is small integers."""
    x = x.clone().requires_grad_()
    y = model(x)
    (y * weights).sum().backward()
    return y.detach(), x.grad


def require_equal(got, want, recipe, where):
    assert torch.equal(got, want), where


def check_models(rank, recipes, ranks, kind="cpu", compare=require_equal, recompute=None):
    """Checks a model with tensor parallelism over some ranks, and FSDP2 over the others.

    Calls compare(got, want, recipe, where) of outputs and gradients.
    """
    world, device = dist.get_world_size(), device_of(rank, kind)
    mesh = init_device_mesh(kind, (world // ranks, ranks), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    mine = tp.get_local_rank()
    x, weights = (integers(seed, BATCH, TOKENS, WIDTH).to(device) for seed in (10, 11))
    for recipe in recipes:
        alone = built(recipe, device=device)
        y, dx = train_step(alone, x, weights)
        for name, plan in PLANS.items():
            here = (recipe, name, world, ranks)
            model = built(recipe, device=device, recompute=recompute)
            parallelize_module(model[0], tp, plan)
            if ranks < world:
                fully_shard(model[0], mesh=mesh["dp"])
                fully_shard(model, mesh=mesh["dp"])

            def own(t, is_cut=name != "tensor"):
                return t.chunk(ranks, 1)[mine] if is_cut else t

            got_y, got_dx = train_step(model, own(x), own(weights))
            compare(got_y, own(y), recipe, (*here, "y"))
            compare(got_dx, own(dx), recipe, (*here, "dx"))
            for (key, p), q in zip(model.named_parameters(), alone.parameters()):
                assert torch.equal(p.full_tensor(), q), (here, key)
                compare(p.grad.full_tensor(), q.grad, recipe, (*here, key))
            assert set(model.state_dict()) == set(alone.state_dict()), here
            assert model[0].up.weight_gather is None, here
