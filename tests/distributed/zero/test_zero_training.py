"""Training with sharded masters: losses are those of a loop that casts whole weights, bit for bit.

    whole    every rank keeps all masters, and casts whole weights at every step
    ZeRO-1   a rank keeps a shard of the masters; weights are whole on every rank
    ZeRO-3   and of the codes, too: whole weights exist from gather to the end of the backward pass

Four processes, each with its batch; gradients are averaged by one all-reduce in all three.
Products and all-reduces of the three are repetitions (exact_sums.py).
"""

from itertools import pairwise

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.loss_errors import loss_error
from tests.support.worlds import run_world

RANKS, STEPS, BATCH, SIZES = 4, 30, 8, (48, 70, 33, 16)
HYBRID = "fprop=mxfp8*mxfp8 dgrad=nvfp4+sr*nvfp4/16x16 wgrad=mxfp8*mxfp8"
RECIPES = ["fp8_tensorwise", "fp8_blockwise", "mxfp8", "mxfp8_2d", "nvfp4", HYBRID]


def build(recipe):
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=False) for a, b in pairwise(SIZES)]
    model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).bfloat16()
    masters = [p.detach().float().clone() for p in model.parameters()]
    if recipe != "bf16":
        mf.quantize_(model, recipe, primary=True)
    return model, masters


def batch(step, rank):
    """Returns one batch of a fixed map that the model is trained on."""
    x = torch.randn(BATCH, SIZES[0], generator=torch.Generator().manual_seed(1000 * step + rank))
    teacher = torch.randn(SIZES[0], SIZES[-1], generator=torch.Generator().manual_seed(7))
    return x.bfloat16(), torch.tanh(x @ teacher / 7)


class Momentum:
    """An optimizer that works element by element, on whole masters and on shards alike."""

    def __init__(self, masters):
        self.masters = masters
        self.velocity = [torch.zeros_like(m) for m in masters]

    def step(self, gradients):
        for master, velocity, gradient in zip(self.masters, self.velocity, gradients):
            velocity.mul_(0.9).add_(gradient)
            master.sub_(velocity, alpha=0.25)  # 2^-2: exact with or without an FMA


def forward_backward(model, step, rank):
    """Returns the mean loss over ranks, and averaged gradients."""
    x, target = batch(step, rank)
    loss = (model(x).float() - target).square().mean()
    loss.backward()
    gradients = [p.grad.float().flatten() for p in model.parameters()]
    model.zero_grad()
    mean = torch.cat([loss.detach().view(1), *gradients])
    dist.all_reduce(mean)
    mean /= RANKS
    loss, *gradients = mean.split([1] + [g.numel() for g in gradients])
    return loss.item(), [g.view(p.shape) for g, p in zip(gradients, model.parameters())]


def train_whole(recipe, rank):
    model, masters = build(recipe)
    optimizer, losses = Momentum(masters), []
    for step in range(STEPS):
        loss, gradients = forward_backward(model, step, rank)
        losses.append(loss)
        optimizer.step(gradients)
        with torch.no_grad():
            for weight, master in zip(model.parameters(), masters):
                cast = master.bfloat16()
                if recipe != "bf16":
                    cast = mf.QuantizedTensor.from_tensor(cast, *weight.specs)
                weight.copy_(cast)
    return losses


class Sharded:
    """A rank's shards of masters, and the optimizer on them."""

    def __init__(self, model, masters, rank, cuts=None):
        self.weights = list(model.parameters())
        self.layout = mf.distributed.WireLayout.of(self.weights, RANKS, cuts)
        self.shards = self.layout.shards(rank)
        self.starts = [begin for begin, _ in self.shards]
        self.shard_masters = [m.flatten()[b:e].clone() for m, (b, e) in zip(masters, self.shards)]
        self.optimizer = Momentum(self.shard_masters)

    def step(self, gradients, fragments=None):
        self.optimizer.step([g.flatten()[b:e] for g, (b, e) in zip(gradients, self.shards)])
        mf.distributed.quantize_master_weights(
            self.weights, self.shard_masters, self.starts, dist.group.WORLD, fragments
        )


def train_zero1(recipe, rank):
    model, masters = build(recipe)
    sharded, losses = Sharded(model, masters, rank), []
    weights, layout = sharded.weights, sharded.layout
    shard_codes = layout.new_piece(masters[0])
    fragments = layout.fragments(shard_codes, rank)
    for step in range(STEPS):
        loss, gradients = forward_backward(model, step, rank)
        losses.append(loss)
        sharded.step(gradients)
        for i, weight in enumerate(weights):  # exactly the bytes that this rank has written
            for flat_codes, ranges, fragment in zip(
                mf.distributed.wires(weight), layout.byte_ranges(i), fragments[i]
            ):
                fragment.copy_(flat_codes.view(-1)[slice(*ranges[rank])])
                flat_codes.fill_(0xEE)
        layout.gather(shard_codes, weights, dist.group.WORLD)
        mf.distributed.post_all_gather_processing(weights)
    return losses


def drop_codes(weight):
    """Overwrites what a ZeRO-3 engine frees: codes of both directions and flat codes."""
    for part in (weight.rowwise, weight.columnwise):
        part.codes.fill_(0xEE)
    for flat_codes in mf.distributed.wires(weight):
        flat_codes.fill_(0xEE)


def train_zero3(recipe, rank):
    model, masters = build(recipe)
    odd = [[0, 5, 5, p.numel() // 2 | 1, p.numel()] for p in model.parameters()]  # one shard empty
    sharded, losses = Sharded(model, masters, rank, odd), []
    shard_codes = sharded.layout.new_piece(masters[0])
    fragments = sharded.layout.fragments(shard_codes, rank)
    mf.distributed.quantize_master_weights(
        sharded.weights, sharded.shard_masters, sharded.starts, dist.group.WORLD, fragments
    )
    for step in range(STEPS):
        sharded.layout.gather(shard_codes, sharded.weights, dist.group.WORLD)
        mf.distributed.post_all_gather_processing(sharded.weights)
        loss, gradients = forward_backward(model, step, rank)
        for weight in sharded.weights:
            drop_codes(weight)
        losses.append(loss)
        sharded.step(gradients, fragments)
    return losses


def check_losses(rank, recipes):
    plain = train_whole("bf16", rank)
    for recipe in recipes:
        whole = train_whole(recipe, rank)
        # The first loss is about the mean square of the target, and so a bound of that of y.
        bound = loss_error(recipe, 3, plain[0], plain[-1], RANKS * BATCH * SIZES[-1])
        assert abs(whole[-1] - plain[-1]) < bound < whole[0] - plain[-1], recipe
        assert train_zero1(recipe, rank) == whole, recipe
        assert train_zero3(recipe, rank) == whole, recipe


@pytest.mark.parametrize(
    "recipes",
    [
        pytest.param(RECIPES[:2], marks=pytest.mark.slow),
        pytest.param(RECIPES[2:4], marks=pytest.mark.slow),
        RECIPES[4:],
    ],
    ids=", ".join,
)
def test_sharded_training_has_the_losses_of_whole_casts(recipes):
    run_world(RANKS, check_losses, recipes)
