"""The routed experts of a mixture on the GPU: speed beside torch's bf16, saved bytes and memory.

    python benchmarks/gpu_moe.py [--quick] [--recipes fp8_rowwise,…]

step     forward and backward of mf.MoE without shared experts, weights cast anew, against the same
         router before the same experts on torch._grouped_mm, compiled; medians, in turns
saved    bytes a routed row that the experts keep for backward, the router and parameters not
         counted, and the limit 2D / k + 4I + 32
peak     GiB of one step above what is allocated before it, gradients included; under FP8 at
         most bf16's

T = 16384 tokens, bf16, one seed for all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.saved_bytes import saved_bytes

TOKENS = 16384
Shape = tuple[int, int, int, int]  # D, I, E, k
SHAPES: list[Shape] = [(7168, 2048, 8, 2), (2048, 768, 128, 8)]
QUICK: list[Shape] = [(2048, 768, 16, 2)]
# Least speed against the compiled layer in bf16, at each of SHAPES.
BARS: dict[str, tuple[float, ...]] = {
    "fp8_rowwise": (1.25, 1.10),
    "fp8_blockwise": (1.10,),
}
BASE = "torch bf16"


@dataclass
class Row:
    recipe: str
    shape: Shape
    ms: float
    speed: float
    bar: float | None
    saved_bytes: float  # a routed row
    most_bytes: float
    peak_gib: float


def torch_experts(x: Tensor, w13: Tensor, w2: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The experts in bf16, as models write them: sort, two grouped products, sum of slots."""
    tokens, slots = indices.shape
    by_expert, order = indices.reshape(-1).sort(stable=True)
    numbers = torch.arange(w13.shape[0], device=x.device)
    offs = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
    products = torch._grouped_mm(x[order // slots], w13.transpose(-2, -1), offs=offs)
    gate, up = products.chunk(2, dim=1)
    h = F.silu(gate.float()) * up.float() * weights.reshape(-1)[order].unsqueeze(1)
    y = torch._grouped_mm(h.to(x.dtype), w2.transpose(-2, -1), offs=offs)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return y[places].view(tokens, slots, -1).float().sum(1).to(x.dtype)


class TorchMoE(nn.Module):
    """The router and the parameters of an mf.MoE, with the experts in bf16."""

    def __init__(self, moe: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = moe.router, moe.experts
        self.compute = torch.compile(torch_experts)

    def forward(self, x: Tensor) -> Tensor:
        routed = self.router(x)
        return self.compute(x, self.experts.w13, self.experts.w2, routed[0], routed[1])


def layer(shape: Shape, recipe: str | None, device: torch.device) -> Any:
    torch.manual_seed(0)
    return mf.MoE(
        *shape, fused_w13=True, dtype=torch.bfloat16, device=device, recipe=recipe, balance=None
    )


def step_of(module: nn.Module, x: Tensor, g: Tensor) -> Callable[[], None]:
    def step() -> None:
        for parameter in module.parameters():
            with torch.no_grad():
                parameter.flatten()[:1].add_(0)  # a new version: weights are cast anew
        module(x).backward(g)
        x.grad = None
        module.zero_grad()

    return step


def kept_bytes(module: Any, x: Tensor) -> int:
    """Returns the bytes that the experts' forward keeps, x included and parameters left out."""
    indices, weights = module.router(x)

    def forward() -> Tensor:
        if isinstance(module, TorchMoE):
            e = module.experts
            return module.compute(x, e.w13, e.w2, indices, weights)
        return module.experts(x, indices, weights)

    return saved_bytes(forward, module.parameters())


def peak_gib(step: Callable[[], None]) -> float:
    return timing.peak_bytes(step) / 2**30


def measure(
    shape: Shape, recipes: list[str], tokens: int, device: torch.device, rounds: int
) -> list[Row]:
    width, hidden, _, slots = shape
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16).requires_grad_()
    g = torch.randn(tokens, width, device=device, dtype=torch.bfloat16)
    routed, most = tokens * slots, 2 * width / slots + 4 * hidden + 32
    timing.compile_each_shape()
    reference = TorchMoE(layer(shape, None, device))
    base = step_of(reference, x, g)
    base()
    rows = [
        Row(
            BASE,
            shape,
            0,
            1,
            None,
            kept_bytes(reference, x) / routed,
            most,
            peak_gib(base),
        )
    ]
    for recipe in recipes:
        module = layer(shape, recipe, device)
        step = step_of(module, x, g)
        times = timing.medians_in_turns({"": base, recipe: step}, device, rounds, 3)
        ms, base_ms = times[recipe], times[""]
        rows[0].ms = base_ms
        kept = kept_bytes(module, x) / routed
        bar = timing.bar_of(BARS.get(recipe, ()), SHAPES, shape)
        rows.append(Row(recipe, shape, ms, base_ms / ms, bar, kept, most, peak_gib(step)))
        del module, step
        torch.cuda.empty_cache()
    return rows


def print_rows(rows: list[Row], tokens: int) -> bool:
    print(f"\nT = {tokens}, (D, I, E, k) = {rows[0].shape}; at most {rows[0].most_bytes:.0f} saved")
    print(f"{'recipe':16}       ms  speed   bar  saved a row  peak GiB")
    met = True
    for r in rows:
        missed = r.bar is not None and r.speed < r.bar
        is_large = r.recipe != BASE and r.saved_bytes > r.most_bytes
        is_large |= r.recipe.startswith("fp8") and r.peak_gib > rows[0].peak_gib
        met = met and not missed and not is_large
        bar = "" if r.bar is None else f"{r.bar:.2f}"
        print(
            f"{r.recipe:16} {r.ms:8.3f} {r.speed:6.2f} {bar:>5} {r.saved_bytes:12.0f} "
            f"{r.peak_gib:9.2f}{'  MISSED' if missed or is_large else ''}"
        )
    return met


def main() -> int:
    parser = timing.arguments(__doc__, "gpu_moe.json")
    default = [r for r in mf.presets() if r != "bf16" and not mf.Recipe(r).is_delayed]
    parser.add_argument("--recipes", type=lambda s: s.split(","), default=default)
    args = parser.parse_args()
    device = timing.require_device(args.device)
    print(f"{timing.device_name(device)}, torch {torch.__version__}")
    met, rows = True, []
    tokens = 2048 if args.quick else TOKENS
    for shape in args.shapes or (QUICK if args.quick else SHAPES):
        found = measure(shape, args.recipes, tokens, device, 2 if args.quick else 4)
        met = print_rows(found, tokens) and met
        rows += found
    timing.write_json(args.out, device, rows=[asdict(row) for row in rows])
    print(f"{args.out}; every bar {'met' if met else 'NOT met'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
