"""A step of a model that FSDP2 shards, in one CUDA graph: each replay is the next eager step.

The graph has FSDP2's gathers and reductions over NCCL, the optimizer and mf.step. Ranks share GPUs
where there are fewer.
"""

from __future__ import annotations

from collections.abc import Callable

import minifloat as mf
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.support.graphs import captured
from tests.support.same_bits import require_same
from tests.support.sharded_models import Model, batch, built, sharded, whole
from tests.support.worlds import device_of, run_world

pytestmark = pytest.mark.gpu

RANKS, WARM_UPS, REPLAYS, EAGER = 2, 3, 3, 2
WIRE = "e4m3/1x128+sr"  # of gradients
RATE = 1e-2  # the largest weights, from which scales are, change in each step
CASES = [(r, None) for r in mf.presets() if r != "bf16"] + [("bf16", WIRE), ("nvfp4", WIRE)]


class Job:
    """A sharded model, and its step on a batch in memory that stays."""

    def __init__(self, recipe: str, wire: str | None, device: torch.device) -> None:
        torch.manual_seed(0)
        model = Model() if recipe == "bf16" else built(recipe)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.model: nn.Module = sharded(model.to(device), mp_policy=policy)
        if wire is not None:
            mf.distributed.quantize_gradients_(self.model, wire)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=RATE, fused=True, capturable=True
        )
        self.x = torch.empty_like(batch(0), device=device)

    def step(self) -> Tensor:
        loss = self.model(self.x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mf.step(self.model)
        return loss.detach()


def steps(job: Job, run: Callable[[], Tensor], first: int, count: int) -> list[Tensor]:
    """Runs steps on the batches from `first` on, and returns copies of their losses."""
    losses = []
    for step in range(first, first + count):
        job.x.copy_(batch(step))
        losses.append(run().clone())
    return losses


def check_replays(rank: int, cases: list[tuple[str, str | None]]) -> None:
    """Compares losses, random states and weights. Both jobs end with steps that no graph has."""
    device = device_of(rank, "cuda")
    for recipe, wire in cases:
        eager, job = Job(recipe, wire, device), Job(recipe, wire, device)
        total = WARM_UPS + REPLAYS + EAGER
        want = steps(eager, eager.step, 0, total)
        got = steps(job, job.step, 0, WARM_UPS)
        graph, loss = captured(job.step, warm_ups=0, capture_error_mode="thread_local")

        def replay(graph: torch.cuda.CUDAGraph = graph, loss: Tensor = loss) -> Tensor:
            graph.replay()
            return loss

        got += steps(job, replay, WARM_UPS, REPLAYS)
        got += steps(job, job.step, WARM_UPS + REPLAYS, EAGER)
        where = f"{recipe}, gradients as {wire}"
        require_same(torch.stack(got), torch.stack(want), f"{where}: losses")
        states = mf.training_state(eager.model), mf.training_state(job.model)
        for name, state in states[0].items():
            require_same(states[1][name], state, f"{where}: {name}")
        weights = whole(job.model)
        for name, weight in whole(eager.model).items():
            require_same(weights[name], weight, f"{where}: {name}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(filter(None, case)))
def test_a_replay_is_the_next_eager_step(cuda, case):
    run_world(RANKS, check_replays, [case], kind="cuda")
