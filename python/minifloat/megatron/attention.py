"""Megatron-Core's attention without Transformer Engine, by torch's scaled_dot_product_attention."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

MASKED = -10000.0  # of a score that is left out, as in Megatron's softmax


class DotProductAttention(dot_product_attention.DotProductAttention):  # type: ignore[misc]
    """Megatron's DotProductAttention, which never holds the scores of all pairs of tokens.

    A mask of the caller's is added to the scores; pass none where attention is causal, and torch's
    faster kernels run. Where torch's function computes something else (a sliding window, an offset
    of the softmax, more keys than queries without a mask), Megatron's own forward runs.

    Args:
        k_channels, v_channels: the widths of a head, as multi_latent_attention passes them.
        others: as those of Megatron's.

    Raises:
        ValueError: the config asks for what this attention has not.
    """

    def __init__(
        self,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **others: Any,
    ) -> None:
        config = others.get("config", args[0] if args else None)
        for option, expected in {
            "context_parallel_size": 1,
            "qk_clip": False,
            "log_max_attention_logit": False,
        }.items():
            if (value := getattr(config, option, expected)) != expected:
                raise ValueError(
                    f"{option}: expected {expected} with minifloat.megatron.backend(), whose "
                    f"attention is torch's, got {value}"
                )
        super().__init__(*args, **others)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Computes attention, of which the pairs where attention_mask is True have no part.

        Args:
            query, key, value: (tokens, batch, heads, width), float32 or bfloat16.
            attention_mask: bool (batch or 1, 1, queries, keys); None: all pairs, or causal ones.
            others: as those of Megatron's.

        Returns:
            (queries, batch, heads · width).
        """
        has_mask = attention_mask is not None
        is_causal = self.attn_mask_type == AttnMaskType.causal and not has_mask
        is_whole = has_mask or self.attn_mask_type == AttnMaskType.no_mask
        is_causal = is_causal and len(query) == len(key)
        is_plain = self.softmax_offset is None and self.scale_mask_softmax.window_size is None
        others = (attention_bias, packed_seq_params)
        if not (is_causal or is_whole) or not is_plain or any(o is not None for o in others):
            return super().forward(query, key, value, attention_mask, attn_mask_type, *others)
        bias = None
        if attention_mask is not None:
            bias = torch.zeros_like(attention_mask, dtype=query.dtype)
            bias.masked_fill_(attention_mask, MASKED)
        by_layer = self.layer_number if self.config.apply_query_key_layer_scaling else 1
        dropout = self.attention_dropout.p if self.training else 0.0
        draws = dropout > 0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if draws else nullcontext():
            y = F.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                attn_mask=bias,
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.softmax_scale * by_layer,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        return y.permute(2, 0, 1, 3).flatten(2)
