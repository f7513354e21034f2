"""transformers' Conv1D, a linear layer whose weight is (K, N), known without importing that."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from .same_result import difference, isolated, replica, seeded


def is_conv1d(module: nn.Module) -> bool:
    """Tells whether this is transformers' Conv1D, or of a class derived from it."""
    names = [cls.__name__ for cls in type(module).__mro__]
    features = getattr(module, "nx", None), getattr(module, "nf", None)
    weight = module._parameters.get("weight")
    return "Conv1D" in names and weight is not None and tuple(weight.shape) == features


@isolated()
def reason_against_linear(module: Any) -> str | None:
    """Returns why nn.Linear cannot stand for a Conv1D; None where it can."""
    if "forward" in module.__dict__:
        return "its forward is replaced on the instance"
    if list(module._parameters) != ["weight", "bias"] or module._modules or module._buffers:
        return "it has more parameters, buffers or modules than Conv1D"
    if hasattr(module.weight, "_local_tensor"):
        return "its weight is sharded already"
    sizes = {module.nx: 24, module.nf: 24 if module.nx == module.nf else 40}
    model = replica(module, sizes)
    x = seeded((2, 4, 24), 1)

    def linear() -> Tensor:
        return nn.functional.linear(x, model.weight.t(), model.bias)

    for mode in (True, False):
        why = difference(partial(type(module).forward, model.train(mode), x), linear, bound=0)
        if why is not None:
            return f"its forward {why}"
    return None
