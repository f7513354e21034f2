"""Compiled blocks under FSDP2 train as eager ones do, whatever the loop does."""

import minifloat as mf
import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support import training_programs as programs
from tests.support.same_bits import require_same
from tests.support.worlds import run_world

WAYS = [programs.compile_blocks, programs.compile_root]
EVALUATED = ["evaluate", *4 * ["train", "newest", "step"], "evaluate", "train", "newest", "step"]


def compare(rank, recipe, is_checkpointed, written):
    mesh = init_device_mesh("cpu", (2,))

    def build():
        torch.manual_seed(0)
        model = programs.Model()
        mf.quantize_(model, recipe, keep="nothing")
        if is_checkpointed:
            for i, block in enumerate(model.blocks):
                model.blocks[i] = checkpoint_wrapper(block)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        return model

    for program in written:
        want = programs.Loop(build, programs.run_eager).run(program)
        ways = [programs.compile_blocks] if is_checkpointed else WAYS
        for way in ways:
            got = programs.Loop(build, way).run(program)
            assert list(got) == list(want)
            for name, tensor in want.items():
                require_same(got[name], tensor, f"{way.__name__}: {name}")


@pytest.mark.slow
def test_sequences_over_two_ranks():
    random = [programs.random_program(seed, programs.SHARDED) for seed in (200, 201)]
    run_world(2, compare, "nvfp4", False, [EVALUATED, *random])


@pytest.mark.parametrize("recipe", ["fp8_rowwise", "mxfp8", "nvfp4"])
def test_blocks_that_are_checkpointed_and_compiled(recipe):
    """Their backward reads weights in both directions, of which a gather may move one."""
    run_world(2, compare, recipe, True, [EVALUATED])
