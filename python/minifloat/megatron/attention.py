"""Megatron-Core's attention without Transformer Engine, by torch's scaled_dot_product_attention."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor


class DotProductAttention(dot_product_attention.DotProductAttention):  # type: ignore[misc]
    """Megatron's DotProductAttention, which never holds the scores of all pairs of tokens.

    Where torch's function computes something else (a mask of the caller's, a sliding window, an
    offset of the softmax, more keys than queries), Megatron's own forward runs.

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
        """Computes (queries, batch, heads · width) of query, key and value (tokens, batch, heads,
        width).
        """
        is_causal = self.attn_mask_type == AttnMaskType.causal and len(query) == len(key)
        is_whole = self.attn_mask_type == AttnMaskType.no_mask
        is_plain = self.softmax_offset is None and self.scale_mask_softmax.window_size is None
        others = (attention_bias, packed_seq_params)
        if not (is_causal or is_whole) or not is_plain or any(o is not None for o in others):
            return super().forward(query, key, value, attention_mask, attn_mask_type, *others)
        by_layer = self.layer_number if self.config.apply_query_key_layer_scaling else 1
        dropout = self.attention_dropout.p if self.training else 0.0
        draws = dropout > 0 and not self.config.sequence_parallel
        with get_cuda_rng_tracker().fork() if draws else nullcontext():
            y = F.scaled_dot_product_attention(
                query.permute(1, 2, 0, 3),
                key.permute(1, 2, 0, 3),
                value.permute(1, 2, 0, 3),
                dropout_p=dropout,
                is_causal=is_causal,
                scale=self.softmax_scale * by_layer,
                enable_gqa=query.shape[2] != key.shape[2],
            )
        return y.permute(2, 0, 1, 3).flatten(2)
