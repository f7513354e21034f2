"""Amax histories roll on a GPU as on the CPU, byte for byte."""

import pytest
import torch
from minifloat._native import ops

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 1, 126])
def test_histories_roll_as_on_the_cpu(algorithm, margin):
    pool = torch.tensor([0.0, 0.0, 1.5, 3.25, 1e-40, 3e38, float("inf"), float("nan")])
    torch.manual_seed(0)
    for layers, length in ((1, 1), (3, 2), (40, 16)):
        want = [pool[torch.randint(len(pool), (6, 1 + length))] for _ in range(layers)]
        got = [history.cuda() for history in want]
        for histories in (want, got):
            ops.roll_amax_histories(histories, algorithm=algorithm, margin=margin)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.cpu().view(torch.int32), b.view(torch.int32))
