"""Products of experts on the GPU against bf16's grouped product of the same run: tables, and JSON.

python benchmarks/gpu_grouped.py [--quick] [--recipes nvfp4,…] [--parts count,layers,…]

casts       x of every preset, rowwise, columnwise and both: groups against the dense cast of
            the same size, in TB/s of the fewest bytes, padding counted
kernels     casts of 3D weights, amaxes, gathered casts, swizzles and the table of groups
engines     torch's grouped products alone, against cuBLAS's dense product of the same size
products    ours alone, along rows and along the contraction dimension, even groups and 64 uneven
            ones, against the dense product of the same operands and size
layers      forward and backward of scaled_grouped_mm, weights cast anew, against compiled
            torch._grouped_mm, on even groups and on a router's counts; medians, alternately.
            Beside them: the floor and the count (_linear_floor.py), the speed with weights that
            are codes already, the memory of a step, and torchao's FP8 by rows where it can be
            imported
launches    kernels of a step of the SMALL shapes by kind, beside the count: ms and launches
count       the count of SMALL shapes, which needs no GPU: where FP8's bar is 88% of it
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import _gpu_timing as timing  # first: it makes minifloat importable
import _grouped_kernels as others
import _grouped_parts as parts
import _linear_floor as floors
import minifloat as mf
import torch
from _grouped_parts import SHAPES, Shape, even_ends, routed_ends
from minifloat._native import ops
from torch import Tensor

# Least speed against torch's bf16 grouped product, at each of SHAPES.
_EXACT_FP4 = (0.78, 0.68, 0.66)
BARS: dict[str, tuple[float, ...]] = {
    "fp8_delayed": (1.52, 1.36, 1.33),
    "fp8_tensorwise": (1.45, 1.27, 1.24),
    "fp8_rowwise": (1.44, 1.26, 1.23, 1.05),
    "fp8_blockwise": (1.25, 1.15, 1.12),
    "mxfp4": (1.35, 1.15, 1.12),
    "nvfp4_pow2": (1.25, 1.02, 1.00),
    "mxfp8": (0.86, 0.77, 0.76),
    "nvfp4": _EXACT_FP4,
    "mxfp8_nvfp4": _EXACT_FP4,
}
BASE = "torch bf16"
FAST = "fp8_rowwise, all fast"
RECIPES = {FAST: " ".join(f"{p}=e4m3/row*e4m3/row,fast" for p in ("fprop", "dgrad", "wgrad"))}
TORCHAO = "torchao fp8 rowwise"
# Many small experts, measured on a router's counts alone.
SMALL: list[Shape] = [(49152, 1536, 2048, 96), (65536, 768, 2048, 128)]
SHARE_OF_COUNT = 0.88
KINDS = {
    "amaxes": ("amax",),
    "casts": ("quantize", "as_fp8", "write_whole", "eden"),
    "products": ("gemm", "cutlass", "grouped_mm"),
}
FLOOR_COPY = 1 << 28  # bytes of the copy that a floor's casts are as fast as


# ---- Layers --------------------------------------------------------------------------------------


@dataclass
class LayerRow:
    recipe: str
    shape: Shape
    groups: str
    ms: float
    speed: float
    bar: float | None
    peak_gib: float
    cached_speed: float | None = None
    floor_speed: float | None = None
    counted_ms: float | None = None


def torchao_product() -> Callable[..., Tensor] | None:
    """Returns torchao's FP8 product of rows and experts; None where it is not installed."""
    try:
        from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as product
    except ImportError:
        return None
    return torch.compile(
        lambda a, b, ends: product(a, b, ends, torch.bfloat16, torch.float8_e4m3fn, False)
    )


