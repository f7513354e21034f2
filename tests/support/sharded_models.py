"""A small model, sharded by FSDP2 or whole, and its training, for tests of FSDP2.

Each rank multiplies the whole weight with the whole batch, as one process does, so products of both
are repetitions (exact_sums.py) and equal to the bit. A mean of equal gradients over 2 or 4 ranks is
exact.
"""

import minifloat as mf
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

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
    mf.quantize_(model, recipe, keep="nothing", data_parallel_rank=0)
    return model


def sharded(model, *, by_block=True, **options):
    for block in model.blocks if by_block else ():
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(step, rank=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(24, WIDTH, generator=generator).to(dtype)


def train(model, steps=STEPS, *, dtype=torch.float32, micro_batches=1, use_step=False, lr=1e-2):
    """Trains all ranks on equal batches: the averaged gradient is each rank's, to the bit."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)
    device = next(model.parameters()).device
    losses = []
    for step in range(steps):
        for i in range(micro_batches):
            x = batch(step * micro_batches + i, dtype=dtype).to(device)
            loss = model(x).float().square().mean()
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
