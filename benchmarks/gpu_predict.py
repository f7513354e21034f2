"""The error of `minifloat doctor --model`: predicted steps beside measured ones.

    python benchmarks/gpu_predict.py           # 3 minutes on a GPU
    python benchmarks/gpu_predict.py --tiny    # on a CPU, to try the script

Each case is a number of Llama's blocks of one size, a batch, a recipe, eager or compiled. A step is
forward, backward, fused AdamW and mf.step. The prediction measures layers, casts, attention, a copy
and small blocks, and never runs the step. error = predicted / measured - 1. `speed` is bf16's time
over the recipe's, where bf16 ran as a case.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
from gpu_blocks import BF16, Block
from minifloat.doctor.meter import Meter
from minifloat.doctor.model_sizes import ModelSizes
from minifloat.doctor.predict import Job, predict
from torch import nn

STEPS, WARM_UP = 8, 3


def sizes(hidden: int, heads: int, kv_heads: int, ffn: int, layers: int) -> ModelSizes:
    return ModelSizes(hidden, ffn, layers, heads, kv_heads, hidden // heads, vocab=0)


LARGE = sizes(4096, 32, 8, 14336, layers=2)  # blocks of Llama3-8B
MIDDLE = sizes(2048, 16, 8, 8192, layers=4)  # of Llama3.2-1B, but for the heads
SMALL = sizes(1024, 16, 8, 3584, layers=8)
TINY = sizes(128, 2, 1, 256, layers=2)


@dataclass(frozen=True)
class Case:
    job: Job
    recipe: str


def cases_of(model: ModelSizes, tokens: int, seq: int, recipes: str, how: str) -> list[Case]:
    job = Job(model, tokens, seq, is_compiled=how == "compiled")
    return [Case(job, recipe) for recipe in recipes.split()]


CASES = [
    *cases_of(LARGE, 16384, 8192, "bf16 fp8_tensorwise mxfp4", "eager"),
    *cases_of(LARGE, 2048, 2048, "bf16 fp8_tensorwise", "eager"),
    *cases_of(MIDDLE, 8192, 4096, "fp8_rowwise nvfp4", "eager"),
    *cases_of(SMALL, 4096, 2048, "bf16 fp8_tensorwise", "eager"),
    *cases_of(LARGE, 16384, 8192, "bf16 fp8_tensorwise", "compiled"),
    *cases_of(LARGE, 2048, 2048, "fp8_tensorwise", "compiled"),
]


def measured_ms(case: Case, device: torch.device) -> float:
    """Trains the case's blocks for some steps, and returns the median ms of one."""
    job, model = case.job, case.job.model
    torch.compiler.reset()
    torch.manual_seed(0)
    shape = (model.hidden, model.heads, model.kv_heads, model.intermediate)
    net = nn.Sequential(*(Block(*shape) for _ in range(model.layers))).to(device, torch.bfloat16)
    if case.recipe != BF16:
        mf.quantize_(net, case.recipe)
    for block in net if job.is_compiled else ():
        block.compile()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=device.type == "cuda")
    batch = (job.tokens // job.seq, job.seq, model.hidden)
    x = torch.randn(batch, device=device, dtype=torch.bfloat16)

    def step() -> None:
        net(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if case.recipe != BF16:
            mf.step(net)

    for _ in range(WARM_UP):
        step()
    if device.type != "cuda":
        return timing.host_ms(step, 3)
    torch.cuda.synchronize()
    return median(timing.event_ms(step, STEPS))


def compare(case: Case, meter: Meter, device: torch.device) -> dict[str, Any]:
    """Predicts a case and measures it."""
    begin, job = time.perf_counter(), case.job
    row = predict(job, meter.measure(job, [case.recipe]))[-1]
    seconds = time.perf_counter() - begin
    ms = measured_ms(case, device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    model = job.model
    return {
        "blocks": f"{model.layers} of {model.hidden} x {model.intermediate}",
        "tokens": job.tokens,
        "how": "compiled" if job.is_compiled else "eager",
        **asdict(row),
        "speed": None,
        "device_ms": row.device,
        "measured": ms,
        "error": row.ms / ms - 1,
        "seconds_of_prediction": seconds,
        "seconds": time.perf_counter() - begin,
    }


def add_speeds(rows: list[dict[str, Any]]) -> None:
    """Fills in bf16's time over each recipe's, predicted and measured."""

    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["blocks"], row["tokens"], row["how"]

    base = {key(row): row for row in rows if row["recipe"] == BF16}
    for row in rows:
        bf16 = base.get(key(row))
        if bf16 is not None:
            row["speed"] = [bf16["ms"] / row["ms"], bf16["measured"] / row["measured"]]


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = (
        "blocks | tokens | how | recipe | predicted, ms | limit | measured, ms | error | speed"
    )
    print(f"| {columns} |\n|{9 * '---|'}")
    for row in rows:
        speed = "-" if row["speed"] is None else "{:.2f}, measured {:.2f}".format(*row["speed"])
        print(
            f"| {row['blocks']} | {row['tokens']} | {row['how']} | `{row['recipe']}` | "
            f"{row['ms']:.1f} | {row['limit']} | {row['measured']:.1f} | {row['error']:+.0%} | "
            f"{speed} |"
        )
    errors = [abs(row["error"]) for row in rows]
    print(f"error of {len(errors)} steps: median {median(errors):.0%}, largest {max(errors):.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    path = timing.ROOT / "build" / "gpu_predict.json"
    parser.add_argument("--out", type=Path, default=path, help="the JSON file")
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    arguments = parser.parse_args()
    device = torch.device("cpu") if arguments.tiny else timing.require_device("cuda")
    cases = CASES
    if arguments.tiny:
        jobs = [replace(case.job, model=TINY, tokens=256, seq=128) for case in CASES]
        cases = list(dict.fromkeys(Case(job, case.recipe) for job, case in zip(jobs, CASES)))
    meter, rows = Meter(device), []
    for case in cases:
        rows.append(compare(case, meter, device))
        row = rows[-1]
        print(
            f"{row['blocks']}, {row['tokens']} tokens, {row['how']}, {row['recipe']}: predicted "
            f"{row['ms']:.1f} ms (GEMMs {row['gemms']:.1f}, casts {row['casts']:.1f}, attention "
            f"{row['attention']:.1f}, memory {row['memory']:.1f}, host {row['host']:.1f}), "
            f"measured {row['measured']:.1f}; {row['seconds']:.0f} s",
            flush=True,
        )
        add_speeds(rows)
        timing.write_json(arguments.out, device, rows=rows)  # a run that is ended leaves these
    print_table(rows)


if __name__ == "__main__":
    main()
