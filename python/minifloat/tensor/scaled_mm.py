"""Products of two quantized tensors, a (m, k) · b (n, k)ᵀ, both read K-major."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .._native import ops
from .quantized import Quantized, require_quantized
from .quantized_tensor import QuantizedTensor


def _operand(name: str, x: Quantized | Tensor) -> tuple[list[Tensor], str, int]:
    """Returns codes, scale and amax, the spec and the contraction length of a factor."""
    if isinstance(x, QuantizedTensor) and x.dim() == 2:
        if x.rowwise is None:
            raise ValueError(
                f"scaled_mm: expected {name} with rowwise codes, which are read along k, got a "
                "QuantizedTensor with columnwise ones alone"
            )
        x = x.rowwise
    if isinstance(x, Quantized):
        require_quantized(f"scaled_mm: {name}", x)
        if x.groups is not None:
            raise ValueError(f"scaled_mm: expected {name} without groups, got a grouped operand")
        return [x.codes, x.scale, x.amax], x.spec, x.shape[-1]
    if not isinstance(x, Tensor):
        raise TypeError(
            f"scaled_mm: expected {name} as Quantized or Tensor, got {type(x).__name__}"
        )
    if x.dim() != 2:
        raise ValueError(f"scaled_mm: expected {name} of 2 dimensions, got {x.dim()}")
    none = x.new_empty(0, dtype=torch.float32)
    return [x, none, none], "bf16", x.shape[-1]


def scaled_mm(
    a: Quantized | Tensor,
    b: Quantized | Tensor,
    *,
    fast: bool = False,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Computes a (m, k) · b (n, k)ᵀ + bias, rounded once.

    Args:
        a: (m, k) as read. A Tensor, float32 or bfloat16, is an operand in high precision. Of a
            QuantizedTensor the rowwise codes are read.
        b: (n, k) as read, likewise.
        fast: whether an FP8 engine may accumulate fast; exact products ignore this.
        bias: (n), rounded to `out_dtype` before it is added.
        out_dtype: bfloat16 or float32.

    Returns:
        (m, n) in `out_dtype`.

    Raises:
        TypeError: an operand is neither Quantized nor Tensor.
        ValueError: the operands' shapes or transforms do not fit each other, a QuantizedTensor has
            no rowwise codes, or another argument is not as expected.

    Source: docs/numerics.md, section 9.

    Example:
        >>> a, b = (mf.tensor.quantize(torch.full((n, 32), 0.5), "mxfp8") for n in (2, 3))
        >>> mf.tensor.scaled_mm(a, b)
        tensor([[8., 8., 8.],
                [8., 8., 8.]], dtype=torch.bfloat16)
    """
    a_tensors, a_spec, k = _operand("a", a)
    b_tensors, b_spec, b_k = _operand("b", b)
    if k != b_k:
        raise ValueError(f"scaled_mm: expected a (m, k) and b (n, k), got k = {k} and {b_k}")
    product = f"{a_spec}*{b_spec}" + (",fast" if fast else "")
    return ops.scaled_mm(*a_tensors, *b_tensors, product, k=k, bias=bias, out_dtype=out_dtype)


@register_flop_formula(ops.scaled_mm)
def scaled_mm_flops(
    a: torch.Size,
    scale: object,
    amax: object,
    b: torch.Size,
    *others: object,
    k: int,
    **how: object,
) -> int:
    """Returns 2 M N K of a (M, K) · b (N, K)ᵀ, as for the product in high precision.

    K is the operands' length, without the padding that packing, transforms and groups add to codes.
    Of groups it counts all rows: each is multiplied once.
    """
    return 2 * a[0] * b[-2] * k


@register_flop_formula([ops.linear_forward, ops.linear_forward_delayed])
def linear_forward_flops(
    x: torch.Size,
    scale: object,
    amax: object,
    decoded: object,
    w: torch.Size,
    *others: object,
    **how: object,
) -> int:
    """Returns 2 M N K of x (M, K) · W (N, K)ᵀ, or of experts' rows, each of which has one W."""
    return 2 * x[0] * prod(w[-2:])


@register_flop_formula([ops.linear_backward, ops.linear_backward_delayed])
def linear_backward_flops(
    grad: torch.Size,
    saved: object,
    recipe: object,
    needed: list[bool],
    k: int,
    *others: object,
    **how: object,
) -> int:
    """Returns 2 M N K of each of the two products that are needed, from grad (…, N)."""
    return 2 * prod(grad) * k * sum(needed[:2])


@register_flop_formula([ops.mlp_forward, ops.mlp_forward_delayed])
def mlp_forward_flops(
    x: torch.Size,
    scale: object,
    amax: object,
    decoded: object,
    weights: list[torch.Size],
    *others: object,
    **how: object,
) -> int:
    """Returns 2 M N K of each weight's product, from x (M, K)."""
    return sum(2 * x[0] * prod(w) for w in weights)


@register_flop_formula([ops.mlp_backward, ops.mlp_backward_delayed])
def mlp_backward_flops(
    grad: torch.Size,
    saved: list[torch.Size],
    recipe: object,
    activation: object,
    needs_dx: bool,
    needs_dw: list[bool],
    needs_db: list[bool],
    k: int,
    *others: object,
    **how: object,
) -> int:
    """Returns 2 M N K of each product that is needed, from grad (…, N) and gate (M, I)."""
    inputs = len(saved) // 3 - 3
    rows, hidden = saved[-2]
    needs_dh = needs_dx or any(needs_dw[:inputs]) or any(needs_db[:inputs])
    of_output = needs_dh + needs_dw[inputs]
    of_inputs = inputs * needs_dx + sum(needs_dw[:inputs])
    return 2 * prod(grad) * hidden * of_output + 2 * rows * hidden * k * of_inputs
