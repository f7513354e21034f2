"""The ranks of a benchmark over several GPUs of one host, and what their wires can carry.

join("cuda")       a rank of torchrun's job, with a GPU of its own where there are enough. Ranks
                   on one GPU compute the same bytes and need the same memory each; their times
                   are no figures
alone(4)           one rank of four, without the others: shows its work, its memory and the host's
                   time. An all-gather copies this rank's part to every place, a reduce-scatter
                   keeps this rank's part, and nothing is sent
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support import worlds

GATHER_MIB = 256  # of each rank
SENT_MIB = 64  # of each rank, in an all-to-all


def join(kind: str) -> torch.device:
    """Joins the process group of torchrun's job; returns this rank's device."""
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"{Path(sys.argv[0]).name}: expected torchrun, found no LOCAL_RANK")
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    device = worlds.take_device(rank, size, kind)
    gpus = torch.cuda.device_count()
    if kind == "cuda" and size > gpus and rank == 0:
        print(f"ranks share {gpus} of CUDA's devices: the times are no figures", flush=True)
    dist.init_process_group(worlds.BACKENDS[kind])
    return device


def alone(ranks: int) -> None:
    """Starts a process group in which this process is the only one of several ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    dist.all_gather_into_tensor = copying_gather(dist.all_gather_into_tensor)
    dist.reduce_scatter_tensor = keeping_reduction(dist.reduce_scatter_tensor)


def copying_gather(gather: Callable[..., Any]) -> Callable[..., Any]:
    def call(output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = gather(output_tensor, input_tensor, *args, **kwargs)
        for part in output_tensor.view(dist.get_world_size(), -1):
            if part.data_ptr() != input_tensor.data_ptr():
                part.copy_(input_tensor.view(-1))
        return work

    return call


def keeping_reduction(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def call(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = reduce(output, input, *args, **kwargs)
        output.view(-1).copy_(input.view(dist.get_world_size(), -1)[dist.get_rank()])
        return work

    return call


# ---- Ceilings, which rank 0 prints ---------------------------------------------------------------


def all_gather_gb_s(device: torch.device) -> float:
    """Measures an all-gather: GB that a GPU receives from others a second."""
    ranks, size = dist.get_world_size(), GATHER_MIB << 20
    sent = torch.empty(size, dtype=torch.uint8, device=device)
    received = torch.empty(size * ranks, dtype=torch.uint8, device=device)
    ms = median_ms(lambda: dist.all_gather_into_tensor(received, sent))
    return printed(f"all-gather of {GATHER_MIB} MiB", size * (ranks - 1) / ms / 1e6, device)


def all_to_all_gb_s(device: torch.device) -> float:
    """Measures an all-to-all: GB that a GPU receives from others a second."""
    ranks, size = dist.get_world_size(), SENT_MIB << 20
    sent = torch.empty(size, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    ms = median_ms(lambda: dist.all_to_all_single(received, sent))
    return printed(f"all-to-all of {SENT_MIB} MiB", size * (ranks - 1) / ranks / ms / 1e6, device)


def median_ms(call: Callable[[], object]) -> float:
    return statistics.median(timing.event_ms(call, 12)[2:])


def printed(what: str, rate: float, device: torch.device) -> float:
    if dist.get_rank() == 0:
        name = timing.device_name(device)
        print(f"{dist.get_world_size()} ranks, {name}, torch {torch.__version__}")
        print(f"{what} a rank: {rate:.0f} GB/s a rank", flush=True)
    return rate


def slowest(value: float, device: torch.device) -> float:
    worst = torch.tensor(value, device=device)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)
