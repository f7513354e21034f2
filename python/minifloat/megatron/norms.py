"""Norms of Megatron-Core's models without Transformer Engine and Apex, also within a layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor, nn

# The last one's norms would give float32 to a head in bfloat16, as those of local specs do.
REFUSED = (
    "layernorm_zero_centered_gamma",
    "memory_efficient_layer_norm",
    "fp32_residual_connection",
)


def require_norm(config: Any) -> None:
    """Raises ValueError where torch has no such norm."""
    if config.normalization not in ("LayerNorm", "RMSNorm"):
        raise ValueError(
            f"normalization: expected 'LayerNorm' or 'RMSNorm', got {config.normalization!r}"
        )
    for option in REFUSED:
        if getattr(config, option):
            raise ValueError(f"{option}: expected False with torch's norms, got True")


def mark_sequence_parallel(parameters: Iterable[Any], config: Any) -> None:
    """Has Megatron sum the gradients of a norm over the ranks that cut its tokens."""
    for parameter in parameters:
        parameter.sequence_parallel = config.sequence_parallel


class Norm:
    """torch's LayerNorm or RMSNorm, by the config, also under sequence parallelism.

    Raises:
        ValueError: torch has no such norm.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **others: Any) -> Any:
        require_norm(config)
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        mark_sequence_parallel(norm.parameters(), config)
        return norm


class LayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """A norm and a ColumnParallelLinear in one module, with the names of Transformer Engine's.

    Its parameters are layer_norm_weight (K), layer_norm_bias (K) of a LayerNorm, weight and bias.

    Args: as those of ColumnParallelLinear.

    Raises:
        ValueError: torch has no such norm.
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
        require_norm(config)
        super().__init__(input_size, output_size, config=config, **others)
        options = {"dtype": self.weight.dtype, "device": self.weight.device}
        self.layer_norm_weight = nn.Parameter(torch.ones(input_size, **options))
        bias = nn.Parameter(torch.zeros(input_size, **options))
        is_centered = config.normalization == "LayerNorm"
        self.register_parameter("layer_norm_bias", bias if is_centered else None)
        mark_sequence_parallel((self.layer_norm_weight, bias), config)

    def forward(self, input_: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        shape, eps = (self.input_size,), self.config.layernorm_epsilon
        weight, bias = self.layer_norm_weight, self.layer_norm_bias
        if bias is None:
            normed = F.rms_norm(input_, shape, weight, eps)
        else:
            normed = F.layer_norm(input_, shape, weight, bias, eps)
        return super().forward(normed, **options)
