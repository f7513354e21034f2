"""Norms whose result converted layers read as codes: RMSNorm, LayerNorm and ForeignRMSNorm.

mf.quantize_ converts a norm to one of these classes in place where only converted layers read the
norm's result (nn/fuse/producers.py finds them). Parameters, hooks and state-dict keys stay. forward
returns a DeferredNorm (nn/fuse/deferred.py), or the plain tensor where a hook could see the result.

Under autocast, and where x and the weight differ in dtype, the norm is computed as before its
conversion.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ..._native import ops
from ..convert.same_result import difference, isolated, replica, seeded
from .deferred import VALUE_DTYPES, DeferredNorm
from .other_hooks import has_other_hooks

DEFAULT_EPS = torch.finfo(torch.float32).eps  # of nn.RMSNorm with eps=None, in either dtype
STATE = ("readers", "layers_reading", "class_before")


class DeferringNorm(nn.Module):
    """A norm that returns a DeferredNorm."""

    kind = "rms"
    readers: tuple[nn.Module, ...]  # layers, and modules that pass the result to them
    layers_reading: int
    class_before: type[nn.Module]

    @property
    def epsilon(self) -> float:
        eps = cast(Any, self).eps
        return DEFAULT_EPS if eps is None else eps

    def normalize(self, x: Tensor) -> Any:
        """Returns the norm of x: deferred, or a tensor."""
        if not self._fits(x):
            return cast(Any, self.class_before).forward(self, x)
        weight, bias = self._affine()
        if any(has_other_hooks(module) for module in (self, *self.readers)):
            return ops.norm(x, weight, bias, self.kind, self.epsilon)
        return DeferredNorm(x, weight, bias, self.kind, self.epsilon, self.layers_reading)

    def _affine(self) -> tuple[Tensor | None, Tensor | None]:
        """Returns weight and bias."""
        return getattr(self, "weight", None), getattr(self, "bias", None)

    def _fits(self, x: Tensor) -> bool:
        """Tells whether the op computes what the norm did before its conversion."""
        if type(x) not in (Tensor, nn.Parameter) or x.dtype not in VALUE_DTYPES:
            return False
        if x.is_meta or x.is_nested or x.layout != torch.strided or x.dim() == 0:
            return False
        if torch.is_autocast_enabled(x.device.type):
            return False
        for parameter in self._affine():
            if parameter is None:
                continue
            if type(parameter) not in (Tensor, nn.Parameter) or parameter.dtype != x.dtype:
                return False
            if parameter.device != x.device or parameter.shape != x.shape[-1:]:
                return False
        shape = getattr(self, "normalized_shape", None)
        return shape is None or tuple(shape) == tuple(x.shape[-1:])

    def extra_repr(self) -> str:
        return f"{cast(Any, self.class_before).extra_repr(self)}, deferred".removeprefix(", ")


class RMSNorm(DeferringNorm, nn.RMSNorm):
    """nn.RMSNorm."""

    def forward(self, x: Tensor) -> Any:
        return self.normalize(x)


class LayerNorm(DeferringNorm, nn.LayerNorm):
    """nn.LayerNorm over the last dimension."""

    kind = "layer"

    def forward(self, input: Tensor) -> Any:
        return self.normalize(input)


class ForeignRMSNorm(DeferringNorm):
    """The RMSNorm of Hugging Face's Llama, which rounds before it multiplies by the weight."""

    kind = "rms_rounded"

    @property
    def epsilon(self) -> float:
        return cast(Any, self).variance_epsilon

    def forward(self, hidden_states: Tensor) -> Any:
        return self.normalize(hidden_states)


def rounded_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes Hugging Face's LlamaRMSNorm (transformers 4.57)."""
    values = x.to(torch.float32)
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps)
    return weight * values.to(x.dtype)


@isolated()
def is_foreign_rms_norm(module: nn.Module) -> bool:
    """Tells whether a module has the form and the values of Hugging Face's LlamaRMSNorm."""
    eps = getattr(module, "variance_epsilon", None)
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return False
    if list(module._parameters) != ["weight"] or module._modules or module._buffers:
        return False
    weight = module._parameters["weight"]
    if weight is None or weight.dim() != 1:
        return False
    model = replica(module, {weight.shape[0]: 64}, torch.bfloat16)
    x, w = (torch.linspace(a, 3, 64, dtype=torch.bfloat16, device="cpu") for a in (-1.7, 0.3))
    model._parameters["weight"] = nn.Parameter(w, requires_grad=False)
    forward = partial(type(module).forward, model, x)
    return difference(forward, lambda: rounded_rms_norm(x, w, eps), bound=0) is None


@isolated()
def is_torch_norm(module: nn.Module, kind: type[DeferringNorm]) -> bool:
    """Tells whether a module of torch's class is over the last dimension and computes its norm."""
    if len(cast(Any, module).normalized_shape) != 1:
        return False
    model = replica(module)
    x = seeded((4, *model.normalized_shape), 1)
    weight, bias = DeferringNorm._affine(model)
    eps = DEFAULT_EPS if model.eps is None else model.eps
    ours = partial(ops.norm, x, weight, bias, kind.kind, eps)
    return difference(partial(type(module).forward, model, x), ours) is None


def norm_class(module: nn.Module) -> type[DeferringNorm] | None:
    """Returns the class that a norm is converted to; None: it is no norm of a known kind."""
    if "forward" in module.__dict__ or is_parametrized(module):
        return None
    if type(module) in (nn.RMSNorm, nn.LayerNorm):
        found = RMSNorm if type(module) is nn.RMSNorm else LayerNorm
        return found if is_torch_norm(module, found) else None
    return ForeignRMSNorm if is_foreign_rms_norm(module) else None


def adopt_norm(module: nn.Module, readers: Iterable[nn.Module], layers_reading: int) -> None:
    """Converts a norm in place. readers: those that DeferringNorm has."""
    found = norm_class(module)
    assert found is not None
    before = type(module)
    module.__class__ = found
    norm = cast(DeferringNorm, module)
    norm.class_before = before
    norm.readers = tuple(readers)
    norm.layers_reading = layers_reading


def restore_norm(module: DeferringNorm) -> None:
    """Converts a norm back in place."""
    before = module.class_before
    for name in STATE:
        delattr(module, name)
    module.__class__ = class_without(type(module), before)


def class_without(cls: type, before: type) -> type:
    """Returns `before`, or, where torch derived `cls` from a norm's class, the same from it."""
    if cls in (RMSNorm, LayerNorm, ForeignRMSNorm):
        return before
    bases = tuple(
        class_without(b, before) if issubclass(b, DeferringNorm) else b for b in cls.__bases__
    )
    members = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__, bases, members)
