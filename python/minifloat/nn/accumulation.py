"""Sums a weight's gradients over micro-batches in float32, in one of two tensors.

    "main_grad"    the weight's attribute main_grad, which the caller allocates and zeroes
    "grad"         the weight's .grad, which the first micro-batch allocates

The op `linear` adds each gradient to that tensor itself. This module checks the tensor, and passes
it to the op. Other code may read the weight too, such as a tied embedding. Autograd adds that
gradient to .grad. Under "main_grad" a hook of the weight then moves it to main_grad.

torch/layers/weight_sums.h describes both; docs/memory.md says which one to use.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..private_torch import is_transformed
from .state.recipe_state import RecipeState

MAIN_GRAD, GRAD = "main_grad", "grad"
ACCUMULATE = (None, MAIN_GRAD, GRAD)  # of mf.quantize_
TAKER = "gradient_taker"  # of a layer: the handle of its weight's hook
DDP = vars(DistributedDataParallel)  # torch.compile guards the values of a dict, not of a class


class Sums(TypedDict, total=False):
    """The arguments of the op `linear` that choose where it adds a weight's gradient; {}: nowhere.

    main_grad: (N, K), float32; left out under "grad".
    accumulate: "grad" or "main_grad".
    received: what autograd receives instead of an added gradient, "empty" or "zeros"; left out:
        nothing.
    """

    main_grad: Tensor
    accumulate: str
    received: str


def weight_sums(layer: RecipeState, weight: Tensor) -> Sums:
    """Returns where this forward's gradient of the weight is added.

    Sets weight.grad_added_to_main_grad, where the weight has it, to whether the op adds the
    gradient, except in compiled code.

    Args:
        layer: mf.Linear, with `accumulate`.
        weight: (N, K), its parameter.

    Raises:
        ValueError: the weight is a DTensor, has no main_grad, or has a .grad that is not float32;
            or something waits for a gradient that main_grad would take.
    """
    if not (layer.accumulate and torch.is_grad_enabled() and weight.requires_grad):
        return {}
    if hasattr(weight, "device_mesh"):
        raise ValueError(
            f"accumulate={layer.accumulate!r}: expected a weight that tensor parallelism has not "
            f"cut, got a DTensor in {layer.fqn}; convert such layers without accumulate"
        )
    if not torch.compiler.is_compiling():
        if is_transformed():  # torch.func takes the gradient: the op adds none
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = False
            return {}
        hooks: Any = weight._backward_hooks
        if hooks is not None and not hooks:  # torch.load, or a removed hook, leaves an empty dict
            weight._backward_hooks = None
    if layer.accumulate == GRAD:
        require_float32_grad(layer, weight)
        return {"accumulate": GRAD}
    main_grad = getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            f"accumulate='main_grad': expected an attribute main_grad of {layer.fqn}'s weight, "
            f"float32 {tuple(weight.shape)} on {weight.device}, got none, as under FSDP2, whose "
            "reduction would miss it; convert with accumulate='grad' there"
        )
    if not hasattr(weight, "grad_added_to_main_grad"):
        if DDP["_active_ddp_module"] is not None:
            raise ValueError(
                f"accumulate='main_grad': expected {layer.fqn} outside DistributedDataParallel, "
                "which reduces .grad and would miss main_grad; convert with accumulate='grad', or "
                "call the model without DistributedDataParallel, and all-reduce main_grad and the "
                "other parameters' .grad before the optimizer's step"
            )
        if not torch.compiler.is_compiling():  # compiled code: take_gradient checks, in backward
            require_no_hook(weight, f"{layer.fqn}'s weight")
        return {"main_grad": main_grad, "accumulate": MAIN_GRAD}
    # Megatron's hooks wait for a gradient, and add it to main_grad where this attribute is False.
    if torch.compiler.is_compiling():
        received = "zeros"
    else:
        weight.grad_added_to_main_grad = True
        received = "zeros" if getattr(weight, "zero_out_wgrad", False) else "empty"
    return {"main_grad": main_grad, "accumulate": MAIN_GRAD, "received": received}


def require_no_hook(weight: Tensor, name: str) -> None:
    """Raises ValueError where a hook of the weight would receive no gradient."""
    after = (weight._post_accumulate_grad_hooks or {}).values()
    if weight._backward_hooks or any(hook is not take_gradient for hook in after):
        raise ValueError(
            f"accumulate='main_grad': expected no gradient hook on {name}, got one, which would "
            "receive no gradient; use accumulate='grad'"
        )


def take_gradients(layer: RecipeState) -> None:
    """Has the layer's weight, under "main_grad" alone, move what .grad receives to main_grad.

    Call it where the weight or `accumulate` may have changed.

    Args:
        layer: mf.Linear.
    """
    handle = layer.__dict__.pop(TAKER, None)
    if handle is not None:
        handle.remove()
    weight = layer._parameters.get("weight")
    if layer.accumulate != MAIN_GRAD or weight is None or hasattr(weight, "device_mesh"):
        return
    is_trained = weight.requires_grad
    # torch takes no hook of a frozen weight, which may be trained later.
    weight.requires_grad_(True)
    layer.__dict__[TAKER] = weight.register_post_accumulate_grad_hook(take_gradient)
    weight.requires_grad_(is_trained)


def take_gradient(weight: Tensor) -> None:
    """Moves a weight's .grad to its main_grad, unless Megatron's hooks do.

    Autograd calls it in compiled backward passes too, which find a hook of the weight here.
    """
    main_grad, grad = getattr(weight, "main_grad", None), weight.grad
    if main_grad is None or hasattr(weight, "grad_added_to_main_grad"):
        return
    require_no_hook(weight, f"a weight {tuple(weight.shape)}")
    # A caller's loop may have made main_grad the .grad, which autograd then adds to.
    if grad is not None and grad is not main_grad:
        main_grad.add_(grad.detach())
        weight.grad = None


def require_float32_grad(layer: RecipeState, weight: Tensor) -> None:
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
