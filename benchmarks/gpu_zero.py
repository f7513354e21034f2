"""ZeRO-3 with sharded masters beside FSDP2, in one run: time, memory, and whether bits are equal.

torchrun --nproc-per-node 2 benchmarks/gpu_zero.py [--recipes …] [--steps 100] [--eager]
torchrun --nproc-per-node 2 benchmarks/gpu_zero.py --device cpu    # tiny, to try the script

model   5 blocks of Llama 3 8B's sizes, 1.1B parameters, without rotary embedding and head; bf16
        compute, float32 masters and reduction; blocks compiled; forward, backward, fused AdamW.
        wk and wv stay in bf16
FSDP2   mf.quantize_: each gather casts this rank's shards, and moves codes
ZeRO-3  examples/train_zero3.py: codes are cast once a step, for all blocks, and gathered for
        each block's forward and backward
equal   the losses of all steps, and this rank's shards of all masters after the last, under torch's
        deterministic algorithms: without them FSDP2 differs from itself, by attention's backward
time    median of a step by the host's clock after the first tenth, of the slowest rank
peak    memory of rank 0, allocated
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # read when torch is imported

import _gpu_timing as timing  # first: it makes minifloat importable
import _ranks as ranks
import gpu_fsdp as fsdp
import minifloat as mf
import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor, nn

sys.path.append(str(timing.ROOT / "examples"))
from train_zero3 import Block, Zero3

BLOCKS, STEPS, RATE = 5, 100, 1e-4
RECIPES = "fp8_tensorwise,fp8_rowwise,nvfp4"
FULL: dict[str, Any] = {"blocks": BLOCKS, "tokens": 4096, "sizes": fsdp.sizes_of(fsdp.WIDTH)}
TINY: dict[str, Any] = {"blocks": 3, "tokens": 32, "sizes": (64, 4, 2, 192)}


@dataclass
class Row:
    engine: str
    recipe: str
    ms: float
    peak_gib: float
    first_loss: float
    last_loss: float
    is_equal: bool | None  # to FSDP2's losses and masters, on all ranks


@dataclass
class Training:
    """A model, what an optimizer updates, and what follows the optimizer's step."""

    model: nn.Module
    parameters: list[Tensor]
    finish: Callable[[], None]

    def shards(self) -> list[Tensor]:
        """Returns copies of this rank's float32 shards, in the host's memory."""
        found = [getattr(p, "_local_tensor", p).detach() for p in self.parameters]
        return [shard.cpu() for shard in found]


@dataclass(frozen=True)
class Setting:
    device: torch.device
    steps: int
    blocks: int
    tokens: int
    sizes: tuple[int, ...]
    backend: str  # of torch.compile; "": eager

    def new_blocks(self) -> nn.Sequential:
        torch.manual_seed(0)
        with self.device:
            return nn.Sequential(*(Block(*self.sizes) for _ in range(self.blocks)))

    def compile(self, blocks: nn.Module) -> None:
        if self.backend:
            for block in blocks.children():
                block.compile(backend=self.backend)

    def batch(self, step: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(1000 * step + dist.get_rank())
        shape = (1, self.tokens, self.sizes[0])
        return torch.randn(shape, generator=generator, device=self.device).bfloat16()


def with_fsdp(setting: Setting, recipe: str) -> Training:
    model = setting.new_blocks()
    mf.quantize_(model, recipe, filter_fqns=fsdp.IN_BF16)
    setting.compile(model)
    fsdp.shard(model)
    return Training(model, list(model.parameters()), lambda: mf.step(model))


def with_zero3(setting: Setting, recipe: str) -> Training:
    model = Zero3(setting.new_blocks(), recipe, filter_fqns=fsdp.IN_BF16)
    setting.compile(model)

    def finish() -> None:
        mf.step(model)
        model.cast()

    return Training(model, model.master_shards(), finish)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(step: Callable[[], Tensor], setting: Setting) -> tuple[Tensor, float]:
    """Returns a step's loss, and its time on the slowest rank."""
    synchronize(setting.device)
    dist.barrier()
    synchronize(setting.device)
    start = time.perf_counter()
    loss = step()
    synchronize(setting.device)
    return loss, ranks.slowest(time.perf_counter() - start, setting.device)


def train(training: Training, setting: Setting) -> tuple[list[float], list[float]]:
    """Returns the losses of all steps on this rank, and their milliseconds."""
    optimizer = torch.optim.AdamW(training.parameters, lr=RATE, fused=True)
    losses, times = [], []
    for number in range(setting.steps):
        x = setting.batch(number)

        def step(x: Tensor = x) -> Tensor:
            loss = (training.model(x) - x.flip(1)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            training.finish()
            return loss.detach()

        loss, seconds = seconds_of(step, setting)
        losses.append(loss.item())
        times.append(1e3 * seconds)
    return losses, times


def all_true(value: bool, device: torch.device) -> bool:
    found = torch.tensor(int(value), device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found)


def measure(setting: Setting, recipe: str) -> list[Row]:
    """Trains by both engines; compares losses and masters."""
    rows: list[Row] = []
    want: tuple[list[float], list[Tensor]] | None = None
    for engine, build in (("FSDP2", with_fsdp), ("ZeRO-3", with_zero3)):
        timing.compile_each_shape()
        training = build(setting, recipe)
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        losses, times = train(training, setting)
        peak = 0.0
        if setting.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated() / 2**30
        found = losses, training.shards()
        is_equal = None
        if want is not None:
            pairs = zip(found[1], want[1], strict=True)
            same = losses == want[0] and all(torch.equal(a, b) for a, b in pairs)
            is_equal = all_true(same, setting.device)
        want = found
        ms = statistics.median(times[setting.steps // 10 :])
        rows.append(Row(engine, recipe, ms, peak, losses[0], losses[-1], is_equal))
        if dist.get_rank() == 0:
            print_row(rows[-1])
        del training
        gc.collect()
    return rows


def print_row(row: Row) -> None:
    equal = "" if row.is_equal is None else f"  equal to FSDP2: {row.is_equal}"
    print(
        f"{row.recipe:16} {row.engine:7} {row.ms:8.1f} ms  peak {row.peak_gib:5.1f} GiB  "
        f"loss {row.first_loss:.4f} -> {row.last_loss:.4f}{equal}",
        flush=True,
    )


def main() -> int:
    parser = timing.arguments(__doc__, "gpu_zero.json")
    parser.add_argument("--recipes", default=RECIPES, help="%(default)s")
    parser.add_argument("--steps", type=int, default=None, help=f"{STEPS}; on a CPU 4")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # which would be timed
    device = ranks.join(timing.require_device(options.device).type)
    is_tiny = device.type == "cpu"
    backend = "aot_eager" if is_tiny else "inductor"
    setting = Setting(
        device,
        options.steps or (4 if is_tiny else STEPS),
        backend="" if options.eager else backend,
        **(TINY if is_tiny else FULL),
    )
    gather = None if is_tiny else ranks.all_gather_gb_s(device)
    rows = [row for recipe in options.recipes.split(",") for row in measure(setting, recipe)]
    if dist.get_rank() == 0:
        content = {"ranks": dist.get_world_size(), "all_gather_gb_s": gather}
        content["rows"] = [asdict(r) for r in rows]
        timing.write_json(options.out, device, **content)
    mf.distributed.destroy_process_group()
    return 0 if all(row.is_equal is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
