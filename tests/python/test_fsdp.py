"""FSDP2 with weights that travel quantized: training, checkpoints, what else a model may have."""

import copy

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from minifloat.tensor import QuantizedTensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from worlds import run_world

WIDTH, INNER, STEPS = 48, 80, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, is_recomputed=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)
        self.is_recomputed = is_recomputed

    def forward(self, x):
        for block in self.blocks:
            if self.is_recomputed and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)


def built(recipe, seed=0, **options):
    torch.manual_seed(seed)
    model = Model(**options)
    mf.quantize_(model, recipe, data_parallel_rank=0, verbose=False)
    return model


def sharded(model, *, by_block=True, **options):
    for block in model.blocks if by_block else ():
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(step, rank=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(24, WIDTH, generator=generator).to(dtype)


def train(model, steps=STEPS, *, dtype=torch.float32, micro_batches=1, use_step=False, lr=1e-2):
    """All ranks see the same batches: the averaged gradient is each one's, to the bit."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)
    losses = []
    for step in range(steps):
        for i in range(micro_batches):
            loss = model(batch(step * micro_batches + i, dtype=dtype)).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if use_step:
            mf.step(model)
        losses.append(loss.item())
    return losses


def whole(model):
    return {
        name: p.full_tensor() if hasattr(p, "full_tensor") else p
        for name, p in model.state_dict().items()
    }


def assert_equal(a, b, what=""):
    assert a.keys() == b.keys(), what
    for name in a:
        assert torch.equal(a[name], b[name]), (what, name)


# ---- training equals one process -----------------------------------------------------------------

PRESETS = [
    "fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_blockwise", "mxfp8", "mxfp8_2d", "mxfp4",
    "nvfp4", "mxfp8_nvfp4", "nvfp4_mxfp8",
]  # fmt: skip
VARIANTS = {
    "by block": ({}, {}, {}),
    "the root alone": ({}, {"by_block": False}, {}),
    "not resharded": ({}, {"reshard_after_forward": False}, {}),
    "mf.step": ({}, {}, {"use_step": True}),
    "micro-batches": ({}, {}, {"micro_batches": 2, "use_step": True}),
    "recomputed": ({"is_recomputed": True}, {}, {}),
}


def check_training(rank, recipes):
    """World sizes are powers of two: the mean of equal gradients is then exact."""
    for recipe in recipes:
        for name, (model_options, shard_options, train_options) in VARIANTS.items():
            if recipe == "fp8_delayed":
                train_options = {**train_options, "use_step": True}
            alone = built(recipe, **model_options)
            losses = train(alone, **train_options)
            model = sharded(built(recipe, **model_options), **shard_options)
            assert train(model, **train_options) == losses, (recipe, name)
            assert_equal(whole(model), whole(alone), (recipe, name))


@pytest.mark.parametrize("world", [2, 4])
def test_training_equals_one_process(world):
    run_world(world, check_training, PRESETS if world == 2 else PRESETS[::3])
