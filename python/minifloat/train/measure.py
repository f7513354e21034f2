"""What the report measures besides the loss: the speed of light, saved bytes, peak memory.

Speed of light: the seconds that the matrix products of one training step would take on their own,
at the bf16 rate that this device reaches on this model's shapes, measured when the job starts.

    linear y = x Wt    three products of 2 M N K operations: fprop, dgrad, wgrad
    attention          two products of 2 B H S S E operations (causal: half), backward twice that
"""

from __future__ import annotations

import ctypes
import gc
import resource
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from .config import TrainConfig
from .model import Llama, cross_entropy


def best_seconds(work: Callable[[], object], device: str, repeats: int = 10) -> float:
    """The fastest of a few calls, after one to warm up."""
    if device == "cuda":
        return best_cuda_seconds(work, repeats)
    best = float("inf")
    for attempt in range(repeats + 1):
        start = time.perf_counter()
        work()
        if attempt:
            best = min(best, time.perf_counter() - start)
    return best


def best_cuda_seconds(work: Callable[[], object], repeats: int, calls: int = 16) -> float:
    """The same of one call among many in a graph: the host's time for a launch is not counted."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for attempt in range(repeats + 1):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if attempt:
            best = min(best, begin.elapsed_time(end) / 1e3 / calls)
    return best


@dataclass
class SpeedOfLight:
    """seconds: of all products of one step; flops: their operations a step."""

    seconds: float
    flops: float

    def improve(self, other: SpeedOfLight) -> None:
        """Keeps the faster of two measurements of the same products."""
        self.seconds = min(self.seconds, other.seconds)

    @property
    def gflops_per_s(self) -> float:
        return self.flops / self.seconds / 1e9


def measure_speed_of_light(config: TrainConfig) -> SpeedOfLight:
    """Times fprop, dgrad and wgrad of every distinct linear shape in bf16; see the file's head."""
    with torch.device("meta"):
        model = Llama(config.model, config.seq)
    shapes = Counter(
        (m.out_features, m.in_features) for m in model.modules() if isinstance(m, nn.Linear)
    )
    tokens, device = config.tokens_per_step, config.device
    seconds = flops = 0.0
    for (n, k), count in shapes.items():
        x_MK = torch.randn(tokens, k, device=device).bfloat16()
        g_MN = torch.randn(tokens, n, device=device).bfloat16()
        w_NK = torch.randn(n, k, device=device).bfloat16()
        seconds += count * best_seconds(lambda x=x_MK, w=w_NK: x @ w.t(), device)  # type: ignore[misc]
        seconds += count * best_seconds(lambda g=g_MN, w=w_NK: g @ w, device)  # type: ignore[misc]
        seconds += count * best_seconds(lambda g=g_MN, x=x_MK: g.t() @ x, device)  # type: ignore[misc]
        flops += count * 3 * 2.0 * tokens * n * k
    attention = config.model.layers * 3 * 2.0 * tokens * config.seq * config.model.dim
    return SpeedOfLight(seconds * (1 + attention / flops), flops + attention)


@dataclass(frozen=True)
class SavedBytes:
    """Bytes a token that a forward keeps for its backward: by everything, and by the linears."""

    total: float
    linears: float


def saved_bytes_per_token(
    model: nn.Module, config: TrainConfig, forward: Callable[[Tensor, Tensor], Tensor]
) -> SavedBytes:
    """Counts the distinct storages that autograd saves, parameters and buffers left out.

    Two batch sizes are measured and their difference taken, so what does not grow with the tokens
    (copies of weights, their codes) is not counted.
    """
    small = max(1, config.batch // 2)
    total_1, linears_1 = saved_bytes(model, config, forward, small)
    total_2, linears_2 = saved_bytes(model, config, forward, 2 * small)
    tokens = small * config.seq
    return SavedBytes((total_2 - total_1) / tokens, (linears_2 - linears_1) / tokens)


def saved_bytes(
    model: nn.Module,
    config: TrainConfig,
    forward: Callable[[Tensor, Tensor], Tensor],
    batch: int,
) -> tuple[int, int]:
    """(bytes saved by one forward of `batch` sequences, those saved inside linear layers)."""
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}  # storage address -> bytes; autograd keeps the storages alive
    in_linear: dict[int, int] = {}
    depth = 0

    def enter(*_: object) -> None:
        nonlocal depth
        depth += 1

    def leave(*_: object) -> None:
        nonlocal depth
        depth -= 1

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            kept[storage.data_ptr()] = storage.nbytes()
            if depth:
                in_linear[storage.data_ptr()] = storage.nbytes()
        return tensor

    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    hooks = [m.register_forward_pre_hook(enter) for m in linears]
    hooks += [m.register_forward_hook(leave) for m in linears]
    generator = torch.Generator().manual_seed(0)
    size = (batch, config.seq)
    ids = torch.randint(0, config.model.vocab, size, generator=generator).to(config.device)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward(ids, ids)
    for hook in hooks:
        hook.remove()
    del loss
    return sum(kept.values()), sum(in_linear.values())


def loss_under_autocast(model: nn.Module, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """(inputs, targets) -> loss, the products under bf16 autocast, the loss in fp32."""

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            logits = model(inputs)
        return cross_entropy(logits, targets)

    return forward


class PeakMemory:
    """Peak bytes since `start`. GPU: of all tensors together; CPU: resident memory added to the
    process, so interpreter and libraries are not counted."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.base = 0

    def start(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        except OSError:
            pass  # not Linux: the peak is then that of the whole process so far
        self.base = status_bytes("VmRSS")

    def bytes(self) -> int:
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        peak = status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return max(peak - self.base, 0)


def status_bytes(key: str) -> int:
    """A field of /proc/self/status in bytes; 0 where there is none."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(key + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0
