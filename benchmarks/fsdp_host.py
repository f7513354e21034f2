"""The host's time in minifloat's FSDP2 hooks, by what runs: 8 blocks of 7 weights of 64 x 64.

python benchmarks/fsdp_host.py [--recipes fp8_tensorwise,…]

Microseconds a weight and step, with mf.step; one rank of two on the CPU, and nothing is sent. A
call's time is its least over all steps.

pre      FSDP2's hook before a gather, forward and backward
post     its hook after a gather, forward and backward
set      Linear.__setattr__ of the parameters that FSDP2 assigns, four times a step
scales   what mf.step exchanges of the sharded weights
python   the sum of these four
native   the native casts, fills and exchanges that they call, and the collectives: in none of them
step     all of a step: FSDP2's own work and the layers' included; its least
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import _ranks as ranks  # first: it makes minifloat importable
import minifloat as mf
import torch
import torch.distributed as dist
from minifloat.distributed.fsdp import weight_tensors
from minifloat.nn.linear import Linear
from minifloat.nn.registry import distributed_functions
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BLOCKS, WEIGHTS, WIDTH = 8, 7, 64
WARM_STEPS, STEPS = 6, 200
HOOKS = ("pre", "post", "set", "scales")


class Timed:
    """The nanoseconds of each call of wrapped functions, without those of wrapped inner calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.inner = 0  # of the calls inside the present one
        readings = [time.perf_counter_ns() for _ in range(1000)]
        self.reading = min(b - a for a, b in pairwise(readings))

    def wrapped(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter_ns

        def call(*args: Any, **kwargs: Any) -> Any:
            begin, before, self.inner = clock(), self.inner, 0
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                own = clock() - start - self.inner - self.reading
                self.calls.append((kind, own))
                self.inner = before + clock() - begin + self.reading

        return call

    def wrap(self, kind: str, owner: Any, name: str) -> None:
        setattr(owner, name, self.wrapped(kind, getattr(owner, name)))


class Native:
    """A native object whose methods are timed."""

    def __init__(self, timed: Timed, native: Any) -> None:
        self.timed, self.native = timed, native

    def __getattr__(self, name: str) -> Any:
        method = self.timed.wrapped("native", getattr(self.native, name))
        setattr(self, name, method)
        return method


def wrap_all(timed: Timed) -> None:
    classes = torch.classes.minifloat
    new_batch, new_exchange = classes.GatherBatch, classes.AmaxExchange
    classes.GatherBatch = lambda *args: Native(timed, new_batch(*args))
    of_batches = timed.wrapped("native", lambda batches: new_exchange([b.native for b in batches]))
    classes.AmaxExchange = lambda batches: Native(timed, of_batches(batches))
    timed.wrap("native", dist, "all_reduce")
    timed.wrap("pre", weight_tensors.BeforeGather, "__call__")
    timed.wrap("post", weight_tensors.ShardedWeight, "fsdp_post_all_gather")
    timed.wrap("set", Linear, "__setattr__")
    timed.wrap("scales", distributed_functions, "exchange_scales")


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


def measure(recipe: str, timed: Timed) -> tuple[dict[str, float], float]:
    """Returns the microseconds a weight and step by kind, and the milliseconds of a step."""
    model = build(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x = torch.randn(16, WIDTH, dtype=torch.bfloat16)
    steps, whole = [], []
    for index in range(WARM_STEPS + STEPS):
        timed.calls, start = [], time.thread_time()
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if recipe != "bf16":
            mf.step(model)
        if index >= WARM_STEPS:
            steps.append(timed.calls)
            whole.append(time.thread_time() - start)
    found = dict.fromkeys((*HOOKS, "native"), 0.0)
    for of_steps in zip(*steps, strict=True):
        (kind,) = {kind for kind, _ in of_steps}
        found[kind] += min(ns for _, ns in of_steps) / 1e3 / (BLOCKS * WEIGHTS)
    return found, 1e3 * min(whole)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipes", default=",".join(mf.presets()))
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks.alone(2)
    timed = Timed()
    wrap_all(timed)
    heads = (*HOOKS, "python", "native")
    print(f"{'recipe':16}" + "".join(f"{head:>9}" for head in heads) + f"{'step, ms':>10}")
    for recipe in options.recipes.split(","):
        found, step = measure(recipe, timed)
        found["python"] = sum(found[kind] for kind in HOOKS)
        figures = "".join(f"{found[head]:9.2f}" for head in heads)
        print(f"{recipe:16}{figures}{step:10.1f}", flush=True)
    mf.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
