"""Timing on a device, and device copies to compare with; shared by benchmarks/gpu_*.py.

Kernels are timed without the host: the calls of one measurement go over inputs that together exceed
the L2 cache four times, are captured in one CUDA graph, and the time of a call is the median replay
over the number of calls. `--device cpu` measures with the host's clock instead, to try the scripts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "python"), str(ROOT)]  # the source tree's package, installed or not

from tests.support.graphs import captured  # noqa: E402

MIN_COPIES = 2
MAX_COPIES = 256
L2_TIMES = 4


def arguments(doc: str | None, out: str) -> argparse.ArgumentParser:
    """Parses the options that the tables share."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / out, help="the JSON file")
    parser.add_argument("--quick", action="store_true", help="the first shape only, fewer repeats")
    parser.add_argument("--device", default="cuda", help="cpu: to try the script, not to measure")
    parser.add_argument(
        "--shapes", type=shapes, default=None, help="other shapes than the table's: 4096x14336,…"
    )
    return parser


def shapes(text: str) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in one.split("x")) for one in text.split(",")]


def require_device(name: str) -> torch.device:
    if name.startswith("cuda") and not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).name}: expected a CUDA device, torch sees none")
    return torch.device(name)


def compile_each_shape() -> None:
    """Makes torch.compile build a kernel for every shape and model."""
    torch._dynamo.reset()
    torch._dynamo.config.cache_size_limit = 1000
    torch._dynamo.config.automatic_dynamic_shapes = False


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def copies_of(nbytes: int, device: torch.device) -> int:
    """Returns the number of inputs of this size that exceed the L2 cache L2_TIMES."""
    if device.type != "cuda":
        return MIN_COPIES
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(MAX_COPIES, max(MIN_COPIES, -(-L2_TIMES * cache // max(nbytes, 1))))


def host_ms(f: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        f()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def event_ms(f: Callable[[], object], repeats: int) -> list[float]:
    """Times each run of f on the device, from the first kernel's start to the last one's end."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in marks:
        start.record()
        f()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in marks]


def kernel_ms(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> float:
    """Times one call, without the host."""
    if device.type != "cuda":
        return host_ms(lambda: [call() for call in calls], repeats) / len(calls)
    # The results live on, so that no two calls write the same memory.
    graph, results = captured(lambda: [call() for call in calls], warm_up=calls[0])
    event_ms(graph.replay, 3)
    ms = statistics.median(event_ms(graph.replay, repeats)) / len(calls)
    del graph, results
    return ms


def medians_in_turns(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, repeats: int
) -> dict[str, float]:
    """Returns the median ms of each call on the device. The calls run alternately."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            if device.type == "cuda":
                times[name] += event_ms(call, repeats)[1:]
            else:
                times[name].append(host_ms(call, 1))
    return {name: statistics.median(ms) for name, ms in times.items()}


@dataclass(frozen=True)
class Kernel:
    """All launches of a kernel in a step."""

    name: str
    ms: float
    launches: int


def kernels_of(step: Callable[[], object]) -> list[Kernel]:
    """Profiles the kernels of a step; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    # triton names a kernel by the ops around it; calls of the runtime are events of the CPU
    events = [e for e in trace.key_averages() if e.device_type == DeviceType.CUDA]
    return [Kernel(e.key, e.self_device_time_total / 1e3, e.count) for e in events]


def kind_of(kernel: Kernel, kinds: Mapping[str, Sequence[str]]) -> str:
    """Returns the first kind one of whose words is in the kernel's name, or "the rest"."""
    low = kernel.name.lower()
    found = (kind for kind, words in kinds.items() if any(word in low for word in words))
    return next(found, "the rest")


def peak_bytes(step: Callable[[], object]) -> int:
    """Returns the memory of a step above what is allocated before it, after one that allocates
    lasting state.
    """
    step()
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def bar_of(bars: Sequence[float], shapes: Sequence[Any], shape: Any) -> float | None:
    """Returns the bar at a shape of the table; None where there is none."""
    at = shapes.index(shape) if shape in shapes else len(bars)
    return bars[at] if at < len(bars) else None


def copy_ms(nbytes: int, device: torch.device, repeats: int) -> float:
    """Times a device copy of nbytes, which reads and writes them."""
    count = copies_of(nbytes, device)
    sources = [
        torch.empty(nbytes, dtype=torch.uint8, device=device).random_() for _ in range(count)
    ]
    targets = [torch.empty_like(source) for source in sources]

    def call(to: Tensor, source: Tensor) -> Callable[[], object]:
        return lambda: to.copy_(source)

    return kernel_ms([call(t, s) for t, s in zip(targets, sources)], device, repeats)


def nbytes(tensors: Tensor | Iterable[Tensor]) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(t.nbytes for t in tensors)


def percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f}%"


def write_json(path: Path, device: torch.device, **content: Any) -> None:
    """Writes what was run and its results: a field a line, of a list of rows a row a line."""
    about = {"device": device_name(device), "torch": torch.__version__}
    about |= {"date": time.strftime("%Y-%m-%d"), "command": " ".join(["python", *sys.argv])}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_lines({**about, **content}), encoding="utf-8")


def as_lines(content: Mapping[str, Any]) -> str:
    """Returns JSON with a field a line, of a list of rows a row a line."""

    def text_of(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        return json.dumps(value)

    fields = (f" {json.dumps(name)}: {text_of(value)}" for name, value in content.items())
    return "{\n" + ",\n".join(fields) + "\n}\n"
