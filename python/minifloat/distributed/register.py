"""Registers the functions of FSDP2 and tensor parallelism that layers call, in nn/registry.py.

DTensor takes seconds to import, so tensor parallelism is imported at the first DTensor weight.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..nn.linear import Linear
from ..nn.registry import distributed_functions
from .fsdp.gather import plan_experts, plan_gather
from .fsdp.private_state import (
    UnknownFsdpError,
    find_fsdp_group,
    let_fsdp_assign,
    policy_of,
)
from .fsdp.weight import (
    exchange_scales,
    require_no_shard,
    require_same_scales,
    wrap_sharded_experts,
    wrap_sharded_weight,
)
from .handshake import raise_on_all, require_same
from .reshard import reshard
from .same_layers import group_of_step


def require_same_names(kind: str, names: list[str], group: dist.ProcessGroup) -> None:
    """Raises ValueError where ranks of a group are missing, or name other layers.

    kind: of the exchange that follows, as "mf.training_state of".
    """
    require_same(
        kind,
        ", ".join(names),
        group,
        expected=f"expected all {{}} ranks to call {kind} {{}}",
        differs=f"expected {kind} the same layers on all ranks",
    )


def reduce_amaxes(amaxes: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the largest amaxes of all ranks, elementwise, in one all-reduce.

    Bits of magnitudes order like the values, NaN above infinity.
    """
    bits = amaxes.abs().view(torch.int32)
    dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=group)
    return bits.view(torch.float32)


def accumulate_gradients(layer: nn.Module, parameter: Tensor) -> None:
    """Makes .grad float32 of all parameters that FSDP2 gathers together with the layer's weight.

    FSDP2 keeps the gradient of a gathered parameter in that parameter's .grad until it is reduced.
    The first .grad of a bfloat16 parameter would be bfloat16. `grad_dtype` makes it float32, so
    that no micro-batch's gradient is rounded to bfloat16. FSDP2 reduces the gradients of a group
    together, in one dtype, so all parameters of the group get this dtype.

    Args:
        layer: mf.Linear under accumulate="grad".
        parameter: (N, K), to be set as the layer's weight. Nothing is done for a sharded one, or
            where its dtype or grad_dtype is float32.

    Raises:
        ValueError: FSDP2 reduces gradients in another dtype than float32.
        UnknownFsdpError: this torch's FSDP2 has other private names than those that are read here.
    """
    is_gathered = isinstance(parameter, nn.Parameter) and not hasattr(parameter, "device_mesh")
    if not is_gathered or torch.float32 in (parameter.dtype, parameter.grad_dtype):
        return
    try:
        group = find_fsdp_group(layer)
    except LookupError:  # not a parameter of FSDP2: require_float32_grad checks it in the forward
        return
    reduce_dtype = policy_of(group).reduce_dtype
    if reduce_dtype != torch.float32:
        raise ValueError(
            "accumulate='grad': expected fully_shard with MixedPrecisionPolicy("
            f"reduce_dtype=torch.float32) around {parameter.dtype} weights, got {reduce_dtype}"
        )
    # A parameter that was not gathered yet has no unsharded one.
    gathered = [getattr(sharded, "_unsharded_param", None) for sharded in group.fsdp_params]
    if not any(whole is parameter for whole in gathered):
        raise UnknownFsdpError("no parameter has the gathered weight as _unsharded_param")
    for whole in gathered:
        if whole is not None and whole.requires_grad and whole.grad is None:
            whole.grad_dtype = torch.float32


def linear(*args: Any, **kwargs: Any) -> Tensor:
    """Computes mf.linear with a weight that is a DTensor."""
    from .tensor_parallel.linear import linear

    return linear(*args, **kwargs)


def forward(layer: nn.Module, x: Tensor) -> Tensor:
    """Computes the forward of a layer whose weight is a DTensor."""
    from .tensor_parallel.linear import module_linear

    return module_linear(cast(Linear, layer), x)


distributed_functions.plan_gather = plan_gather
distributed_functions.adopt_weight = wrap_sharded_weight
distributed_functions.let_fsdp_assign = let_fsdp_assign
distributed_functions.plan_experts = plan_experts
distributed_functions.adopt_experts = wrap_sharded_experts
distributed_functions.require_no_shard = require_no_shard
distributed_functions.exchange_scales = exchange_scales
distributed_functions.require_same_scales = require_same_scales
distributed_functions.reshard = reshard
distributed_functions.group_of_step = group_of_step
distributed_functions.raise_on_all = raise_on_all
distributed_functions.require_same_names = require_same_names
distributed_functions.reduce_amaxes = reduce_amaxes
distributed_functions.accumulate_gradients = accumulate_gradients
distributed_functions.linear = linear
distributed_functions.forward = forward
