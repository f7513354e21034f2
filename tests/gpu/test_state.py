"""What a model keeps from step to step is on a GPU as on the CPU, byte for byte."""

import pytest
import torch
from minifloat._native import ops

pytestmark = pytest.mark.gpu

POOL = torch.tensor([0.0, 0.0, 1.5, 3.25, 1e-40, 3e38, float("inf"), float("nan")])


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 1, 126])
def test_histories_roll_as_on_the_cpu(device, algorithm, margin):
    torch.manual_seed(0)
    for layers, length in ((1, 1), (3, 2), (40, 16)):
        want = [POOL[torch.randint(len(POOL), (6, 1 + length))] for _ in range(layers)]
        got = [history.to(device, copy=True) for history in want]
        for histories in (want, got):
            ops.roll_amax_histories(histories, algorithm=algorithm, margin=margin)
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a.cpu().view(torch.int32), b.view(torch.int32))


def test_a_layer_raises_its_history_as_on_the_cpu(device):
    """Runs two forwards and a backward, from an empty history and from one with NaN and Inf."""
    torch.manual_seed(1)
    x, w, g = (torch.randn(128, 128, dtype=torch.bfloat16) for _ in range(3))
    for history in (torch.zeros(6, 5), POOL[torch.randint(len(POOL), (6, 5))].nan_to_num(1.0)):
        found = []
        for where in (torch.device("cpu"), device):
            current = history.to(where, copy=True)
            operands = [t.to(where, copy=True).requires_grad_() for t in (x, w)]
            for scale in (1.0, 0.5):
                y = ops.linear(
                    operands[0] * scale, operands[1], None, "fp8_delayed", amax_history=current
                )
            y.backward(g.to(where))
            found.append(current.cpu())
        assert torch.equal(found[0].view(torch.int32), found[1].view(torch.int32))
        assert not torch.equal(found[0], history)


def test_a_random_state_advances_as_on_the_cpu(device):
    state = torch.tensor([-3, 2**63 - 1]).to(device)
    copy = ops.advance_random_state(state)
    assert state.tolist() == copy.tolist() == [-3, -(2**63)]
    assert copy.data_ptr() != state.data_ptr()
