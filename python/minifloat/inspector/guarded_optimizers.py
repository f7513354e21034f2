"""What a guard reads of optimizers: which take a flag on the device, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..nn.registry import is_distributed
from ..nn.state.guarded_steps import flag_on
from ..private_torch import norms_of
from ..tensor.quantized_tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

WRAPPERS = "accelerate.", "lightning.", "pytorch_lightning."  # their modules
EXPECTED = "StepGuard: optimizer: expected a torch.optim.Optimizer, or a list of those"


def require_optimizers(optimizer: object) -> list[Optimizer]:
    """Returns the optimizers, inside what accelerate and Lightning wrap around them, each once.

    Raises:
        TypeError: there is none, or another object among them.
    """
    found: dict[Optimizer, None] = {}
    given: Sequence[Any] = [optimizer]
    for each in optimizer if isinstance(optimizer, (list, tuple)) else given:
        while type(each).__module__.startswith(WRAPPERS):
            each = each.optimizer
        if not isinstance(each, Optimizer):
            raise TypeError(f"{EXPECTED}, got {type(each).__name__}")
        found[each] = None
    if not found:
        raise TypeError(f"{EXPECTED}, got an empty list")
    return [*found]


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def reads_flag(optimizer: Optimizer) -> bool:
    """Tells whether an optimizer leaves a step out where its attribute found_inf is 1.

    So do Adam, AdamW and SGD of torch with fused=True: the contract of torch.amp.GradScaler. A
    class with a step of its own may read weights before it. The first SGD step with dampening
    leaves momentum that was never written, and codes would be rounded again.
    """
    return bool(
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and (getattr(optimizer.step, "__module__", None) or "").startswith("torch.optim.")
        and all(
            group.get("fused") and not (group.get("momentum") and group.get("dampening"))
            for group in optimizer.param_groups
        )
        and not any(
            type(p) is not nn.Parameter
            and isinstance(getattr(p, "_local_tensor", p), QuantizedTensor)
            for p in parameters_of(optimizer)
        )
    )


def make_momentum(optimizer: Optimizer) -> None:
    """Gives SGD -0 where its first step would keep the gradient as momentum: the sum is equal.

    A sum with +0 would turn -0 into +0. torch leaves that memory unwritten where a first step is
    left out.
    """
    for group in optimizer.param_groups:
        if group.get("momentum"):
            for p in group["params"]:
                if p.grad is not None and optimizer.state[p].get("momentum_buffer") is None:
                    optimizer.state[p]["momentum_buffer"] = torch.full_like(p, -0.0)


@torch.inference_mode()  # which may write to gradients of either mode
def zero_gradients(optimizer: Optimizer, flag: Tensor) -> None:
    """Zeroes an optimizer's gradients where a flag, float32 (), is 1, by kernels alone."""
    mask = flag.bool()
    for parameter in parameters_of(optimizer):
        gradient = parameter.grad
        if gradient is None:
            continue
        if is_distributed(gradient):
            gradient = gradient.to_local()
        gradient.masked_fill_(flag_on(gradient.device, mask), 0)


def local_gradients(
    optimizers: Sequence[Optimizer],
) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Returns the parameters that have gradients, and this rank's values of those.

    Call it under no_grad. The lists of a pair are of one device and dtype, in the optimizers'
    order.
    """
    found: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                gradient = gradient.coalesce().values()  # sums of a row's values may overflow
            elif is_distributed(gradient):
                gradient = summed(gradient).to_local()
            if gradient.is_complex():
                gradient = torch.view_as_real(gradient.resolve_conj())
            if gradient.numel() > 0:
                lists = found.setdefault((gradient.device, gradient.dtype), ([], []))
                lists[0].append(parameter)
                lists[1].append(gradient)
    return [*found.values()]


def summed(gradient: DTensor) -> DTensor:
    """Returns a gradient whose parts are summed over ranks: the sum of finite ones may overflow."""
    if not any(placement.is_partial() for placement in gradient.placements):
        return gradient
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
    return gradient.redistribute(placements=whole)


def flags_of(gradients: list[Tensor]) -> Tensor:
    """Returns float32 (n): 1 for each gradient with a value that is Inf or NaN, else 0.

    Args:
        gradients: n of one device and dtype, none of them empty.

    A GPU takes the largest magnitudes of all of them in few kernels. A CPU takes 20 times as long
    for those as for extremes.
    """
    if gradients[0].is_cuda:
        zero_or_nan = torch.stack(norms_of(gradients, math.inf)).mul_(0)
    else:
        extremes = [value for gradient in gradients for value in torch.aminmax(gradient)]
        zero_or_nan = torch.stack(extremes).mul_(0).view(-1, 2).sum(1)
    return zero_or_nan.ne(0).float()
