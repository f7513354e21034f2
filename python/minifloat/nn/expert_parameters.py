"""3D parameters of experts as products read them: whole, sharded by FSDP2, or codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..tensor.quantized_tensor import QuantizedTensor
from .hooks import hooks, is_distributed
from .names import PRODUCT
from .state.recipe_state import RecipeState, quantized_again, require_primary_dtype


class HasProducts:
    """A part of the class of modules with 3D parameters: FSDP2 assigns those that it has sharded.

    FSDP2 assigns through __setattr__ where a module's class defines one.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        product = self.__dict__.get("_modules", {}).get(name + PRODUCT)
        if isinstance(product, RecipeState):
            adopt_weight(self, product, name, value)
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HasProducts:
        """Moves the module, and wraps parameters again that came back as plain shards.

        to_empty returns quantized weights in high precision: those are quantized again.
        """
        parameters = self.__dict__["_parameters"]
        before = dict(parameters)
        for name, old in before.items():
            product = self.__dict__["_modules"].get(name + PRODUCT)
            fqn = product.fqn if isinstance(product, RecipeState) else name
            require_primary_dtype(fqn, fn, getattr(old, "_local_tensor", old))
        super()._apply(fn, recurse)  # type: ignore[misc]
        for child, product in self.__dict__["_modules"].items():
            name = child.removesuffix(PRODUCT)
            if not isinstance(product, RecipeState) or name not in parameters:
                continue
            old, new = before[name], parameters[name]
            if (codes := quantized_again(old, new)) is not None:
                setattr(self, name, codes)
            if product.weight_gather is not None:
                adopt_weight(self, product, name, new)
        return self

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        """Loads the parameters, and moves products from meta to where values were assigned."""
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        devices = [p.device for p in self.__dict__["_parameters"].values() if p is not None]
        for product in self.__dict__["_modules"].values():
            if isinstance(product, RecipeState) and product.stream.is_meta and devices:
                product._move_state(devices[0])


def adopt_weight(module: Any, product: RecipeState, name: str, value: Any) -> None:
    """Prepares a parameter that is about to become the module's `name`."""
    if product.gather_plan is not None and is_distributed(value):
        hooks().adopt_experts(module, product, module._parameters.get(name), value)


class TransposeOfCodes(torch.autograd.Function):
    """Stands for B of a product whose weight is codes: its shape, dtype and gradient.

    The op reads the codes that the call passes. The elements are one NaN.
    """

    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        shape = *weight.shape[:-2], weight.shape[-1], weight.shape[-2]
        nan = torch.full((), float("nan"), dtype=weight.dtype, device=weight.device)
        return nan.expand(shape)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0].mT


def matrix_of(weight: Tensor, is_row_major: bool = False) -> Tensor:
    """Returns B (E, K, N) of a product, from a 3D parameter or the part of it on this rank.

    Args:
        weight: (E, N, K), or (E, K, N) where it is row-major.
        is_row_major: whether `weight` is B itself.
    """
    weight = local_of(weight)
    if isinstance(weight, QuantizedTensor):
        b = TransposeOfCodes.apply(weight)
        return b.mT if is_row_major else b
    return weight if is_row_major else weight.permute(0, 2, 1)


def local_of(weight: Tensor) -> Tensor:
    """Returns the experts of this rank: those of a DTensor, with their gradient, or all."""
    return weight.to_local() if is_distributed(weight) else weight
