"""CUDA graphs train as eager code does, whatever the loop does: counts, bits and gradients."""

from __future__ import annotations

import minifloat as mf
import pytest
import torch

from tests.support import training_programs as programs
from tests.support.same_bits import require_same

pytestmark = pytest.mark.gpu

ACTIONS = ("train", "evaluate", "oldest", "newest", "step", "save", "load", "twice", "copy")
PROGRAMS = {
    **programs.WRITTEN,
    **{f"random {seed}": programs.random_program(seed, ACTIONS) for seed in range(300, 304)},
}
# Here torch itself raises an error: a replay overwrites what an earlier forward saved.
del PROGRAMS["interleaved microbatches"]


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp8_nvfp4"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_graphs_train_as_eager_mode_does(cuda, name, recipe):
    def build():
        torch.manual_seed(0)
        # No bias: compiled code sums its gradient in another order.
        model = programs.Model(bias=False).to(cuda)
        mf.quantize_(model, recipe, keep="nothing")
        return model

    torch.compiler.reset()
    want = programs.Loop(build, programs.run_eager, cuda).run(PROGRAMS[name])
    got = programs.Loop(build, programs.replay_graphs, cuda).run(PROGRAMS[name])
    assert list(got) == list(want)
    for what, tensor in want.items():
        require_same(got[what], tensor, what)
