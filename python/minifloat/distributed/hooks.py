"""Functions of FSDP2 and tensor parallelism that layers call.

Importing this module registers them with `nn` (nn/hooks.py).

DTensor takes seconds to import, so tensor parallelism is imported at the first DTensor weight.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..nn.hooks import hooks
from ..nn.linear import Linear
from .fsdp.fsdp_group import accumulate_gradients
from .fsdp.gather import plan_experts, plan_gather
from .fsdp.weight import (
    precompute_scales,
    require_no_shard,
    wrap_sharded_experts,
    wrap_sharded_weight,
)


def reduce_amaxes(amaxes: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Returns the largest amaxes of all ranks, elementwise, in one all-reduce.

    Bits of magnitudes order like the values, NaN above infinity.
    """
    bits = amaxes.abs().view(torch.int32)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32)


def linear(*args: Any, **kwargs: Any) -> Tensor:
    """Computes mf.linear with a weight that is a DTensor."""
    from .tensor_parallel import dtensor

    return dtensor.linear(*args, **kwargs)


def forward(layer: nn.Module, x: Tensor) -> Tensor:
    """Computes the forward of a layer whose weight is a DTensor."""
    from .tensor_parallel import dtensor

    return dtensor.module_linear(cast(Linear, layer), x)


hooks.plan_gather = plan_gather
hooks.adopt_weight = wrap_sharded_weight
hooks.plan_experts = plan_experts
hooks.adopt_experts = wrap_sharded_experts
hooks.require_no_shard = require_no_shard
hooks.precompute_scales = precompute_scales
hooks.reduce_amaxes = reduce_amaxes
hooks.accumulate_gradients = accumulate_gradients
hooks.linear = linear
hooks.forward = forward
