"""mf.GraphedStep of a model that FSDP2 shards: each call is the next eager step.

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

from tests.support.same_bits import require_same
from tests.support.sharded_models import Model, batch, built, sharded, whole
from tests.support.worlds import device_of, run_world

pytestmark = pytest.mark.gpu

RANKS, WARM_UPS, REPLAYS, EAGER = 2, 3, 3, 2
WIRE = "e4m3/1x128+sr"  # of gradients
# The largest weights, from which scales are, change in each step. Exact in float32, as a graph
# has it.
RATE = 2.0**-7
CASES = [(r, None) for r in mf.presets() if r != "bf16"] + [("bf16", WIRE), ("nvfp4", WIRE)]


class Job:
    """A sharded model, and its step."""

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
        self.device = device

    def step(self, x: Tensor) -> Tensor:
        loss = self.model(x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mf.step(self.model)
        return loss.detach()

    def losses(self, step: Callable[[Tensor], Tensor], first: int, count: int) -> list[Tensor]:
        """Runs a step on the batches from `first` on."""
        return [step(batch(i).to(self.device)) for i in range(first, first + count)]


def check_calls(rank: int, cases: list[tuple[str, str | None]]) -> None:
    """Compares losses, random states and weights. Both jobs end with steps that no graph has."""
    device = device_of(rank, "cuda")
    for recipe, wire in cases:
        eager, job = Job(recipe, wire, device), Job(recipe, wire, device)
        calls = WARM_UPS + REPLAYS
        want = eager.losses(eager.step, 0, calls + EAGER)
        step = mf.GraphedStep(job.step, job.model, job.optimizer, warm_ups=WARM_UPS)
        got = job.losses(step, 0, calls) + job.losses(job.step, calls, EAGER)
        where = f"{recipe}, gradients as {wire}"
        require_same(torch.stack(got), torch.stack(want), f"{where}: losses")
        states = mf.training_state(eager.model), mf.training_state(job.model)
        for name, state in states[0].items():
            require_same(states[1][name], state, f"{where}: {name}")
        weights = whole(job.model)
        for name, weight in whole(eager.model).items():
            require_same(weights[name], weight, f"{where}: {name}")


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(filter(None, case)))
def test_a_call_is_the_next_eager_step(cuda, case):
    run_world(RANKS, check_calls, [case], kind="cuda")
