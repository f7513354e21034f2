"""Which operand of a recipe brings the error: one changed at a time, in a layer's three products.

    python benchmarks/operand_errors.py [--base nvfp4] [--flag +pow2] [--also [NAME=]TEXT …]

error = |result - reference| / |reference|, Frobenius norms, of y, dx and dW; the reference is the
product of the same bf16 x, W and g in float64. A row such as "g of dgrad" adds the flag to that
operand and leaves the others as in the base recipe. "W of fprop, dgrad" adds it to both: a 2D block
has the same codes in both. Errors are means over draws of data.

data     normal   x, W and g are normal
         heavy    x, W and g have Student's t distribution with 5 degrees of freedom
         rows     normal, each row times exp(1.5 z), z normal: tokens of very different sizes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace

import _gpu_timing  # noqa: F401  first: it makes minifloat importable
import minifloat as mf
import torch
from gpu_accuracy import layer_errors, references_of
from torch import Tensor

DRAWS = 4
HEAVY = 5.0  # degrees of freedom
SPREAD = 1.5  # of the logarithms of rows' sizes
# Operands that change together, as (product, side): their names.
CHANGED = {
    (("fprop", "a"),): "x of fprop",
    (("fprop", "b"), ("dgrad", "b")): "W of fprop, dgrad",
    (("dgrad", "a"),): "g of dgrad",
    (("wgrad", "a"),): "g of wgrad",
    (("wgrad", "b"),): "x of wgrad",
}


def normal(size: int) -> Tensor:
    return torch.randn(size, size)


def heavy(size: int) -> Tensor:
    return torch.distributions.StudentT(HEAVY).sample((size, size))


def rows(size: int) -> Tensor:
    return torch.randn(size, size) * torch.exp(SPREAD * torch.randn(size, 1))


DATA: dict[str, Callable[[int], Tensor]] = {"normal": normal, "heavy": heavy, "rows": rows}


def recipes_of(base: str, flag: str) -> dict[str, str]:
    """Returns the base recipe, and it with the flag on one operand at a time and on all."""
    recipe = mf.Recipe(base)

    def with_flag(places: tuple[tuple[str, str], ...]) -> str:
        products = {name: getattr(recipe, name) for name in ("fprop", "dgrad", "wgrad")}
        for name, side in places:
            changed = getattr(products[name], side) + flag
            products[name] = replace(products[name], **{side: changed})
        return " ".join(f"{name}={product}" for name, product in products.items())

    out = {base: base}
    out |= {f"{name}: {flag}": with_flag(places) for places, name in CHANGED.items()}
    out[f"all: {flag}"] = with_flag(tuple(place for places in CHANGED for place in places))
    return out


def mean_errors(recipe: str, data: Callable[[int], Tensor], size: int) -> list[float]:
    """Returns the mean errors of y, dx and dW in percent."""
    totals = torch.zeros(3, dtype=torch.float64)
    for draw in range(DRAWS):
        torch.manual_seed(draw)
        x, w, g = (data(size).bfloat16() for _ in range(3))
        totals += torch.tensor(layer_errors(recipe, x, w, g, references_of(x, w, g)))
    return (100 * totals / DRAWS).tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base", default="nvfp4", help="a preset (%(default)s)")
    parser.add_argument("--flag", default="+pow2", help="added to an operand (%(default)s)")
    parser.add_argument("--also", action="append", default=[], metavar="[NAME=]TEXT")
    parser.add_argument("--size", type=int, default=1024, help="of x, W and g (%(default)s)")
    arguments = parser.parse_args()
    recipes = recipes_of(arguments.base, arguments.flag)
    for entry in arguments.also:
        entry = " ".join(entry.split())
        name, equals, text = entry.partition("=")
        is_named = bool(equals) and name not in ("fprop", "dgrad", "wgrad")
        recipes[name if is_named else entry] = text if is_named else entry
    print(f"| recipe | {' | '.join(f'{kind}: y, dx, dW' for kind in DATA)} |")
    print(f"|---|{'---|' * len(DATA)}")
    for name, recipe in recipes.items():
        errors = [mean_errors(recipe, data, arguments.size) for data in DATA.values()]
        cells = [", ".join(f"{error:.1f}" for error in each) for each in errors]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
