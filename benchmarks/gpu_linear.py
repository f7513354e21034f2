"""Quantized linear layers on the GPU against torch's bf16 layer of the same run: a table, and JSON.

    python benchmarks/gpu_linear.py [--quick] [--compile] [--recipes nvfp4,…] [--tokens 16384]

Forward and backward of one layer without bias, in eager mode; medians. The layers run alternately,
so that clocks and temperature affect all equally.

    floor       the bare products' time, and the fewest bytes that the casts can move, at the speed
                of a copy; both measured in the run
    saved       bytes an element of x that are saved for backward
    peak        memory of one forward and backward beyond parameters, x and g

Each step quantizes the weight. A second table has the host's time for a layer of 128 x 128, also
with cached weight codes, as in micro-batches. Both tables have torchao's FP8 layers, compiled, and
Transformer Engine's, where they can be imported.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
from _linear_floor import floor_ms
from _peers import linear_layers
from torch import Tensor, nn

from tests.support.saved_bytes import saved_bytes

SHAPES = [(4096, 4096), (4096, 14336), (8192, 8192), (14336, 4096)]  # K, N; the last has no bar
TOKENS = 16384
COPY_BYTES = 256 << 20  # of the floor's copy

# Least speed against torch's bf16 layer, at each of SHAPES.
_EXACT = (0.80, 0.85, 0.87)
_FP4_BY_FP8 = (1.36, 1.50, 1.62)
BARS = {
    "fp8_delayed": (1.53, 1.74, 1.82),
    "fp8_tensorwise": (1.47, 1.65, 1.76),
    "fp8_rowwise": (1.42, 1.55, 1.64),
    "fp8_rowwise_gw_hp": (1.26, 1.32, 1.38),
    "fp8_blockwise": (1.27, 1.38, 1.44),
    "mxfp8": _EXACT,
    "nvfp4": _EXACT,
    "mxfp8_nvfp4": _EXACT,
    "mxfp4": _FP4_BY_FP8,
    "nvfp4_pow2": _FP4_BY_FP8,
    "w4a8": _FP4_BY_FP8,
    "w4a8_1x16": _FP4_BY_FP8,
}
SAVED_BARS = {recipe: 0.57 if recipe in ("nvfp4", "nvfp4_pow2") else 1.05 for recipe in BARS}
SAVED_BARS |= {"fp8_rowwise_gw_hp": 2.0, "mxfp8_nvfp4": 0.57, "mxfp4": 0.57}
HOST_BARS = {"forward": 2.0, "forward + backward": 1.4}  # times nn.Linear's
BASE = "torch bf16"


@dataclass
class Layer:
    name: str
    recipe: str  # "": not ours
    model: nn.Module
    x: Tensor
    g: Tensor

    def forward(self) -> Tensor:
        return self.model(self.x)

    def step(self) -> None:
        self.forward().backward(self.g)
        self.x.grad = None
        for p in self.model.parameters():
            p.grad = None


@dataclass
class Row:
    layer: str
    shape: str  # M x K x N
    ms: float
    speed: float  # of torch's bf16 layer
    bar: float | None
    floor_ms: float | None
    saved: float | None
    peak_mib: float


def quantized_layer(
    recipe: str, k: int, n: int, device: torch.device, *, caches_codes: bool = False
) -> nn.Module:
    """Builds a layer. caches_codes: as in later micro-batches of a step; else each call casts W."""
    layer = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
    mf.quantize_(layer, recipe)
    if not caches_codes:
        layer.weight_codes = None
    return layer


def build(
    shape: tuple[int, int, int],
    recipes: list[str],
    device: torch.device,
    *,
    compiled: bool = False,
    peers: bool = False,
) -> list[Layer]:
    m, k, n = shape
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    g = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    layer_bf16 = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
    layers = [Layer(BASE, "", layer_bf16, x, g)]
    if compiled or peers:
        timing.compile_each_shape()
    for recipe in recipes:
        layers.append(Layer(recipe, recipe, quantized_layer(recipe, k, n, device), x, g))
        if compiled:
            model = torch.compile(quantized_layer(recipe, k, n, device))
            layers.append(Layer(f"{recipe}, compiled", recipe, model, x, g))
    if peers:
        for name, model in linear_layers(k, n, device).items():
            layers.append(Layer(name, "", model, x, g))
    return layers


def step_times(layers: list[Layer], device: torch.device, rounds: int) -> dict[str, float]:
    """Returns the median step of each layer. The layers run alternately."""
    return timing.medians_in_turns({y.name: y.step for y in layers}, device, rounds, 4)


def saved_of_x(layer: Layer) -> float:
    """Returns saved bytes an element of x, as the difference that half of the rows make."""
    half = layer.x.detach()[: len(layer.x) // 2].clone().requires_grad_()
    whole, rest = (saved_bytes(lambda x=x: layer.model(x)) for x in (layer.x, half))
    return (whole - rest) / (layer.x.numel() - half.numel())


def peak_mib(layer: Layer, device: torch.device) -> float:
    if device.type != "cuda":
        return 0.0
    return timing.peak_bytes(layer.step) / 2**20


def those_that_run(layers: list[Layer]) -> list[Layer]:
    """Returns the layers after some steps, and prints why others fail."""
    working = []
    for layer in layers:  # delayed scaling has its first scales after two steps
        try:
            for _ in range(3):
                layer.step()
                if layer.recipe:
                    mf.step(layer.model)
            working.append(layer)
        except (RuntimeError, ValueError, AssertionError) as error:
            print(f"{layer.name}: FAILED, {str(error).splitlines()[0]}")
    return working


def measure(shape: tuple[int, int, int], args: Any, device: torch.device, peers: bool) -> list[Row]:
    layers = build(shape, args.recipes, device, compiled=args.compile, peers=peers)
    working = those_that_run(layers)
    ms = step_times(working, device, rounds=3 if args.quick else 12)
    size = COPY_BYTES if device.type == "cuda" else 1 << 20
    bytes_per_ms = 2 * size / timing.copy_ms(size, device, 10)
    ours = dict.fromkeys(layer.recipe for layer in working if layer.recipe)
    floors = {r: floor_ms(mf.Recipe(r), shape, device, bytes_per_ms) for r in ours}
    _, k, n = shape
    rows = []
    for layer in working:
        at = SHAPES.index((k, n)) if (k, n) in SHAPES and shape[0] == TOKENS else -1
        bars = BARS.get(layer.name, ())
        rows.append(
            Row(
                layer.name,
                "x".join(map(str, shape)),
                ms[layer.name],
                ms[BASE] / ms[layer.name],
                bars[at] if 0 <= at < len(bars) else None,
                floors.get(layer.recipe),
                saved_of_x(layer) if layer.name == layer.recipe else None,
                peak_mib(layer, device),
            )
        )
    return rows


def print_rows(rows: list[Row]) -> bool:
    """Prints the rows; returns False where a bar is missed."""
    print(f"\nM x K x N = {rows[0].shape}")
    print(
        f"{'layer':38} {'ms':>8} {'of bf16':>8} {'bar':>5} {'floor ms':>9} {'above':>7} "
        f"{'saved':>6} {'peak MiB':>9}"
    )
    met = True
    for r in rows:
        saved_bar = SAVED_BARS.get(r.layer)
        too_slow = r.bar is not None and r.speed < r.bar
        too_large = r.saved is not None and saved_bar is not None and r.saved > saved_bar
        met = met and not too_slow and not too_large
        floor = "" if r.floor_ms is None else f"{r.floor_ms:.3f}"
        above = timing.percent(None if r.floor_ms is None else r.ms / r.floor_ms - 1)
        print(
            f"{r.layer:38} {r.ms:8.3f} {r.speed:8.3f} {'' if r.bar is None else r.bar:>5} "
            f"{floor:>9} {above:>7} {'' if r.saved is None else f'{r.saved:.3f}':>6} "
            f"{r.peak_mib:9.0f}{'  MISSED' if too_slow else ''}"
            f"{'  SAVES TOO MUCH' if too_large else ''}"
        )
    return met


# ---- The host ------------------------------------------------------------------------------------


def repeat(call: Callable[[], object], times: int) -> None:
    for _ in range(times):
        call()


def host_us(calls: dict[str, Callable[[], object]], device: torch.device) -> dict[str, float]:
    """Returns the host's time for one of each call, without waiting: the queue takes all kernels.

    The calls run alternately, so that other work on the host affects all equally; medians.
    """
    rounds, at_once = 30, 25
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            ms = timing.host_ms(partial(repeat, call, at_once), 1)
            times[name].append(ms * 1e3 / at_once)
            if device.type == "cuda":
                torch.cuda.synchronize()
    return {name: statistics.median(us) for name, us in times.items()}


def host_table(
    recipes: list[str], device: torch.device, peers: bool
) -> tuple[list[dict[str, Any]], bool]:
    layers = build((128, 128, 128), recipes, device, peers=peers)
    x, g = layers[0].x, layers[0].g
    for recipe in recipes:
        model = quantized_layer(recipe, 128, 128, device, caches_codes=True)
        layers.append(Layer(f"{recipe}, weight cached", recipe, model, x, g))
    layers = those_that_run(layers)
    print("\nhost time of a 128 x 128 layer with 128 rows, us, and times nn.Linear's")
    print(f"{'layer':38} {'forward':>14} {'forward + backward':>20}")
    rows: list[dict[str, Any]] = []
    met = True
    found = {
        "forward": host_us({y.name: y.forward for y in layers}, device),
        "forward + backward": host_us({y.name: y.step for y in layers}, device),
    }
    for layer in layers:
        us = {what: times[layer.name] for what, times in found.items()}
        base = rows[0]["us"] if rows else us
        ratio = {what: us[what] / base[what] for what in us}
        missed = layer.recipe and any(ratio[what] > bar for what, bar in HOST_BARS.items())
        met = met and not missed
        cells = [f"{us[what]:8.1f} {ratio[what]:4.1f}x" for what in us]
        print(f"{layer.name:38} {cells[0]:>14} {cells[1]:>20}{'  MISSED' if missed else ''}")
        rows.append({"layer": layer.name, "us": us, "of nn.Linear": ratio})
    bars = ", ".join(f"{what} {bar}" for what, bar in HOST_BARS.items())
    print(f"bars: {bars}")
    return rows, met


def main() -> int:
    parser = timing.arguments(__doc__, "gpu_linear.json")
    parser.add_argument("--recipes", type=lambda s: s.split(","), default=list(BARS))
    parser.add_argument(
        "--compile", action="store_true", help="each recipe under torch.compile too"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="M")
    args = parser.parse_args()
    device = timing.require_device(args.device)
    torch.manual_seed(0)
    print(f"{timing.device_name(device)}, torch {torch.__version__}")
    rows: list[Row] = []
    met = True
    peers = device.type == "cuda" and not args.quick
    for k, n in args.shapes or (SHAPES[:1] if args.quick else SHAPES):
        here = measure((args.tokens, k, n), args, device, peers)
        met = print_rows(here) and met and {*args.recipes} <= {row.layer for row in here}
        rows += here
    host, host_met = host_table(args.recipes, device, peers)
    met = met and host_met and {*args.recipes} <= {row["layer"] for row in host}
    timing.write_json(args.out, device, rows=[asdict(r) for r in rows], host=host)
    print(f"{args.out}; every bar {'met' if met else 'NOT met'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
