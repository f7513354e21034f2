"""FSDP2 with weights gathered as codes, against bf16 and torchao (where installed) in one run.

The model is Llama blocks on several GPUs of one host.

    torchrun --nproc-per-node 4 benchmarks/gpu_fsdp.py [--seq 2048,8192] [--recipes …] [--eager]

    work    8 blocks of Llama 3 8B's sizes, without rotary embedding and head; fp32 parameters, bf16
            compute, fp32 reduction; blocks compiled and sharded; forward, backward, fused AdamW,
            mf.step; one sequence a GPU. wk and wv stay in bf16: they are small.
    time    median of a step by the host's clock, of the slowest rank. With few tokens the step
            waits for the host. So the compiler runs in this process only (idle workers would wake
            now and then), and steps are many
    host    until the step's calls have returned, of the slowest rank: what the host needs, where
            the GPU does not keep it waiting
    device  a step after a delay on the GPU, so that the host is ahead: the GPU's time
    peak    memory of rank 0, allocated
"""

from __future__ import annotations

import gc
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # read when torch is imported

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from train_zero3 import Block

BLOCKS, DIM, HEADS, KV_HEADS, FFN = 8, 4096, 32, 8, 14336
SIZES = (DIM, HEADS, KV_HEADS, FFN)
IN_BF16 = ["wk", "wv"]
RECIPES = ["bf16", "fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_blockwise"]
RECIPES += ["mxfp4", "nvfp4_pow2", "mxfp8", "nvfp4"]
TORCHAO = "torchao_tensorwise"  # with its own all-gather in FP8
BARS = {  # least speed against bf16
    2048: {"fp8_tensorwise": 1.26, "fp8_delayed": 1.26, "fp8_rowwise": 1.20},
    8192: {"fp8_tensorwise": 1.40, "fp8_delayed": 1.40, "fp8_rowwise": 1.35}
    | {"fp8_blockwise": 1.27, "mxfp4": 1.30, "nvfp4_pow2": 1.30},
}
WARM_STEPS, STEPS = 10, 24
DELAY_S, DELAYED_STEPS = 0.12, 4
CLOCK_HZ = 1.7e9  # about a GPU's clock; the delay may be longer
GATHER_MIB = 256  # of each rank, for the ceiling


@dataclass
class Row:
    recipe: str
    seq: int
    ms: float
    host_ms: float
    device_ms: float
    speed: float
    bar: float | None
    tokens_per_s: float  # a GPU
    peak_gib: float


def build(recipe: str, device: torch.device, *, compiled: bool) -> nn.Sequential:
    torch.manual_seed(0)
    with device:
        model = nn.Sequential(*(Block(*SIZES) for _ in range(BLOCKS)))
    if recipe == TORCHAO:
        convert_by_torchao(model)
    elif recipe != "bf16":
        mf.quantize_(model, recipe, filter_fqns=IN_BF16, verbose=False)
    if compiled:
        for layer in model:
            layer.compile()
    return shard(model)


def shard(model: nn.Sequential) -> nn.Sequential:
    """Shards each block by FSDP2: bf16 compute, float32 reduction."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def convert_by_torchao(model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_quantized(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name.split(".")[-1] not in IN_BF16

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(model, config=config, module_filter_fn=is_quantized)


def after_step(recipe: str) -> Callable[[nn.Module], None] | None:
    """Returns what the recipe's library does once a step."""
    if recipe == TORCHAO:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        return precompute_float8_dynamic_scale_for_fsdp
    return None if recipe == "bf16" else mf.step


def all_gather_gb_s(device: torch.device) -> float:
    """Measures an all-gather: GB that a GPU receives a second."""
    ranks, size = dist.get_world_size(), GATHER_MIB << 20
    sent = torch.empty(size, dtype=torch.uint8, device=device)
    received = torch.empty(size * ranks, dtype=torch.uint8, device=device)
    times = timing.event_ms(lambda: dist.all_gather_into_tensor(received, sent), 12)
    return size * (ranks - 1) / statistics.median(times[2:]) / 1e6


def slowest(seconds: float, device: torch.device) -> float:
    worst = torch.tensor(seconds, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def step_ms(
    model: nn.Module, recipe: str, seq: int, device: torch.device
) -> tuple[float, float, float]:
    """Times a step: whole and the host's calls, of the slowest rank; this rank's device alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.randn(1, seq, DIM, device=device, dtype=torch.bfloat16)
    finish = after_step(recipe)

    def step() -> None:
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if finish is not None:
            finish(model)

    for _ in range(WARM_STEPS):
        step()
    torch.cuda.reset_peak_memory_stats()
    whole, host = [], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        called = time.perf_counter() - start
        torch.cuda.synchronize()
        whole.append(slowest(time.perf_counter() - start, device))
        host.append(slowest(called, device))
    return 1e3 * statistics.median(whole), 1e3 * statistics.median(host), device_ms(step)


def device_ms(step: Callable[[], None]) -> float:
    times: list[float] = []
    for _ in range(DELAYED_STEPS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(int(DELAY_S * CLOCK_HZ))
        times += timing.event_ms(step, 1)
    return min(times)


def measure(seq: int, recipes: list[str], device: torch.device, *, compiled: bool) -> list[Row]:
    rows: list[Row] = []
    for recipe in recipes:
        if compiled:
            timing.compile_each_shape()
        torch.cuda.empty_cache()
        model = build(recipe, device, compiled=compiled)
        ms, host, alone = step_ms(model, recipe, seq, device)
        base = rows[0].ms if rows else ms
        peak = torch.cuda.max_memory_allocated() / 2**30
        bar = BARS.get(seq, {}).get(recipe)
        rows.append(Row(recipe, seq, ms, host, alone, base / ms, bar, 1e3 * seq / ms, peak))
        del model
        gc.collect()
        if dist.get_rank() == 0:
            print_row(rows[-1])
    return rows


def print_row(row: Row) -> None:
    verdict = "" if row.bar is None else f"bar {row.bar:.2f}"
    if row.bar is not None and row.speed < row.bar:
        verdict += ", missed"
    print(
        f"seq {row.seq:5} {row.recipe:16} {row.ms:8.1f} ms  {row.speed:5.2f} of bf16  "
        f"host {row.host_ms:6.1f} ms  device {row.device_ms:6.1f} ms  "
        f"{row.tokens_per_s:7.0f} tokens/s a GPU  peak {row.peak_gib:5.1f} GiB  {verdict}",
        flush=True,
    )


def main() -> int:
    parser = timing.arguments(__doc__, "gpu_fsdp.json")
    parser.add_argument("--seq", default="2048,8192", help="sequence lengths")
    peers = [TORCHAO] if importlib.util.find_spec("torchao") else []
    parser.add_argument("--recipes", default=",".join(RECIPES + peers), help="bf16 first")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    dist.init_process_group("nccl")
    device = torch.device("cuda", dist.get_node_local_rank())
    torch.cuda.set_device(device)
    gather = all_gather_gb_s(device)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} x {timing.device_name(device)}, torch {torch.__version__}")
        print(f"all-gather of {GATHER_MIB} MiB a rank: {gather:.0f} GB/s a GPU", flush=True)
    rows = []
    for seq in (int(n) for n in options.seq.split(",")):
        rows += measure(seq, options.recipes.split(","), device, compiled=not options.eager)
    if dist.get_rank() == 0:
        ranks = dist.get_world_size()
        content = {"gpus": ranks, "all_gather_gb_s": gather, "rows": [asdict(r) for r in rows]}
        timing.write_json(options.out, device, **content)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
