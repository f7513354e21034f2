"""Relative errors of a linear layer's results on the GPU: y, dx and dW of each preset.

    python benchmarks/gpu_accuracy.py [--quick] [--shapes 16384x8192x8192]     M x K x N

    error = |result - reference| / |reference|, Frobenius norms; the reference is the product of the
            same bf16 x, W and g in float64

Normal data with unit variance.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass

import _gpu_timing as timing  # first: it makes minifloat importable
import minifloat as mf
import torch
from torch import Tensor

SHAPES = [(16384, 8192, 8192)]
QUICK = [(2048, 1024, 1024)]
SEED = 17


@dataclass
class Row:
    recipe: str
    shape: str
    y: float
    dx: float
    dw: float


def relative_error(result: Tensor, reference: Tensor) -> float:
    return float((result.detach().double() - reference).norm() / reference.norm())


def rows_of(shape: tuple[int, int, int], device: torch.device) -> list[Row]:
    m, k, n = shape
    generator = torch.Generator(device).manual_seed(SEED)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device=device, generator=generator).bfloat16()

    x, w, g = normal(m, k), normal(n, k), normal(m, n)
    references = (
        x.double() @ w.double().t(),
        g.double() @ w.double(),
        g.double().t() @ x.double(),
    )
    rows = []
    for recipe in mf.presets():
        if mf.Recipe(recipe).is_delayed:
            continue  # the first step has no history
        leaf_x, leaf_w = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = mf.linear(leaf_x, leaf_w, recipe=recipe, rng=torch.tensor([SEED, 0, 1], device=device))
        results = (y, *torch.autograd.grad(y, (leaf_x, leaf_w), g))
        errors = [relative_error(r, reference) for r, reference in zip(results, references)]
        rows.append(Row(recipe, f"{m}x{k}x{n}", *errors))
    return rows


def main() -> int:
    parser = timing.arguments(__doc__, "gpu_accuracy.json")
    options = parser.parse_args()
    device = timing.require_device(options.device)
    print(f"{timing.device_name(device)}, torch {torch.__version__}")
    rows = []
    for shape in options.shapes or (QUICK if options.quick else SHAPES):
        found = rows_of(shape, device)
        print(f"\nM x K x N = {found[0].shape}\n{'recipe':20}      y       dx       dW")
        for row in found:
            print(f"{row.recipe:20} {row.y:.4f}   {row.dx:.4f}   {row.dw:.4f}")
        rows += found
    timing.write_json(options.out, device, rows=[asdict(row) for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
