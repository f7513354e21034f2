"""How far rounding the operands of a forward moves a mean squared loss."""

import functools
import math

import minifloat as mf
import torch


@functools.cache
def operand_error(spec: str) -> float:
    """Returns the squared error of rounded values by their squares: of normal or uniform values."""
    if spec == "bf16":
        return 2.0**-16
    generator = torch.Generator().manual_seed(0)
    found = []
    for x in (
        torch.randn(128, 128, generator=generator),
        torch.rand(128, 128, generator=generator),
    ):
        rounded = mf.tensor.quantize(x, spec.replace("+rht", "")).dequantize()
        found.append(((rounded - x).square().sum() / x.square().sum()).item())
    return max(found)


def loss_error(recipe: str, products: int, power: float, loss: float, count: int) -> float:
    """Bounds |mean((y + d - t)^2) - mean((y - t)^2)|, where d is the error of rounding.

    Each operand of each product on the way to y adds its relative squared error, so mean(d^2) is
    e = products * (error of x + error of W) * mean(y^2). The mean of 2 d (y - t) over `count`
    elements, of random signs, has a standard deviation of 2 sqrt(e * loss / count), of which four
    are allowed.

    Args:
        recipe: of all products.
        products: their number on the way to y.
        power: mean(y^2), or a bound of it.
        loss: mean((y - t)^2), or a bound of it.
        count: of elements of y.
    """
    fprop = mf.Recipe(recipe).fprop
    e = products * (operand_error(fprop.a) + operand_error(fprop.b)) * power
    return e + 8 * math.sqrt(e * loss / count)
