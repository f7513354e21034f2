"""FSDP2 as trainers drive it: forward and backward in the optimizer's closure, by a method beside
forward, with evaluation before and between steps, and with checkpointed blocks.
"""

import minifloat as mf
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.support.sharded_models import assert_equal, batch, built, sharded, whole
from tests.support.worlds import run_world

STEPS, MICRO_BATCHES = 3, 2


class Module(nn.Module):
    """A module as of Lightning, whose own forward is never called."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, x):
        return self.net(x).float().square().mean() / MICRO_BATCHES

    @torch.no_grad()
    def validate(self, x):
        self.eval()
        loss = self.net(x).float().square().mean().item()
        self.train()
        return loss


def train(module):
    """Trains with the optimizer's closure, and returns all losses."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = [module.validate(batch(100))]
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            for i in range(MICRO_BATCHES):
                loss = module.training_step(batch(step * MICRO_BATCHES + i))
                loss.backward()
                losses.append(loss.item())
            return loss

        optimizer.step(closure)
        mf.step(module)
        losses.append(module.validate(batch(100)))
    return losses


def check_steps(rank, recipe):
    """Compares with one process."""
    alone = Module(built(recipe))
    losses = train(alone)
    for resharded in (True, False):
        options = {"reshard_after_forward": resharded}
        by_function = sharded(built(recipe, is_recomputed=True), **options)

        inside, outside = built(recipe), built(recipe)
        for i in range(2):  # a wrapped block that is sharded, and a sharded block that is wrapped
            inside.blocks[i] = fully_shard(checkpoint_wrapper(inside.blocks[i]), **options)
            outside.blocks[i] = checkpoint_wrapper(fully_shard(outside.blocks[i], **options))
        fully_shard(inside, **options)
        fully_shard(outside, **options)
        for model in (by_function, inside, outside):
            module = Module(model)
            assert train(module) == losses
        assert_equal(whole(by_function), whole(alone.net), (recipe, resharded))


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8", "fp8_delayed"])
def test_checkpointed_blocks_train_as_one_process(recipe):
    run_world(2, check_steps, recipe)


def check_bf16(rank, recipe):
    """Runs in bf16, whose roundings differ from those of one process."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    module = Module(sharded(built(recipe, is_recomputed=True), mp_policy=policy))
    losses = train(module)
    assert losses[-1] < losses[0]


def test_checkpointed_blocks_train_in_bf16():
    run_world(2, check_bf16, "nvfp4")