def step_of(recipe: str, shape: Shape, ends: Tensor, is_cached: bool = False) -> Callable[[], None]:
    """Returns a forward and backward.   is_cached: the weights are codes already"""
    m, n, k, e = shape
    device = ends.device
    a = torch.randn(m, k, device=device, dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(e, n, k, device=device, dtype=torch.bfloat16) / k**0.5).requires_grad_()
    g = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    rng = torch.tensor([1, 2], device=device)
    history = None
    text = RECIPES.get(recipe, recipe)
    is_ours = recipe not in ("", TORCHAO)
    if is_ours and mf.Recipe(text).is_delayed:
        history = torch.ones(6, e, 17, device=device)
    codes = ops.layer_operands(w, text, "w") if is_cached else None
    torchao = torchao_product() if recipe == TORCHAO else None
    bf16 = torch.compile(lambda x, b: torch._grouped_mm(x, b, offs=ends))

    def step() -> None:
        b = w.transpose(-2, -1)
        if is_cached:
            y = ops.scaled_grouped_mm(a, b, ends, text, rng=rng, weight_operands=codes)
        elif is_ours:
            y = mf.functional.scaled_grouped_mm(a, b, ends, text, rng=rng, amax_history=history)
        else:
            y = torchao(a, b, ends) if torchao else bf16(a, b)
        y.backward(g)
        a.grad = w.grad = None

    return step


def floor_speed(recipe: str, shape: Shape, bf16_ms: float, device: torch.device) -> float | None:
    """Returns bf16's time divided by the floor's."""
    m, n, k, e = shape
    per_ms = 2 * FLOOR_COPY / timing.copy_ms(FLOOR_COPY, device, 5)
    text = mf.Recipe(RECIPES.get(recipe, recipe))
    ms = floors.floor_ms(text, (m, k, n), device, per_ms, experts=e)
    return None if ms is None else bf16_ms / ms


def counts_of(recipe: str, shape: Shape) -> tuple[float, float]:
    """Returns the counted ms of the products and of the casts."""
    m, n, k, e = shape
    return floors.counted_ms(mf.Recipe(RECIPES.get(recipe, recipe)), (m, k, n), e)


def print_counts(recipes: list[str]) -> None:
    for shape in SMALL:
        print(f"\ncount, (M, N, K, E) = {shape}: products, casts, together, ms")
        for recipe in recipes:
            if recipe != TORCHAO:
                products, casts = counts_of(recipe, shape)
                print(f"{recipe:22} {products:6.3f} {casts:6.3f} {products + casts:6.3f}")


def print_launches(recipes: list[str], device: torch.device) -> None:
    for shape in SMALL:
        ends = routed_ends(shape[0], shape[3], device)
        print(f"\nkernels, (M, N, K, E) = {shape}, routed groups: ms, launches; last: the count")
        for recipe in recipes:
            step = step_of(recipe, shape, ends)
            step()
            found: dict[str, list[timing.Kernel]] = {kind: [] for kind in (*KINDS, "the rest")}
            for kernel in timing.kernels_of(step):
                found[timing.kind_of(kernel, KINDS)].append(kernel)
            cells = [
                f"{kind} {sum(k.ms for k in some):.3f}, {sum(k.launches for k in some)}"
                for kind, some in found.items()
            ]
            counted = (
                "" if recipe == TORCHAO else "{:.3f}, {:.3f}".format(*counts_of(recipe, shape))
            )
            print(f"{recipe:22} {'; '.join(cells)}; {counted}")


def bar_of(recipe: str, shape: Shape, groups: str, bf16_ms: float) -> float | None:
    """Returns the least speed of a recipe; None where it has none."""
    if shape in SMALL and recipe.startswith("fp8"):
        return SHARE_OF_COUNT * bf16_ms / sum(counts_of(recipe, shape))
    return timing.bar_of(BARS.get(recipe, ()), SHAPES, shape) if groups == "even" else None


