"""mf.checkpoint_policy: what an activation checkpoint keeps, and what backward computes again.

A layer's backward reads the codes of its input. In eager mode and compiled code forward saves them,
1 byte an element under FP8, beside what norms, attention and activations save anyway:

    saved by a block of Llama, bytes a token of width D, hidden width H
        bf16, nothing checkpointed      18 D + 6 H      and q, k, v
        FP8, nothing checkpointed       13 D + 5 H
        this policy                      8 D + 4 H

Under the policy the results of products and of attention are kept. From them backward computes
norms, activations and casts again, which takes no product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from .._native import ops
from ..private_torch import collective_ops

aten = torch.ops.aten
# Products of codes: the one of eager code, and those of compiled layers.
PRODUCTS = {
    ops.scaled_mm.default,
    ops.linear_forward.default,
    ops.linear_forward_delayed.default,
    ops.mlp_forward.default,
    ops.mlp_forward_delayed.default,
}
# The ops whose results are kept: products, attention, messages between ranks, and what the cast of
# an input scales by, a number or one a column.
KEPT = {
    ops.amax.default,
    *PRODUCTS,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_mm.default,
    aten._grouped_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
    torch.ops.higher_order.flex_attention,
    *collective_ops(),
}


def checkpoint_policy(ctx: object, op: object, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Tells torch's selective checkpoints to keep products and attention, and no codes.

    Pass it to torch.utils.checkpoint.create_selective_checkpoint_contexts, in eager mode and in
    compiled code. Gradients have the same bits as without a checkpoint. In compiled code the codes
    of weights are kept too, unless mf.quantize_ was called with recompute="weight".

    Args:
        ctx: torch's SelectiveCheckpointContext, which is not read.
        op: an op of the forward pass, a torch.ops overload.
        args, kwargs: of the op, which are not read.

    Returns:
        MUST_SAVE or PREFER_RECOMPUTE.

    Example:
        >>> mf.checkpoint_policy(None, torch.ops.aten.mm.default)
        <CheckpointPolicy.MUST_SAVE: 0>
        >>> from functools import partial
        >>> from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
        >>> contexts = partial(create_selective_checkpoint_contexts, mf.checkpoint_policy)
        >>> block = torch.nn.Sequential(torch.nn.RMSNorm(64), torch.nn.Linear(64, 64))
        >>> report = mf.quantize_(block, "mxfp8")
        >>> x = torch.ones(32, 64, requires_grad=True)
        >>> checkpoint(block, x, use_reentrant=False, context_fn=contexts).shape
        torch.Size([32, 64])
    """
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
