"""What a bug report tells of a machine: versions, devices, engines and speeds, what is missing.

What cannot be found out has the reason in its place.
"""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

import torch

from .._native import ops, torches
from .._version import __version__
from ..engine_choice import engines, find_device
from ..private_torch import has_fast_bf16
from ..recipe import presets
from ..tensor.quantized import Quantized, quantize
from .meter import layer_call, time_on_gpu
from .model_sizes import Part
from .predict import BF16

INSTRUCTIONS = ("avx2", "avx512_f", "avx512_bw", "avx512_bf16", "amx_bf16", "neon", "bf16", "sve")
LAYERS = {"cuda": (16384, 4096, 4096), "cpu": (512, 1024, 1024)}  # tokens, K, N of the timed layer
SECONDS = 0.7  # of the rounds of one recipe
REBUILD = "in a clone of minifloat with nvcc on the path, run `pip install .`"


def report() -> dict[str, Any]:
    """Describes this machine."""
    gpus = found(list_gpus)
    device, capability = find_device()
    return {
        "versions": {
            "minifloat": __version__,
            "commit of its clone": found(clone_commit),
            "Python": platform.python_version(),
            "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'left out'}",
            "NVIDIA driver": found(driver),
            "NumPy": found(lambda: importlib.metadata.version("numpy")),
            "system": found(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]),
            "kernel and libc": platform.platform(),
        },
        "cpu": found(describe_cpu),
        "gpus": gpus,
        "native library": {
            "built for torch": ", ".join(torches()),
            "GPU targets": ops.cuda_targets() or "none: built for the CPU alone",
        },
        "timed layer": "tokens {}, K {}, N {} on {}".format(*LAYERS[device], device),
        "recipes": {name: describe_recipe(name, capability, device) for name in presets()},
        "missing": list(find_missing(gpus)),
    }


def as_text(about: dict[str, Any]) -> Iterator[str]:
    """Yields the lines of a report."""
    for section, parts in about.items():
        yield f"{section}:" if isinstance(parts, (dict, list)) else f"{section}: {parts}"
        if section == "recipes":
            yield "  (forward and backward, nn.Linear in bf16 = 1; the row of bf16 shows the noise)"
            for name, row in parts.items():
                yield f"  {name:<21}{row['speed']}"
                for layer in ("linear", "experts"):
                    yield from (f"    {layer:<8} {engine}" for engine in row[layer])
        elif isinstance(parts, dict):
            yield from (f"  {name:<22}{text}" for name, text in parts.items())
        elif isinstance(parts, list):
            yield from (f"  {text}" for text in parts or ["nothing"])


# ---- The machine ---------------------------------------------------------------------------------


def found(look: Callable[[], Any]) -> Any:
    """Returns what `look` finds; where it raises, why it found nothing."""
    try:
        return look()
    except Exception as error:
        return f"not found: {str(error).strip() or type(error).__name__}"


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{command[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout.strip()


def clone_commit() -> str:
    """Returns the commit of the clone of minifloat that holds this file."""
    git = ("git", "-C", str(Path(__file__).parent))
    run(*git, "ls-files", "--error-unmatch", __file__)  # another repository may hold the package
    return run(*git, "describe", "--always", "--dirty")


def driver() -> str:
    return run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split()[0]


def describe_cpu() -> dict[str, str]:
    has = torch.cpu.get_capabilities()
    names = [name for name in INSTRUCTIONS if has.get(name)]
    return {
        "name": f"{has.get('cpu_name', 'unnamed')}, {platform.machine()}",
        "instructions": " ".join(names) or f"none of {', '.join(INSTRUCTIONS)}",
        "threads": f"{torch.get_num_threads()} of {has.get('num_logical_cores')} CPUs",
        "bf16 products in": "bf16" if has_fast_bf16() else "fp32: none is fast on this CPU",
    }


def list_gpus() -> list[str]:
    if not torch.cuda.is_available():
        torch.cuda.init()  # raises the reason
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [
        f"{gpu.name}, compute capability {gpu.major}.{gpu.minor}, {gpu.total_memory >> 20} MiB"
        for gpu in gpus
    ]


def cast_on(index: int) -> Quantized:
    return quantize(torch.ones(1, 16, device=f"cuda:{index}"), "mxfp8")


def find_missing(gpus: list[str] | str) -> Iterator[str]:
    """Yields what this machine lacks, and how to get it."""
    if isinstance(gpus, str):
        if not found(driver).startswith("not found"):
            yield f"a torch that sees the GPU, as nvidia-smi does; {gpus}"
    elif not ops.has_cuda():
        yield f"the CUDA backend, which this build lacks; {REBUILD}"
    else:
        for index in range(len(gpus)):
            if isinstance(cast := found(partial(cast_on, index)), str):
                yield f"casts on GPU {index}; {cast}"
        experts = engines("mxfp8", (9, 0), experts=True)[0].name
        if experts == "exact_grouped" and any("capability 9.0" in gpu for gpu in gpus):
            yield f"kernels for products of experts, which need CUTLASS's headers; {REBUILD}"
    if not has_fast_bf16():
        yield "fast bf16 products of this CPU (x86-64 needs AVX-512); they are computed in fp32"


# ---- Engines and their speed ---------------------------------------------------------------------


def describe_recipe(name: str, capability: tuple[int, int], device: str) -> dict[str, Any]:
    """Returns the speed of a layer beside torch's in bf16, and the engines of its products."""
    times = found(lambda: time_layer(name, device))
    about: dict[str, Any] = {"speed": times}
    if not isinstance(times, str):
        bf16, ms = times
        about = {"speed": round(bf16 / ms, 2), "ms": round(ms, 3), "bf16_ms": round(bf16, 3)}
    for layer in ("linear", "experts"):
        multiplied: dict[str, list[str]] = {}
        for e in engines(name, capability, experts=layer == "experts"):
            engine = f"{'native' if e.native else 'emulated'} ({e.name}): {e.does}"
            multiplied.setdefault(engine, []).append(e.product)
        about[layer] = [f"{', '.join(of)}: {engine}" for engine, of in multiplied.items()]
    return about


def time_layer(recipe: str, device: str) -> list[float]:
    """Returns median milliseconds of forward and backward, of nn.Linear in bf16 and of a recipe.

    Both run in turns, in eager mode. Each call quantizes the weight.
    """
    tokens, k, n = LAYERS[device]
    layer = Part("the timed layer", k, (n,), 1)
    calls = [layer_call(layer, each, tokens, torch.device(device)) for each in (BF16, recipe)]
    times: list[list[float]] = [[], []]
    begin = time.perf_counter()
    while not times[0] or time.perf_counter() - begin < SECONDS:
        for call, ms in zip(calls, times):
            ms.append(time_on_gpu(call, 0) if device == "cuda" else 1e3 * timeit(call, number=1))
    return [statistics.median(ms) for ms in times]
