"""Normalisations of rows whose bits are the same on every device.

    rms_norm      y = x / sqrt(mean(x^2) + eps) * weight
    layer_norm    y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

Linear layers read their results as codes, which torch.ops.minifloat.norm_operands writes.
"""

from __future__ import annotations

from torch import Tensor

from .._native import ops
from ..checks import require_bool


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, rounded: bool = False
) -> Tensor:
    """Computes the RMSNorm of the last dimension in fp32, differentiably.

    Args:
        x: (…, D), float32 or bfloat16.
        weight: (D), float32 or bfloat16; None: ones.
        eps: added to the mean of the squares.
        rounded: rounds to x's dtype before the weight too, as Hugging Face's LlamaRMSNorm does;
            torch's nn.RMSNorm rounds once.

    Returns:
        y (…, D), in x's dtype.

    Raises:
        TypeError, ValueError: an argument is not as expected.

    Source: docs/numerics.md, section 12.
    """
    kind = "rms_rounded" if require_bool("rounded", rounded) else "rms"
    return ops.norm(x, weight, None, kind, eps)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Computes the LayerNorm of the last dimension in fp32, differentiably.

    Args:
        x: (…, D), float32 or bfloat16.
        weight: (D), float32 or bfloat16; None: ones.
        bias: (D), float32 or bfloat16; None: zeros.
        eps: added to the variance.

    Returns:
        y (…, D), in x's dtype.

    Raises:
        TypeError, ValueError: an argument is not as expected.

    Source: docs/numerics.md, section 12.
    """
    return ops.norm(x, weight, bias, "layer", eps)
