"""What moving a model does to weights that are codes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...tensor.quantized_tensor import QuantizedTensor
from .recipe_state import WEIGHT_DTYPES


def require_primary_dtype(fqn: str, fn: Callable[[Tensor], Tensor], weight: Tensor | None) -> None:
    """Raises ValueError where `fn`, such as that of model.half(), would change codes to a dtype.

    Args:
        fqn: the layer's name.
        fn: what nn.Module applies to each parameter.
        weight: of the layer, or this rank's part of it. Only codes are refused.
    """
    if not isinstance(weight, QuantizedTensor):
        return
    dtype = fn(torch.empty(0, dtype=weight.dtype, device=weight.device)).dtype
    if dtype not in WEIGHT_DTYPES:
        what = {torch.float16: ".half()", torch.float64: ".double()"}.get(dtype, f".to({dtype})")
        raise ValueError(
            f"{what} of a model with primary weights: expected torch.bfloat16 or torch.float32, "
            f"which {fqn} computes in, got {dtype}; call model.bfloat16() or model.float() now: "
            f"other parameters may be in {dtype} already, which mf.restore_(model) would keep"
        )


def quantized_again(before: Tensor | None, now: Tensor) -> nn.Parameter | None:
    """Returns codes of a weight that was codes, and that to_empty returned in high precision.

    None: the weight is as it was.
    """
    if not isinstance(before, QuantizedTensor) or isinstance(now, QuantizedTensor):
        return None
    codes = QuantizedTensor.from_tensor(now.detach(), *before.specs)
    return nn.Parameter(codes, requires_grad=before.requires_grad)
