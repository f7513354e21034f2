"""mf.expert_parallel over NCCL: bytes, results, waits, a CUDA graph, what is sent.

pytest tests/gpu/test_expert_parallel.py                  a GPU each, or shared GPUs
pytest tests/gpu/test_expert_parallel.py --device cpu     the same over gloo: tests the tests
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.gpu.test_worlds import RANKS, TIMEOUT, run_ranks
from tests.moe.test_expert_codes import check_bytes, check_codes, check_steps
from tests.moe.test_expert_faults import DIFFERENT, run_different
from tests.moe.test_expert_parallel import (
    check_capacity_that_drops_none,
    check_dropped_rows,
    check_empty,
    check_values,
)
from tests.support.expert_world import SIZES, built, draw
from tests.support.graphs import captured
from tests.support.worlds import last_words

pytestmark = pytest.mark.gpu

RECIPES = ["bf16", "fp8_rowwise", "fp8_tensorwise", "fp8_delayed", "fp8_blockwise", "mxfp8"]
RECIPES += ["mxfp4", "nvfp4", "nvfp4_pow2", "mxfp8_nvfp4"]
# FP4 by powers of two is multiplied as FP8 codes, which no test of the codes that travel reads.
CODES = [recipe for recipe in RECIPES if recipe not in ("mxfp4", "nvfp4_pow2")]
CAPTURED = ["bf16", "fp8_rowwise", "fp8_tensorwise", "fp8_blockwise", "mxfp8"]  # nothing random
LARGEST = 0.01  # error of results: FP8 engines sum in their own order, also under `,fast`
TOKENS = 24


@pytest.mark.parametrize("ranks", [2, 4])
def test_operands_are_those_of_one_process(device, ranks):
    run_ranks(device, check_values, RECIPES, LARGEST, ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_codes_are_those_of_one_process(device, ranks):
    run_ranks(device, check_codes, CODES, SIZES[:ranks], ranks=ranks)


def test_dispatch_sends_half_or_a_third_of_the_bytes(device):
    run_ranks(device, check_bytes)


@pytest.mark.parametrize(
    ("check", "arguments"),
    [
        (check_empty, ()),
        (check_capacity_that_drops_none, (["fp8_tensorwise", "nvfp4"],)),
        (check_dropped_rows, ()),
        (check_steps, ("fp8_delayed",)),
    ],
    ids=["empty", "large capacity", "dropped rows", "histories"],
)
def test_sizes_and_steps(device, check: Callable[..., None], arguments: tuple[Any, ...]):
    run_ranks(device, check, *arguments)


@pytest.mark.parametrize("name", DIFFERENT)
def test_layers_that_differ_are_one_error(device, name):
    for end in last_words(RANKS, run_different, name, seconds=TIMEOUT, kind=device.type):
        assert "expected all ranks to have the same layer" in end, end


# ---- waits and graphs ----------------------------------------------------------------------------


def waits_of(run: Callable[[], object]) -> int:
    """Counts how often a pass waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(w.message) for w in seen)


def divided(recipe: str, **options: Any) -> tuple[mf.MoE, Tensor, Tensor]:
    """Returns a divided layer, tokens and a gradient, after a pass that allocates its state."""
    moe = mf.expert_parallel(built(recipe, fused_w13=True), dist.group.WORLD, **options)
    rank = dist.get_rank()
    x, g = draw(rank, TOKENS).requires_grad_(), draw(7 + rank, TOKENS)
    moe(x).backward(g)
    return moe, x, g


def check_waits(rank: int) -> None:
    for recipe in ("bf16", "fp8_tensorwise", "nvfp4"):
        for dispatch in ("compute_dtype", "codes"):
            for capacity, expected in ((None, 1), (20, 0), ("all", 0)):
                moe, x, g = divided(recipe, dispatch=dispatch, capacity=capacity)
                found = waits_of(lambda moe=moe, x=x, g=g: moe(x).backward(g))
                assert found == expected, (recipe, dispatch, capacity, found)


def test_a_forward_waits_once_and_with_a_capacity_never(cuda):
    run_ranks(cuda, check_waits)


def check_graph(rank: int) -> None:
    """A graph of both passes gives eager's bytes for other tokens."""
    for recipe in CAPTURED:
        for dispatch in ("compute_dtype", "codes"):
            for capacity in (20, "all"):
                moe, x, g = divided(recipe, dispatch=dispatch, capacity=capacity)

                def run(moe: mf.MoE = moe, x: Tensor = x, g: Tensor = g) -> list[Tensor]:
                    y = moe(x)
                    own = list(moe.experts.parameters())
                    return [y.detach(), *torch.autograd.grad(y, [x, *own], g)]

                # NCCL's watchdog queries events in a thread of its own.
                graph, out = captured(run, capture_error_mode="thread_local")
                for seed in (20, 30):
                    with torch.no_grad():
                        x.copy_(draw(seed + rank, TOKENS))
                    graph.replay()
                    for i, (a, b) in enumerate(zip(out, run())):
                        assert torch.equal(a, b), (recipe, dispatch, capacity, i)


def test_a_graph_with_a_capacity_gives_eagers_bytes(cuda):
    run_ranks(cuda, check_graph)