def measure_layers(
    shape: Shape, recipes: list[str], groups: str, device: torch.device, rounds: int
) -> list[LayerRow]:
    m, _, _, e = shape
    ends = (even_ends if groups == "even" else routed_ends)(m, e, device)
    timing.compile_each_shape()
    base = step_of("", shape, ends)
    if groups != "even":  # a group that is no multiple of 16 rows ends the process
        recipes = [recipe for recipe in recipes if recipe != TORCHAO]
    rows = [LayerRow(BASE, shape, groups, 0.0, 1.0, None, timing.peak_bytes(base) / 2**30)]
    for recipe in recipes:
        steps = {"": base, recipe: step_of(recipe, shape, ends)}
        is_ours = recipe != TORCHAO
        if is_ours and not mf.Recipe(RECIPES.get(recipe, recipe)).is_delayed:
            steps["cached"] = step_of(recipe, shape, ends, is_cached=True)
        try:
            times = timing.medians_in_turns(steps, device, rounds, 4)
        except RuntimeError as error:
            if is_ours:
                raise
            print(f"{recipe}: no figure, {str(error).splitlines()[0]}")
            continue
        ms, bf16_ms = times[recipe], times[""]
        bar = bar_of(recipe, shape, groups, bf16_ms)
        peak = timing.peak_bytes(steps[recipe]) / 2**30
        row = LayerRow(recipe, shape, groups, ms, bf16_ms / ms, bar, peak)
        if "cached" in steps:
            row.cached_speed = bf16_ms / times["cached"]
        if is_ours:
            row.counted_ms = sum(counts_of(recipe, shape))
        if is_ours and groups == "even":
            row.floor_speed = floor_speed(recipe, shape, bf16_ms, device)
        rows.append(row)
        rows[0].ms = bf16_ms
        del steps
        torch.cuda.empty_cache()
    return rows


def print_layers(rows: list[LayerRow]) -> bool:
    met = True
    print(f"\nforward + backward, (M, N, K, E) = {rows[0].shape}, {rows[0].groups} groups")
    print(f"{'':31} speed, bar, speed with cached weights, of the floor, GiB, share of the count")
    for r in rows:
        missed = r.bar is not None and r.speed < r.bar
        met = met and not missed
        bar = "" if r.bar is None else f"{r.bar:.2f}"
        others = "".join(
            f" {'' if x is None else format(x, '.2f'):>6}"
            for x in (r.cached_speed, r.floor_speed, r.peak_gib)
        )
        others += f" {timing.percent(r.counted_ms and r.counted_ms / r.ms):>6}"
        missing = "  MISSED" if missed else ""
        print(f"{r.recipe:22} {r.ms:8.3f} ms {r.speed:6.2f} {bar:>5}{others}{missing}")
    return met


def main() -> int:
    parser = timing.arguments(__doc__, "gpu_grouped.json")
    parser.add_argument("--recipes", type=lambda s: s.split(","), default=None)
    parser.add_argument(
        "--parts",
        type=lambda s: s.split(","),
        default=["casts", "kernels", "engines", "products", "layers"],
    )
    args = parser.parse_args()
    if args.parts == ["count"]:
        print_counts(args.recipes or [*BARS, FAST])
        return 0
    device = timing.require_device(args.device)
    torch.manual_seed(0)
    print(f"{timing.device_name(device)}, torch {torch.__version__}")
    shapes = args.shapes or (SHAPES[:1] if args.quick else SHAPES)
    recipes = args.recipes or [*BARS, FAST, *([TORCHAO] if torchao_product() else [])]
    if "launches" in args.parts:
        print_launches(recipes, device)
    met, casts, engines, products, layers = True, [], [], [], []
    if "casts" in args.parts:
        casts = parts.measure_casts(device, args.quick)
        met = parts.print_casts(casts)
    if not args.quick and args.shapes is None:
        shapes = [*shapes, (*SHAPES[1][:3], 64), *SMALL]
    kernels = []
    if "kernels" in args.parts and not args.quick:
        kernels = others.measure_kernels(device)
        met = others.print_kernels(kernels, others.table_microseconds(device)) and met
    for shape in shapes:
        if "engines" in args.parts and shape in SHAPES:
            engines += parts.measure_engines(shape, device)
        torch.cuda.empty_cache()
        if "products" in args.parts and shape in SHAPES:
            products += parts.measure_products(shape, device)
        for groups in ("even",) if args.quick else ("even", "routed"):
            if "layers" not in args.parts or (shape in SMALL and groups == "even"):
                continue
            here = measure_layers(shape, recipes, groups, device, 2 if args.quick else 5)
            met = print_layers(here) and met
            layers += here
    if engines:
        parts.print_engines(engines)
    if products:
        met = parts.print_products(products) and met
    rows = {
        "casts": casts,
        "kernels": kernels,
        "engines": engines,
        "products": products,
        "layers": layers,
    }
    records = {name: [asdict(r) for r in some] for name, some in rows.items()}
    timing.write_json(args.out, device, **records)
    print(f"{args.out}; every bar {'met' if met else 'NOT met'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
