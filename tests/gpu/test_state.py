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


@pytest.mark.parametrize("flags", ["", "+sr", "+rht"])
def test_casts_raise_histories_as_on_the_cpu(device, flags):
    """Runs one-cluster, preset and general casts of matrices, batches and groups."""
    torch.manual_seed(2)
    delayed, rng = f"e4m3/tensor+delayed{flags}", torch.tensor([1, 2])
    ends = torch.tensor([100, 100, 700], dtype=torch.int32)
    for shape in ((128, 128), (1024, 2048), (48, 160), (100, 72), (3, 128, 256), (1024, 256)):
        is_grouped = shape == (1024, 256)
        parts = (3,) if len(shape) == 3 or is_grouped else ()
        history = POOL[torch.randint(len(POOL), (6, *parts, 5))].nan_to_num(1.0)
        history[[2, 4], ..., 1] = 0.5  # which each cast raises
        for dtype, row, col in (
            (torch.bfloat16, delayed, delayed),
            (torch.bfloat16, delayed, ""),
            (torch.bfloat16, "", delayed),
            (torch.bfloat16, "mxfp8", delayed),
            (torch.float32, delayed, delayed),
        ):
            x, found = (torch.randn(shape) * 3).to(dtype), []
            for where in (torch.device("cpu"), device):
                current = history.to(where, copy=True)
                groups = ops.group_table(ends.to(where), 1024) if is_grouped else None
                out = ops.quantize_delayed(
                    x.to(where), row, col, current, 2, 4, rng=rng.to(where), groups=groups
                )
                found.append((current.cpu(), [] if is_grouped else [t.cpu() for t in out]))
            assert torch.equal(found[0][0].view(torch.int32), found[1][0].view(torch.int32))
            for a, b in zip(found[0][1], found[1][1], strict=True):
                a, b = (t.reshape(-1).view(torch.uint8) for t in (a, b))
                assert torch.equal(a, b)
            assert not torch.equal(found[0][0], history)


def test_a_random_state_advances_as_on_the_cpu(device):
    state = torch.tensor([-3, 2**63 - 1]).to(device)
    copy = ops.advance_random_state(state)
    assert state.tolist() == copy.tolist() == [-3, -(2**63)]
    assert copy.data_ptr() != state.data_ptr()
