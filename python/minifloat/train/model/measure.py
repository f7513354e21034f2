"""Measurements of the report besides the loss: speed of light, bytes, the load of experts.

Speed of light: the seconds that the matrix products of one training step take alone, at the rate
that this device reaches on this model's shapes, in bf16 or in what `product_dtype` says. It is
measured when the job starts and again between steps.

    linear y = x Wt    three products of 2 M N K operations: fprop, dgrad, wgrad
    experts            the same of the rows that tokens are sent to, timed as one dense product
    attention          two products of 2 B H S S E operations (causal: half), backward twice that

Load of experts: the largest number of tokens of an expert in a step, of all ranks, over the mean of
its layer; of the layer with the most. 1: even, the number of experts over top_k: all tokens in the
same experts. An expert is active where it had a token in the last LAST steps of a run.
"""

import ctypes
import gc
import math
import timeit
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...moe.layer import Experts
from ...moe.router import Router
from ..checks import COUNT, Json, kind
from ..config import TrainConfig
from .llama import Llama, cross_entropy

MEASURE_EVERY = 10  # steps between two measurements of the speed of light
LAST = 100  # steps at the end of a run whose tokens of each expert are recorded

Tokens = dict[str, list[int]]  # of each expert, by the name of the layer
COUNTS = kind("counts", lambda value: isinstance(value, list) and not any(map(COUNT, value)))
TOKENS = kind(
    "lists of counts by layer",
    lambda value: isinstance(value, dict) and not any(map(COUNTS, value.values())),
)


def product_dtype(device: str) -> torch.dtype:
    """Returns bf16, or fp32 on CPUs without a fast bf16 product (x86-64 without AVX-512).

    There torch's bf16 product takes 5 to 50 times as long as its fp32 product.
    """
    is_fast = device != "cpu" or (
        torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return torch.bfloat16 if is_fast else torch.float32


def describe_product_dtype(device: str) -> str:
    """Returns the dtype that `product_dtype` chose, as reports print it."""
    is_narrow = product_dtype(device) == torch.bfloat16
    return "bf16" if is_narrow else "fp32 (this CPU has no fast bf16 product)"


def best_seconds(work: Callable[[], object], device: str, repeats: int = 3) -> float:
    """Returns the time of the fastest of a few calls, after one that warms up."""
    work()
    if device == "cpu":
        return min(timeit.repeat(work, number=1, repeat=repeats))
    return min(cuda_seconds(work) for _ in range(repeats))


def cuda_seconds(work: Callable[[], object], calls: int = 16) -> float:
    """Returns the GPU's time of one call, as the mean of a few: an event takes 5 microseconds.

    The GPU first waits for about a millisecond, in which the host launches all calls. So the time
    of the launches is not counted.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # in clock cycles
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def products_of(model: nn.Module, tokens: int) -> Iterator[tuple[int, int, int]]:
    """Yields M, N, K of each product of a forward. Experts of a layer are one product."""
    top_k = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield tokens, module.out_features, module.in_features
        elif isinstance(module, Router):  # of the experts that follow
            top_k = module.top_k
            yield tokens, module.experts, module.dim
        elif isinstance(module, Experts):
            for name in module.weight_names:
                _, n, k = module.get_parameter(name).shape
                yield tokens * top_k, n, k


class SpeedOfLight:
    """The time of all products of one step; flops: their operations a step.

    seconds: of the latest measurement. The training loop measures again every MEASURE_EVERY steps,
    between two steps, so that other work on the machine slows both equally.
    """

    def __init__(self, config: TrainConfig) -> None:
        with torch.device("meta"):
            model = Llama(config.model, config.seq)
        self.device, tokens = config.device, config.batch * config.seq
        self.shapes = Counter(products_of(model, tokens))
        linears = 3 * 2.0 * sum(count * m * n * k for (m, n, k), count in self.shapes.items())
        attention = config.model.layers * 3 * 2.0 * tokens * config.seq * config.model.dim
        self.flops, self.linears = linears + attention, linears
        self.seconds = math.inf

    def measure(self) -> None:
        """Times fprop, dgrad and wgrad of every distinct shape."""
        largest = max(max(m * n, m * k, n * k) for m, n, k in self.shapes)
        generator = torch.Generator(self.device).manual_seed(0)  # not the generator of the job
        memory = torch.empty(largest, dtype=product_dtype(self.device), device=self.device)
        memory.normal_(generator=generator)
        seconds = 0.0
        for (m, n, k), count in self.shapes.items():
            x_MK = memory[: m * k].view(m, k)
            g_MN = memory[: m * n].view(m, n)
            w_NK = memory[: n * k].view(n, k)
            for a, b in ((x_MK, w_NK.t()), (g_MN, w_NK), (g_MN.t(), x_MK)):
                seconds += count * best_seconds(partial(torch.mm, a, b), self.device)
        self.seconds = seconds * self.flops / self.linears


class SavedBytes(NamedTuple):
    """Bytes a token that a forward saves for its backward: by all, and by linears and experts."""

    total: float
    linears: float


def saved_bytes_per_token(
    model: nn.Module, config: TrainConfig, forward: Callable[[Tensor, Tensor], Tensor]
) -> SavedBytes:
    """Counts the distinct storages that autograd saves, except parameters and buffers.

    The result is the difference of two batch sizes, so storages that do not grow with the tokens
    (copies of weights, their codes) are not counted.
    """
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    linears = [m for m in model.modules() if isinstance(m, nn.Linear | Experts)]

    def saved_by(batch: int) -> tuple[int, int]:
        saved: dict[int, int] = {}  # storage address -> bytes; autograd keeps the storages alive
        in_linear: set[int] = set()  # addresses
        entered: list[object] = []  # linears and experts whose forward runs

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if (address := storage.data_ptr()) not in owned:
                saved[address] = storage.nbytes()
                in_linear.update([address] if entered else [])
            return tensor

        hooks = [m.register_forward_pre_hook(lambda m, _: entered.append(m)) for m in linears]
        hooks += [m.register_forward_hook(lambda m, *_: entered.remove(m)) for m in linears]
        generator = torch.Generator().manual_seed(0)
        size = (batch, config.seq)
        ids = torch.randint(0, config.model.vocab, size, generator=generator).to(config.device)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = forward(ids, ids)
        for hook in hooks:
            hook.remove()
        del loss
        return sum(saved.values()), sum(saved[address] for address in in_linear)

    small = max(1, config.batch // 2)
    differences = (large - few for few, large in zip(saved_by(small), saved_by(2 * small)))
    return SavedBytes(*(bytes / (small * config.seq) for bytes in differences))


def loss_in_product_dtype(model: nn.Module, device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns (inputs, targets) -> loss, with products in `product_dtype` and the loss in fp32."""
    is_narrow = product_dtype(device) == torch.bfloat16

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=is_narrow):
            logits = model(inputs)
        return cross_entropy(logits, targets)

    return forward


