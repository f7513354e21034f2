"""Formulas for torch.utils.flop_counter: the floating-point operations of the products."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import register_flop_formula

from .._native import ops


@register_flop_formula(ops.scaled_mm)
def scaled_mm_flops(
    a_shape: torch.Size,
    a_scale: object,
    a_amax: object,
    b_shape: torch.Size,
    *others: object,
    k: int,
    **options: object,
) -> int:
    """Returns 2 M N K of a (M, K) · b (N, K)ᵀ, as for the product in high precision.

    K is the operands' length, without the padding that packing, transforms and groups add to codes.
    Of groups it counts all rows: each is multiplied once.
    """
    return 2 * a_shape[0] * b_shape[-2] * k
