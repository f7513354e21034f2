"""The host's time of a step in minifloat's FSDP2 hooks: 8 blocks of 7 weights of 64 x 64.

python benchmarks/fsdp_host.py [--recipes fp8_tensorwise,…]

hooks   before and after the gathers, forward and backward, mf.step's casts, and setting the
        gathered parameter; one rank of two on the CPU, and nothing is sent
step    all of a step: FSDP2's own work and the layers' included
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import _ranks as ranks  # first: it makes minifloat importable
import minifloat as mf
import torch
from minifloat.distributed.fsdp import weight, weight_tensors
from minifloat.nn.linear import Linear
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BLOCKS, WEIGHTS, WIDTH = 8, 7, 64
WARM_STEPS, STEPS = 6, 40


class Timed:
    """Seconds spent in wrapped functions, nested ones counted once."""

    def __init__(self) -> None:
        self.seconds, self.depth = 0.0, 0

    def wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            if self.depth:
                return inner(*args, **kwargs)
            self.depth, start = 1, time.thread_time()
            try:
                return inner(*args, **kwargs)
            finally:
                self.depth = 0
                self.seconds += time.thread_time() - start

        setattr(owner, name, timed)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(WEIGHTS)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def build(recipe: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    if recipe != "bf16":
        mf.quantize_(model, recipe)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def measure(recipe: str, timed: Timed, use_step: bool) -> tuple[float, float]:
    """Returns the milliseconds of a step: in hooks, and in all."""
    model = build(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(16, WIDTH, dtype=torch.bfloat16)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if use_step and recipe != "bf16":
            mf.step(model)

    return timed_steps(step, timed)


def timed_steps(step: Callable[[], None], timed: Timed) -> tuple[float, float]:
    for _ in range(WARM_STEPS):
        step()
    hooks, whole = [], []
    for _ in range(STEPS):
        timed.seconds, start = 0.0, time.thread_time()
        step()
        whole.append(time.thread_time() - start)
        hooks.append(timed.seconds)
    return 1e3 * min(hooks), 1e3 * min(whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", default=",".join(mf.presets()))
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks.alone(2)
    timed = Timed()
    timed.wrap(weight_tensors.BeforeGather, "__call__")
    timed.wrap(weight_tensors.ShardedWeight, "fsdp_post_all_gather")
    timed.wrap(Linear, "__setattr__")
    timed.wrap(weight, "sharded_batches")
    timed.wrap(weight, "exchange_amaxes")
    print(f"{'recipe':16} {'hooks, mf.step':>16} {'hooks without':>16} {'step':>8}   ms")
    for recipe in options.recipes.split(","):
        if recipe == "fp8_delayed":
            with_step, whole = measure(recipe, timed, True)
            print(f"{recipe:16} {with_step:16.2f} {'-':>16} {whole:8.1f}", flush=True)
            continue
        with_step, whole = measure(recipe, timed, True)
        without, _ = measure(recipe, timed, False)
        print(f"{recipe:16} {with_step:16.2f} {without:16.2f} {whole:8.1f}", flush=True)
    mf.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