class PeakMemory:
    """Peak bytes since the object was made.

    GPU: of all tensors together. CPU: of the resident memory that the process has added, so
    interpreter and libraries are not counted.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.highest = self.base = 0  # highest: before the latest reset
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        else:
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            self.base = status_bytes("VmRSS")
        self.reset()

    def reset(self) -> None:
        """Resets the peak that the system or torch counts."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        with suppress(OSError):  # refused: the peak is then that of the whole process so far
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Excludes memory that is allocated and freed inside from the peak."""
        self.highest = self.bytes()
        try:
            yield
        finally:
            self.reset()

    def bytes(self) -> int:
        is_gpu = self.device == "cuda"
        peak = torch.cuda.max_memory_allocated() if is_gpu else status_bytes("VmHWM") - self.base
        return max(self.highest, peak)


def status_bytes(key: str) -> int:
    """Returns a field of /proc/self/status in bytes; 0 where there is none."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)


def read_tokens(model: nn.Module) -> Tokens:
    """Returns the tokens of the last step, after mf.step: one copy from the device."""
    routers = {
        name.removesuffix(".router"): module
        for name, module in model.named_modules()
        if isinstance(module, Router)
    }
    if not routers:
        return {}
    counts = torch.stack([router.step_counts for router in routers.values()])
    return dict(zip(routers, counts.tolist()))


def load_of(tokens: Tokens) -> float:
    """Returns the largest over the mean, of the layer with the most; 1 without a token."""
    layers = [counts for counts in tokens.values() if any(counts)]
    return max((max(counts) * len(counts) / sum(counts) for counts in layers), default=1.0)


def active_experts(records: Iterable[Json]) -> set[tuple[str, int]]:
    """Returns the layers and numbers of the experts that had a token in any of the records."""
    return {
        (layer, expert)
        for record in records
        for layer, counts in record["tokens"].items()
        for expert, count in enumerate(counts)
        if count
    }
