"""FSDP2 with weights gathered as codes, against bf16 and torchao (where installed) in one run.

The model is Llama blocks on several GPUs of one host.

    torchrun --nproc-per-node 4 benchmarks/gpu_fsdp.py [--seq 2048,8192] [--recipes …] [--eager]
    python benchmarks/gpu_fsdp.py --alone 4    # one rank of four on one GPU: nothing is sent

`--graph` captures the step in one CUDA graph by mf.GraphedStep, and times its replays. A recipe
`NAME wire=SPEC` sends gradients by quantize_gradients_(model, SPEC), not with --alone.

    work    8 blocks of Llama 3 8B's sizes, without rotary embedding and head; fp32 parameters, bf16
            compute, fp32 reduction; blocks compiled and sharded; forward, backward, fused AdamW,
            mf.step; one sequence a GPU. wk and wv stay in bf16: they are small. With --width 1024
            and --seq 256 the host never waits, so that its column is its own time.
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
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # read when torch is imported

import _gpu_timing as timing  # first: it makes minifloat importable
import _ranks as ranks
import minifloat as mf
import torch
import torch.distributed as dist
from _parity_wire import WIRE
from _peers import TORCHAO, convert_by_torchao, installed
from gpu_blocks import Block
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

BLOCKS, WIDTH = 8, 4096
IN_BF16 = ["wk", "wv"]
RECIPES = ["bf16", "fp8_tensorwise", "fp8_delayed", "fp8_rowwise", "fp8_blockwise"]
RECIPES += ["mxfp4", "nvfp4_pow2", "mxfp8", "nvfp4"]
TORCHAO_RECIPE = "torchao_tensorwise"  # with its own all-gather in FP8
BARS = {  # least speed against bf16
    2048: {"fp8_tensorwise": 1.26, "fp8_delayed": 1.26, "fp8_rowwise": 1.20},
    8192: {"fp8_tensorwise": 1.40, "fp8_delayed": 1.40, "fp8_rowwise": 1.35}
    | {"fp8_blockwise": 1.27, "mxfp4": 1.30, "nvfp4_pow2": 1.30},
}
WARM_STEPS, STEPS = 10, 24
DELAY_S, DELAYED_STEPS = 0.12, 4
CLOCK_HZ = 1.7e9  # about a GPU's clock; the delay may be longer


@dataclass(frozen=True)
class Setting:
    device: torch.device
    width: int = WIDTH
    compiled: bool = True
    graph: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of mf.quantize_


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


def sizes_of(width: int) -> tuple[int, int, int, int]:
    """Returns the sizes of a block: width, heads, heads of keys, hidden."""
    return width, width // 128, width // 512, 7 * width // 2


def build(entry: str, setting: Setting) -> nn.Sequential:
    recipe, _, wire = entry.partition(WIRE)
    torch.manual_seed(0)
    with setting.device:
        model = nn.Sequential(*(Block(*sizes_of(setting.width)) for _ in range(BLOCKS)))
    if recipe == TORCHAO_RECIPE:
        convert_by_torchao(model, "tensorwise", has_fp8, enable_fsdp_float8_all_gather=True)
    elif recipe != "bf16":
        mf.quantize_(model, recipe, filter_fqns=IN_BF16, **setting.options)
    if setting.compiled:
        for layer in model:
            layer.compile()
    shard(model)
    if wire:
        mf.distributed.quantize_gradients_(model, wire)
    return model


def shard(model: nn.Sequential) -> nn.Sequential:
    """Shards each block by FSDP2: bf16 compute, float32 reduction."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def has_fp8(module: nn.Module, name: str) -> bool:
    """Tells torchao which layers to convert."""
    return isinstance(module, nn.Linear) and name.split(".")[-1] not in IN_BF16


def after_step(recipe: str) -> Callable[[nn.Module], None] | None:
    """Returns what the recipe's library does once a step."""
    if recipe == TORCHAO_RECIPE:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        return precompute_float8_dynamic_scale_for_fsdp
    return None if recipe.partition(WIRE)[0] == "bf16" else mf.step


def step_ms(
    model: nn.Module, recipe: str, seq: int, setting: Setting
) -> tuple[float, float, float]:
    """Times a step: whole and the host's calls, of the slowest rank; this rank's device alone."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=setting.graph)
    device = setting.device
    x = torch.randn(1, seq, setting.width, device=device, dtype=torch.bfloat16)
    finish = after_step(recipe)

    def step() -> None:
        model(x).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if finish is not None:
            finish(model)

    run: Callable[[], object] = step
    if setting.graph:
        run = mf.GraphedStep(step, model, optimizer, warm_ups=WARM_STEPS)
    for _ in range(WARM_STEPS):
        run()
    torch.cuda.reset_peak_memory_stats()
    if setting.graph:
        torch.cuda.empty_cache()  # of the uncaptured steps: a graph has memory of its own
        run()  # captures the step
    whole, host = [], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        called = time.perf_counter() - start
        torch.cuda.synchronize()
        whole.append(ranks.slowest(time.perf_counter() - start, device))
        host.append(ranks.slowest(called, device))
    return 1e3 * statistics.median(whole), 1e3 * statistics.median(host), device_ms(run)


def device_ms(step: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(DELAYED_STEPS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(int(DELAY_S * CLOCK_HZ))
        times += timing.event_ms(step, 1)
    return min(times)


def measure(seq: int, recipes: list[str], setting: Setting) -> list[Row]:
    rows: list[Row] = []
    for recipe in recipes:
        if setting.compiled:
            timing.compile_each_shape()
        torch.cuda.empty_cache()
        model = build(recipe, setting)
        ms, host, alone = step_ms(model, recipe, seq, setting)
        base = rows[0].ms if rows else ms
        peak = torch.cuda.max_memory_allocated() / 2**30
        bar = BARS.get(seq, {}).get(recipe) if setting.width == WIDTH else None
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
    peers = [TORCHAO_RECIPE] if installed(TORCHAO) else []
    parser.add_argument("--recipes", default=",".join(RECIPES + peers), help="bf16 first")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--graph", action="store_true", help="the step in a CUDA graph")
    parser.add_argument("--recompute", help="mf.quantize_(…, recompute=…)")
    parser.add_argument("--fuse", action="store_true", help="fuse casts into what comes before")
    parser.add_argument("--width", type=int, default=WIDTH, help="of a block: a multiple of 512")
    parser.add_argument("--alone", type=int, help="the ranks of which this process is one")
    options = parser.parse_args()
    if options.device != "cuda":
        parser.error(f"--device: expected cuda, got {options.device}")
    if options.width < 512 or options.width % 512 != 0:
        parser.error(f"--width: expected a multiple of 512, got {options.width}")
    device = timing.require_device("cuda")
    if options.alone:
        ranks.alone(options.alone)
        print(f"one rank of {options.alone} on {timing.device_name(device)}: nothing is sent")
    else:
        device = ranks.join("cuda")
    gather = None if options.alone else ranks.all_gather_gb_s(device)
    of_quantize = {"recompute": options.recompute, "fuse": options.fuse}
    setting = Setting(device, options.width, not options.eager, options.graph, of_quantize)
    rows = []
    for seq in (int(n) for n in options.seq.split(",")):
        rows += measure(seq, options.recipes.split(","), setting)
    if dist.get_rank() == 0:
        content = {"ranks": dist.get_world_size(), "is_alone": bool(options.alone)}
        content |= {"width": options.width, "graph": options.graph}
        content |= {"all_gather_gb_s": gather, **of_quantize}
        content["rows"] = [asdict(r) for r in rows]
        timing.write_json(options.out, device, **content)
    mf.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
