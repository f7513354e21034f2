"""What a StepGuard costs: a Llama of 300 parameters, with and without it, in turn.

    python benchmarks/step_guard.py [--device cuda] [--dim 64] [--tokens 512]

optimizer.step() of a fused AdamW, with check() before it, in microseconds of the host, and in
kernels where --device is cuda; and a whole training step, in milliseconds. Beside them:
torch.nn.utils.clip_grad_norm_, which reads the gradients too. Each is the median of --steps; rows
take turns, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from minifloat.inspector import StepGuard
from torch import nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.llama import ModelConfig, build_model, cross_entropy

LAYERS = 33  # of 9 parameters each, beside the embedding, the last norm and the head
VOCABULARY, SEQUENCE = 256, 128


def microseconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter_ns()
    function()
    return (time.perf_counter_ns() - begin) / 1e3


def kernels_of(function: Callable[[], object]) -> int:
    """Counts the kernels and copies that a call starts on the device."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events())


class Job:
    """A model with its optimizer, guarded or not."""

    def __init__(self, options: argparse.Namespace, is_guarded: bool) -> None:
        config = ModelConfig(options.dim, LAYERS, 2, 2, 2 * options.dim, VOCABULARY)
        self.model: nn.Module = build_model(config, SEQUENCE, 0, options.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        rows = max(options.tokens // SEQUENCE, 1)
        self.ids = torch.randint(VOCABULARY, (rows, SEQUENCE + 1), device=options.device)
        self.guard = (
            StepGuard(self.model, self.optimizer, on_nonfinite="raise") if is_guarded else None
        )

    def backward(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model(self.ids[:, :-1]), self.ids[:, 1:]).backward()

    def step(self) -> None:
        if self.guard is not None:
            self.guard.check()
        self.optimizer.step()

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    is_cuda = options.device != "cpu"
    wait: Callable[[], None] = torch.cuda.synchronize if is_cuda else lambda: None
    jobs = {"without": Job(options, False), "with a guard": Job(options, True)}
    found: dict[str, list[float]] = {}
    for step in range(options.steps + 3):
        for name, job in jobs.items():
            wait()
            begin = time.perf_counter()
            job.backward()
            wait()
            times = {f"optimizer.step() {name}, us": microseconds(job.step)}
            wait()
            times[f"a training step {name}, ms"] = (time.perf_counter() - begin) * 1e3
            if name == "without":
                times["clip_grad_norm_, us"] = microseconds(job.clip)
            for what, value in times.items() if step >= 3 else ():
                found.setdefault(what, []).append(value)
    parameters = len([*jobs["without"].model.parameters()])
    print(f"{parameters} parameters, dim {options.dim}, {options.tokens} tokens, {options.device}")
    for what, values in sorted(found.items()):
        print(f"{what:<40}{statistics.median(values):12.1f}")
    for name, job in jobs.items() if is_cuda else ():
        job.backward()
        print(f"{f'optimizer.step() {name}, kernels':<40}{kernels_of(job.step):12}")


if __name__ == "__main__":
    main()
