"""Sums of weight gradients over micro-batches, in float32: where backward adds them.

    "main_grad"    the weight's attribute main_grad, which the caller allocates and zeroes; autograd
                   receives no gradient of the weight
    "grad"         the weight's .grad, which the first micro-batch allocates

torch/layers/weight_sums.h describes both; docs/accumulation.md says which one to use.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

MAIN_GRAD, GRAD = "main_grad", "grad"
PLACES = (None, MAIN_GRAD, GRAD)


def require_accumulate(accumulate: str | None) -> None:
    if accumulate not in PLACES:
        raise ValueError(f"accumulate: expected one of {PLACES}, got {accumulate!r}")


class Sums(NamedTuple):
    """The arguments of the op `linear` that say where a weight's gradient is added.

    main_grad: (N, K), float32, or None.
    accumulate: "", "grad" or "main_grad".
    received: what autograd receives instead of an added gradient: "" nothing, "empty" or "zeros".
    """

    main_grad: Tensor | None = None
    accumulate: str = ""
    received: str = ""


def weight_sums(layer: Any, weight: Tensor) -> Sums:
    """Returns where this forward's gradient of the weight is added.

    Sets weight.grad_added_to_main_grad to True where the weight has it, except in compiled code.

    Args:
        layer: mf.Linear, with `accumulate`.
        weight: (N, K), its parameter.

    Raises:
        ValueError: the weight is a DTensor, has no main_grad, or has a .grad that is not float32.
    """
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return Sums()
    if hasattr(weight, "device_mesh"):
        raise ValueError(
            f"accumulate={layer.accumulate!r}: expected a weight that tensor parallelism has not "
            f"cut, got a DTensor in {layer.fqn}; convert such layers without accumulate"
        )
    if layer.accumulate == GRAD:
        require_float32_grad(layer, weight)
        return Sums(None, GRAD)
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            f"accumulate='main_grad': expected an attribute main_grad of {layer.fqn}'s weight, "
            f"float32 {tuple(weight.shape)} on {weight.device}, got none"
        )
    if not hasattr(weight, "grad_added_to_main_grad"):
        return Sums(main_grad, MAIN_GRAD)
    # Megatron's hooks wait for a gradient, and add it to main_grad where this attribute is False.
    if torch.compiler.is_compiling():
        return Sums(main_grad, MAIN_GRAD, "zeros")
    weight.grad_added_to_main_grad = True
    is_read = getattr(weight, "zero_out_wgrad", False)
    return Sums(main_grad, MAIN_GRAD, "zeros" if is_read else "empty")


def require_float32_grad(layer: Any, weight: Tensor) -> None:
    """Raises ValueError where the weight's .grad would not be float32."""
    if weight.dtype == torch.float32:
        return
    if torch.compiler.is_compiling():
        raise ValueError(
            f"accumulate='grad': expected a float32 weight under torch.compile, which rounds the "
            f"gradient to the weight's dtype, got {weight.dtype} in {layer.fqn}"
        )
    if weight.is_leaf and weight.grad_dtype != torch.float32:
        raise ValueError(
            f"accumulate='grad': expected a weight whose .grad is float32, got {weight.dtype} in "
            f"{layer.fqn}; set weight.grad_dtype = torch.float32, or use accumulate='main_grad'"
        )
