"""Gradients that FSDP2 adds over micro-batches in float32.

FSDP2 keeps the gradient of a gathered parameter in that parameter's .grad until it is reduced. The
first .grad of a bfloat16 parameter would be bfloat16. `grad_dtype` makes it float32, so that no
micro-batch's gradient is rounded to bfloat16. FSDP2 reduces the gradients of a group together, in
one dtype, so all parameters of the group get this dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .fsdp_group import UnknownFsdpError, find_fsdp_group, require_names


def accumulate_gradients(layer: nn.Module, parameter: Tensor) -> None:
    """Makes .grad float32 of all parameters that FSDP2 gathers together with the layer's weight.

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
    require_names(group, "mp_policy")
    reduce_dtype = group.mp_policy.reduce_dtype
    if reduce_dtype != torch.float32:
        raise ValueError(
            "accumulate='grad': expected fully_shard with MixedPrecisionPolicy("
            f"reduce_dtype=torch.float32) around {parameter.dtype} weights, got {reduce_dtype}"
        )
    # A parameter that was not gathered yet has no unsharded one.
    gathered = [getattr(sharded, "_unsharded_param", None) for sharded in group.fsdp_params]
    if not any(whole is parameter for whole in gathered):
        raise UnknownFsdpError(
            "accumulate='grad': expected the gathered weight as _unsharded_param of one of FSDP2's "
            f"parameters, as torch 2.11 has it, got another tensor in torch {torch.__version__}"
        )
    for whole in gathered:
        if whole is not None and whole.requires_grad and whole.grad is None:
            whole.grad_dtype = torch.float32
