"""Inputs whose products have exact sums, the check of that, and the bound for all other sums.

A matrix library chooses the order of a sum by the shapes, the number of threads and the
instruction set. It also chooses whether to multiply by alpha, the product of the tensor scales,
before the sum or after it. So tests ask for equal bits of three things only:

    casts            they compute each block in one fixed order
    exact sums       every partial sum fits fp32, so no order rounds
    a repetition     the same product twice in one process: equal shapes, strides, dtypes and
                     number of threads, operands in memory that torch allocates, which begins at
                     multiples of 64 bytes. oneMKL's guide names these and the CPU as what its
                     results depend on; oneDNN repeats results in a fixed environment.

Any other two results are compared within a bound. The errors of k products whose absolute values
sum to S, added in fp32 in any order, stay below k u S / (1 - k u), u = 2^-24 (the standard bound).
"""

import math

import torch
from minifloat._native import ops
from torch.utils._python_dispatch import TorchDispatchMode

U = 2.0**-24  # the largest relative error of one fp32 rounding
LARGEST = 7.0  # 448 = 7 * 2^6 and 57344 = 7 * 2^13, the largest E4M3 and E5M2 values


def integers(seed, *shape):
    """Draws integers from -4 to 4 and one 7, whose products have exact sums.

    E4M3, E5M2 and E2M1 hold each of them under a scale that is a power of two. The 7 makes a
    scale by the tensor's amax one too: amax / 448 = 2^-6, amax / 57344 = 2^-13. So codes are exact,
    products are integers times a power of two, and a sum of k of them stays below 2^24 of that
    unit for k up to 2^18. An amax of a part of the tensor is not 7 in general, so a scale
    by the wrong amax rounds the codes and shows.
    """
    x = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()
    x.view(-1)[0] = LARGEST
    return x


def order_bound(magnitude, terms, roundings=0, unit=U):
    """Returns the largest difference of two fp32 sums of the same terms in any two orders.

    Args:
        magnitude: sum of the terms' absolute values, any shape.
        terms: how many terms a sum has.
        roundings: of the results of both together, after the sums.
        unit: the largest relative error of one of these.
    """
    return (2 * terms * U / (1 - terms * U) + roundings * unit) * magnitude


def require_same_sums(got, want, magnitude, terms, what="", **more):
    """Fails where two sums of the same terms differ by more than order_bound."""
    excess = (got.double() - want.double()).abs() - order_bound(magnitude.double(), terms, **more)
    worst = excess.max().item()
    assert worst <= 0, f"{what}: past the bound by {worst}, {int((excess > 0).sum())} elements"


# ---- the check that sums are exact ---------------------------------------------------------------


def granule(x, dim):
    """Finds the largest power of two that divides all of x along dim; infinity for zeros."""
    mantissa, exponent = torch.frexp(x.double())
    whole = (mantissa * 2.0**53).long()
    low = (whole & -whole).double()  # the lowest bit that is set
    steps = torch.where(whole == 0, math.inf, torch.ldexp(low, exponent - 53))
    return steps.amin(dim)


def require_exact_sum(magnitude, step, what):
    """Fails unless partial sums, multiples of `step` up to `magnitude`, fit fp32's 24 bits."""
    assert magnitude.isfinite().all(), what
    worst = (magnitude / step).max().item()
    assert worst <= 2.0**24, f"{what}: a sum needs {worst:.4g} steps, fp32 has 2^24"


class ExactSums(TorchDispatchMode):
    """A mode that fails at the first product or sum of rows whose result depends on the order."""

    def __init__(self):
        super().__init__()
        self.products = self.sums = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is ops.scaled_mm.default:
            self.check_product(*args, **(kwargs or {}))
        elif func is torch.ops.aten.sum.dim_IntList and args[0].is_floating_point():
            x, dims = args[0].double(), tuple(args[1])
            require_exact_sum(x.abs().sum(dims), granule(x.flatten(), 0), "sum")
            self.sums += 1
        return func(*args, **(kwargs or {}))

    def check_product(self, a, a_scale, a_amax, b, b_scale, b_amax, product, k, bias=None, **_):
        specs = product.split(",")[0].split("*")
        sides = [(a, a_scale, specs[0]), (b, b_scale, specs[1])]
        (left, of_a), (right, of_b) = (self.values(*side, k) for side in sides)
        magnitude = left.abs() @ right.abs().t()
        step = granule(left, 1)[:, None] * granule(right, 1)
        require_exact_sum(magnitude, step, product)
        if bias is not None:
            magnitude, step = magnitude * of_a * of_b + bias.abs(), step * of_a * of_b
            require_exact_sum(magnitude, torch.minimum(step, granule(bias, 0)), f"{product} + bias")
        self.products += 1

    @staticmethod
    def values(codes, scale, spec, k):
        """Returns the values of one operand, in float64, and the factor of the whole sum."""
        assert not spec.startswith("nvfp4"), f"{spec}: its tensor scale is no power of two"
        factor = scale.item() if "/tensor" in spec else 1.0
        assert math.frexp(factor)[0] == 0.5, f"{spec}: its scale is no power of two: {factor}"
        if codes.dtype == torch.uint8:
            codes = ops.decode(codes, scale, spec, k)
        return codes.double(), factor
