"""Which module, and which of its tensors, has the first value that is not finite.

    forward     parameters of modules that are not called, then in the order of calls: the input x,
                the weight W, the output y; of several tensors the first
    loss
    backward    in the other order: the gradient g of the output; then gradients of parameters

The pass is repeated on the batch that failed, so training pays nothing for it. Only numbers of
values are counted, on the device, and copied once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed.reshard import reshard
from ..nn.convert.selection import display
from ..nn.names import clean_name, unwrapped
from ..nn.registry import is_distributed, require_layers_of_torch
from .layers import run


class NotFinite(NamedTuple):
    """The first values that are not finite.

    Args:
        place: its position in the order above, by which ranks compare theirs.
        where: the module and its tensor, such as "layers.0.attention.wq, g of dgrad and wgrad".
        wrong: values that are Inf or NaN.
        elements: of the tensor.
    """

    place: int
    where: str
    wrong: int
    elements: int

    def __str__(self) -> str:
        return f"{self.where}: {self.wrong} of {self.elements} values"


def find_nonfinite(
    model: nn.Module, batch: Any, loss: Callable[[nn.Module, Any], Tensor]
) -> NotFinite | None:
    """Repeats a forward and backward pass, and finds the first value that is not finite.

    Args:
        model: evaluated, uncompiled, and left as it was. All ranks of FSDP2 call this together.
        batch: the argument of `loss`.
        loss: (model, batch) -> a tensor of one element.

    Returns:
        What this rank found. None: all is finite, as where a stochastic cast or compiled code had
        other values.
    """
    model = unwrapped(model)
    require_layers_of_torch("find_nonfinite", model)
    reshard(model)
    names = {module: clean_name(name) for name, module in model.named_modules()}
    modules = [m for m in names if m._parameters or not m._modules]
    owned = {n: p for n, p in model.named_parameters() if p.requires_grad and not is_distributed(p)}
    value, calls, gradients, _ = run(model, modules, batch, loss, also=list(owned.values()))
    found: list[tuple[str, Tensor | None]] = []
    called = {call.module for call in calls}
    for module in modules:  # that others read, as attention does its projections
        if module not in called:
            for parameter_name, parameter in module.named_parameters(recurse=False):
                found.append((f"{display(names[module])}, {parameter_name}", parameter))
    for call in calls:
        is_layer = any(p.dim() > 1 for p in call.module.parameters(recurse=False))
        name, of = display(names[call.module]), " of fprop" if is_layer else ""
        inputs = [x for x in call.inputs if isinstance(x, Tensor)]
        found.append((f"{name}, x{of}", inputs[0] if inputs else None))
        for parameter_name, parameter in call.module.named_parameters(recurse=False):
            found.append((f"{name}, {parameter_name}{of}", parameter))
        found.append((f"{name}, y{of}", call.output))
    found.append(("the loss", value))
    for call, g in reversed(list(zip(calls, gradients))):
        found.append((f"{display(names[call.module])}, g of dgrad and wgrad", g))
    for name, g in zip(owned, gradients[len(calls) :]):
        found.append((f"{clean_name(name)}, its gradient from wgrad", g))
    return first_of(found)


def first_of(found: list[tuple[str, Tensor | None]]) -> NotFinite | None:
    """Returns the first tensor with a value that is not finite."""
    tensors = [(where, local) for where, t in found if (local := values_of(t)) is not None]
    if not tensors:
        return None
    counts = torch.stack([(~torch.isfinite(t)).sum() for _, t in tensors]).tolist()
    for place, ((where, t), count) in enumerate(zip(tensors, counts)):
        if count:
            return NotFinite(place, where, count, t.numel())
    return None


def values_of(t: Tensor | None) -> Tensor | None:
    """Returns the floating-point values of this rank; None: there are none to look at."""
    if t is None or not t.is_floating_point():
        return None
    local: Tensor = getattr(t.detach(), "_local_tensor", t.detach())
    return local if type(local) in (Tensor, nn.Parameter) else None
