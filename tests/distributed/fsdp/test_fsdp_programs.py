"""Compiled blocks under FSDP2 train as eager ones do, whatever the loop does."""

import minifloat as mf
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support import training_programs as programs
from tests.support.same_bits import require_same
from tests.support.worlds import run_world

EVALUATED = ["evaluate", *4 * ["train", "newest", "step"], "evaluate", "train", "newest", "step"]


def compare(rank, written):
    mesh = init_device_mesh("cpu", (2,))

    def build():
        torch.manual_seed(0)
        model = programs.Model()
        mf.quantize_(model, "nvfp4", verbose=False)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
        return model

    for program in written:
        want = programs.Loop(build, programs.run_eager).run(program)
        for way in (programs.compile_blocks, programs.compile_root):
            got = programs.Loop(build, way).run(program)
            assert list(got) == list(want)
            for name, tensor in want.items():
                require_same(got[name], tensor, f"{way.__name__}: {name}")


@pytest.mark.slow
def test_sequences_over_two_ranks():
    random = [programs.random_program(seed, programs.SHARDED) for seed in (200, 201)]
    run_world(2, compare, [EVALUATED, *random])
