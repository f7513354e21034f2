"""Optimizers whose states have 8 bits, beside AdamW with float32 states: loss, memory and time.

    python benchmarks/gpu_moments.py          # under 100 s on a GPU
    python benchmarks/gpu_moments.py --tiny   # on a CPU, to try the script

A Llama of 122M parameters trains on bytes of this repository's text with its layers under one
recipe, from equal weights and in equal order for every optimizer. Parameters are float32 under bf16
autocast; with `--dtype bf16` they are bf16, where torchao rounds stochastically and Transformer
Engine keeps float32 masters among its states. A step
is forward, backward, clipping, the optimizer and mf.step. Blocks are compiled. The row `AdamW
foreach` has the arithmetic of the first row in another order of rounding: by how much their losses
differ says what is noise.

    loss       of the last TAIL steps, mean, in nats a byte
    bytes      of states, a parameter: what the first step allocates and keeps
    peak       GiB of a step after the first ones
    step, opt  ms, median of steps after the first ones: a whole step, and the optimizer's alone

Afterwards each optimizer trains a small layer as it stands: in bf16, sharded by FSDP2 with the
gather as codes, saved and loaded by torch.distributed.checkpoint, on masters of quantized weights,
and on quantized weights themselves (_moment_cases.py). A run that would begin after
--limit seconds is left out, and named.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
from _measure import product_dtype
from _moment_cases import OPTIMIZERS, Options, run_cases, state_bytes
from torch import Tensor, nn

from tests.support.llama import Llama, ModelConfig, cross_entropy, init_weights

BYTES = 256  # the vocabulary
SIZES, TINY = "1024,11,16,4,2752", "64,2,4,2,128"
RATE, WARM_UP, CLIP = 1e-3, 50, 1.0
TAIL, FIRST = 50, 20  # steps of the mean loss; steps before the timed ones
OPTIONS = Options(lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)


def text_bytes(count: int) -> Tensor:
    """Returns the first bytes of the repository's pages and sources: (count,) uint8."""
    folders = ("docs", "python", "src", "research", "include", "torch", "tests")
    text = bytearray()
    for folder in folders:
        for path in sorted((timing.ROOT / folder).rglob("*")):
            if path.suffix in (".md", ".py", ".cu", ".cuh", ".cpp", ".h") and len(text) < count:
                text += path.read_bytes()
    return torch.frombuffer(text[:count], dtype=torch.uint8)


