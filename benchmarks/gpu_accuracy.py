"""Relative errors of results on the GPU, for each preset: y, dx and dW of a linear layer, and y, dA
and dB of experts.

    python benchmarks/gpu_accuracy.py [--quick] [--shapes 16384x8192x8192]     M x K x N

    error = |result - reference| / |reference|, Frobenius norms; the reference is the product of the
            same bf16 x, W and g in float64
    experts: the error of the worst expert, and its largest ratio to the error of a linear layer of
            the expert's rows; 8 experts, of which one is empty and none has a multiple of 16 rows

Normal data with unit variance.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
from torch import Tensor

SHAPES = [(16384, 8192, 8192)]
QUICK = [(2048, 1024, 1024)]
SEED = 17
EXPERTS = (0.21, 0.07, 0.0, 0.13, 0.02, 0.27, 0.17, 0.11)  # shares of the rows


@dataclass
class Row:
    recipe: str
    shape: str
    y: float
    dx: float
    dw: float
    experts: tuple[float, ...]  # the worst expert's y, dA and dB
    ratios: tuple[float, ...]


def relative_error(result: Tensor, reference: Tensor) -> float:
    return float((result.detach().double() - reference).norm() / reference.norm())


def layer_errors(
    recipe: str, x: Tensor, w: Tensor, g: Tensor, references: Sequence[Tensor]
) -> list[float]:
    """Returns the errors of y, dx and dW of a linear layer."""
    leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
    rng = torch.tensor([SEED, 0, 1], device=x.device)
    y = mf.linear(leaf_x, leaf_w, recipe=recipe, rng=rng)
    results = (y, *torch.autograd.grad(y, (leaf_x, leaf_w), g))
    return [relative_error(r, reference) for r, reference in zip(results, references)]


def references_of(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.double() @ w.double().t(), g.double() @ w.double(), g.double().t() @ x.double()


def expert_errors(recipe: str, x: Tensor, g: Tensor, weights: Tensor) -> tuple[list[float], ...]:
    """Returns the worst expert's errors of y, dA and dB, and the largest ratios to a layer's."""
    sizes = [int(share * x.shape[0]) | 1 if share else 0 for share in EXPERTS]
    ends = torch.tensor(sizes).cumsum(0)
    a, b = x.clone().requires_grad_(), weights.clone().requires_grad_()
    rng = torch.tensor([SEED, 0], device=x.device)
    offs = ends.to(x.device, torch.int32)
    y = mf.functional.scaled_grouped_mm(a, b.transpose(-2, -1), offs, recipe, rng=rng)
    d_a, d_b = torch.autograd.grad(y, (a, b), g)
    worst, ratios = [0.0] * 3, [0.0] * 3
    for e, (size, end) in enumerate(zip(sizes, ends.tolist())):
        if size == 0:
            continue
        rows = slice(end - size, end)
        references = references_of(x[rows], weights[e], g[rows])
        found = (y[rows], d_a[rows], d_b[e])
        errors = [relative_error(r, reference) for r, reference in zip(found, references)]
        of_layer = layer_errors(recipe, x[rows], weights[e], g[rows], references)
        worst = [max(pair) for pair in zip(worst, errors)]
        ratios = [max(r, error / o) for r, error, o in zip(ratios, errors, of_layer)]
    return worst, ratios


def rows_of(shape: tuple[int, int, int], device: torch.device) -> list[Row]:
    m, k, n = shape
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator).bfloat16()

    x, w, g = normal(m, k), normal(n, k), normal(m, n)
    references = references_of(x, w, g)
    weights = normal(len(EXPERTS), n // 4, k // 4)
    narrow_x, narrow_g = x[:, : k // 4].contiguous(), g[:, : n // 4].contiguous()
    rows = []
    for recipe in mf.presets():
        if mf.Recipe(recipe).is_delayed:
            continue  # the first step has no history
        errors = layer_errors(recipe, x, w, g, references)
        experts, ratios = expert_errors(recipe, narrow_x, narrow_g, weights)
        rows.append(Row(recipe, f"{m}x{k}x{n}", *errors, tuple(experts), tuple(ratios)))
    return rows


def main() -> int:
    parser = timing.arguments(__doc__, "gpu_accuracy.json")
    options = parser.parse_args()
    device = timing.require_device(options.device)
    print(f"{timing.device_name(device)}, torch {torch.__version__}")
    rows = []
    for shape in options.shapes or (QUICK if options.quick else SHAPES):
        found = rows_of(shape, device)
        print(f"\nM x K x N = {found[0].shape}; experts: K / 4, N / 4")
        print(f"{'recipe':20}      y       dx       dW  experts y, dA, dB       ratios")
        for row in found:
            experts = " ".join(f"{error:.4f}" for error in row.experts)
            ratios = " ".join(f"{ratio:.4f}" for ratio in row.ratios)
            layer = f"{row.y:.4f}   {row.dx:.4f}   {row.dw:.4f}"
            print(f"{row.recipe:20} {layer}  {experts}  {ratios}")
        rows += found
    timing.write_json(options.out, device, rows=[asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
