"""main_grad of several ranks: DistributedDataParallel is refused; a loop reduces it itself."""

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.worlds import run_world

WIDTH, MICRO_BATCHES = 32, 2


def built(accumulate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    mf.quantize_(model, "mxfp8", accumulate=accumulate, data_parallel_rank=0)
    for layer in model[1:]:
        layer.weight.main_grad = torch.zeros(WIDTH, WIDTH)
    return model


def batch(i, rank):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * i + rank))


def check_refused(rank):
    """In the forward, eager and compiled, before anything is written; also without a reduction.

    The code that refuses was compiled for, and ran in, a step outside the wrapper.
    """
    for is_compiled in (False, True):
        model = built("main_grad")
        inner = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        inner(batch(0, rank)).sum().backward()
        for layer in model[1:]:
            layer.weight.main_grad.zero_()
        ddp = nn.parallel.DistributedDataParallel(inner)
        for context in (ddp.no_sync, torch.enable_grad):
            with context(), pytest.raises(Exception, match="convert with accumulate='grad', or"):
                ddp(batch(0, rank))
        # Called past the wrapper, whose hooks remain.
        if not is_compiled:
            with pytest.raises(ValueError, match=r"Wrappers that reduce \.grad"):
                model(batch(0, rank)).sum().backward()
        assert not any(layer.weight.main_grad.any() for layer in model[1:])


def test_distributed_data_parallel_is_refused():
    run_world(2, check_refused)


def check_loop(rank):
    """The loop of docs/memory.md has the sums of one process with all ranks' batches."""
    ranks, model, whole = dist.get_world_size(), built("main_grad"), built("main_grad")
    for i in range(MICRO_BATCHES):
        model(batch(i, rank)).square().sum().backward()
    layers = [m for m in model.modules() if isinstance(m, mf.Linear)]
    for layer in layers:
        dist.all_reduce(layer.weight.main_grad)
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
    for i in range(MICRO_BATCHES):
        for other in range(ranks):
            whole(batch(i, other)).square().sum().backward()
    additions = MICRO_BATCHES * ranks  # of float32 addends, in another order
    for layer, want in zip(model[1:], whole[1:]):
        for a, b in (
            (layer.weight.main_grad, want.weight.main_grad),
            (layer.bias.grad, want.bias.grad),
        ):
            bound = additions * 2**-23 * b.abs().max().item()
            torch.testing.assert_close(a, b, rtol=0, atol=bound)
        assert layer.weight.grad is None


def test_a_loop_reduces_main_grad():
    run_world(2, check_loop)