class Run:
    """One optimizer, on a model that all runs of a recipe share.

    start: the model's first weights and training state, which has the draws of stochastic rounding
    """

    def __init__(
        self, args: argparse.Namespace, model: Llama, name: str, start: tuple[Any, Any]
    ) -> None:
        self.args, self.model, self.name = args, model, name
        self.device = torch.device(args.device)
        model.load_state_dict(start[0])
        mf.step(model)
        mf.load_training_state(model, copy.deepcopy(start[1]))
        self.optimizer = OPTIMIZERS[name](list(model.parameters()), OPTIONS)
        self.losses: list[Tensor] = []
        self.step_ms: list[float] = []
        self.optimizer_ms: list[float] = []
        self.kept = 0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return 1e3 * time.perf_counter()

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0

    def set_rate(self, step: int) -> None:
        """Sets the learning rate of a step, from 1. torchao's is a tensor."""
        rate = RATE * min(1.0, step / WARM_UP)
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def train_step(self, step: int, tokens: Tensor) -> None:
        start = self.now()
        self.set_rate(step)
        kind = self.device.type
        with torch.autocast(kind, product_dtype(kind), enabled=self.args.dtype == "fp32"):
            loss = cross_entropy(self.model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        before, allocated = self.now(), self.allocated()
        self.optimizer.step()
        after = self.now()
        if step == 1:
            self.kept = self.allocated() - allocated
        self.optimizer.zero_grad(set_to_none=True)
        mf.step(self.model)
        self.losses.append(loss.detach())
        if step > FIRST or self.args.tiny:
            self.optimizer_ms.append(after - before)
            self.step_ms.append(self.now() - start)

    def row(self, recipe: str, batches: Iterator[Tensor]) -> dict[str, Any]:
        """Trains all steps; returns what the table shows."""
        is_cuda = self.device.type == "cuda"
        for step, tokens in enumerate(batches, start=1):
            if is_cuda and step == FIRST:
                torch.cuda.reset_peak_memory_stats()
            self.train_step(step, tokens.to(self.device).long())
        losses = torch.stack(self.losses).tolist()
        count = sum(p.numel() for p in self.model.parameters())
        counted = state_bytes(self.optimizer) / count
        return {
            "recipe": recipe,
            "optimizer": self.name,
            "loss": round(mean(losses[-TAIL:]), 4),
            "bytes": round(self.kept / count if is_cuda else counted, 3),
            "counted_bytes": round(counted, 3),
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if is_cuda else None,
            "step_ms": round(median(self.step_ms), 2),
            "optimizer_ms": round(median(self.optimizer_ms), 2),
            "losses": [round(loss, 4) for loss in losses],
        }


def batches_of(args: argparse.Namespace) -> Iterator[Tensor]:
    """Yields (batch, seq + 1) bytes for each step; every window is read once, in one order."""
    seq, count = args.seq, args.steps * args.batch
    windows = text_bytes(count * seq + 1).unfold(0, seq + 1, seq)
    if len(windows) < count:
        raise SystemExit(f"text: expected {count} windows of {seq} bytes, got {len(windows)}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    yield from windows[order].view(args.steps, args.batch, seq + 1)


def trained(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows, begin = [], time.perf_counter()
    for recipe in args.recipes.split(","):
        config = ModelConfig.parse(TINY if args.tiny else SIZES, BYTES)
        model = Llama(config, args.seq)
        init_weights(model, seed=1)  # on the CPU
        model.to(args.device, torch.bfloat16 if args.dtype == "bf16" else torch.float32)
        mf.quantize_(model, recipe, data_parallel_rank=0)
        for layer in model.layers if not args.tiny else ():
            layer.compile()
        start = copy.deepcopy((model.state_dict(), mf.training_state(model)))
        for name in args.optimizers.split(","):
            if time.perf_counter() - begin > args.limit:
                print(f"{recipe}, {name}: not run, --limit is over", flush=True)
                continue
            try:
                row = Run(args, model, name, start).row(recipe, batches_of(args))
            except ImportError as error:
                print(f"{recipe}, {name}: not run, {error}", flush=True)
                continue
            rows.append(row)
            model.zero_grad(set_to_none=True)
            gc.collect()
            print(*(f"{key} {row[key]}" for key in row if key != "losses"), flush=True)
    return rows


def print_table(rows: list[dict[str, Any]], cases: list[dict[str, str]]) -> None:
    print("\n| recipe | optimizer | loss | state bytes | peak GiB | step ms | optimizer ms |")
    print("|---|---|---|---|---|---|---|")
    keys = ("recipe", "optimizer", "loss", "bytes", "peak_gib", "step_ms", "optimizer_ms")
    for row in rows:
        print("|", " | ".join(str(row[key]) for key in keys), "|")
    print()
    for case in cases:
        print(f"{case['optimizer']:18} {case['case']:28} {case['result']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=timing.ROOT / "build" / "gpu_moments.json")
    parser.add_argument("--tiny", action="store_true", help="on a CPU: to try the script")
    parser.add_argument("--recipes", default="fp8_tensorwise,nvfp4")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of parameters")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--limit", type=float, default=60, help="seconds until the last run begins")
    args = parser.parse_args()
    args.device = "cpu" if args.tiny else "cuda"
    if args.tiny:
        args.steps, args.batch, args.seq, args.limit = 4, 2, 32, 1e9
        torch.compiler.set_stance("force_eager")  # torchao's update, minutes on a CPU
    device = timing.require_device(args.device)
    timing.compile_each_shape()
    torch.set_float32_matmul_precision("high")
    begin = time.perf_counter()
    rows = trained(args)
    cases = run_cases(args.optimizers.split(","), device)
    timing.write_json(args.out, device, dtype=args.dtype, rows=rows, cases=cases)
    print_table(rows, cases)
    print(f"\n{timing.device_name(device)}, {time.perf_counter() - begin:.0f} s, {args.out}")


if __name__ == "__main__":
    main()
