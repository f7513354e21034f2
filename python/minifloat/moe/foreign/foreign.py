"""Experts modules of other libraries, converted in place: a class is derived, nothing copied.

    SeamExperts         torchtitan: products by the method _grouped_mm(self, *, A, B_t, offs)
    CountedExperts      torchtitan 0.2 (counted_experts.py): rows and each expert's count
    ProjectionExperts   Hugging Face (projections.py): gate_up_proj and down_proj
    NamedExperts        any module whose forward calls grouped_mm or bmm with the named parameters

A converted module is an instance of its former class, with the same parameters, hooks and keys.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...nn.expert_parameters import HasProducts
from ...nn.grouped_product import GroupedProduct, ProductCall, product_of
from ...nn.names import PRODUCT
from .same_experts import compare_seam

WHOLE = "grouped_mm_{}"  # the name of a seam's product, by its number among a forward's calls


class Converted(HasProducts):
    """What all derived classes have: a copy or a pickle of a module derives its class again."""

    original: ClassVar[type[nn.Module]]
    kind: ClassVar[type[Converted]]

    @staticmethod
    def reason_against(module: nn.Module) -> str | None:
        """Returns how a module's forward parts from its conversion; None: not at all."""
        return None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return rebuilt, (type(self).original, type(self).kind), self.__dict__.copy()


DERIVED: dict[tuple[Any, Any], Any] = {}  # (class, kind) -> class


def converted_class(original: Any, kind: Any) -> Any:
    """Derives the class of a converted module."""
    if (original, kind) not in DERIVED:
        members = {"original": original, "kind": kind, "__module__": original.__module__}
        DERIVED[original, kind] = type(original.__name__, (kind, original), members)
    return DERIVED[original, kind]


def rebuilt(original: Any, kind: Any) -> Any:
    """Returns an empty instance of a derived class."""
    cls = converted_class(original, kind)
    return cls.__new__(cls)


def has_seam(module: nn.Module) -> bool:
    """Tells whether the module multiplies through torchtitan's method."""
    method = getattr(type(module), "_grouped_mm", None)
    if not callable(method):
        return False
    return {"A", "B_t", "offs"} <= set(inspect.signature(method).parameters)


class SeamExperts(Converted):
    """A module with torchtitan's method. Its products are numbered in the order of the calls."""

    @staticmethod
    def reason_against(module: nn.Module) -> str | None:
        return compare_seam(module, ProductCall().multiply)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._calls = 0
        return super().forward(*args, **kwargs)  # type: ignore[misc]

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        name = WHOLE.format(self._calls)
        product = product_of(self, name)  # type: ignore[arg-type]
        if product is None:
            raise RuntimeError(
                f"{self.original.__name__}: expected a product for each 3D parameter in a forward, "
                f"got a call of _grouped_mm after {self._calls} of them"
            )
        self._calls += 1
        return multiply(self, product, A, B_t, offs)


def multiply(owner: Any, product: GroupedProduct, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Multiplies rows of experts; a weight that is a view of a parameter is cast once a step."""
    weight, is_row_major = b.transpose(-2, -1), False
    if not torch.compiler.is_compiling():
        for parameter in owner._parameters.values():
            if parameter is not None and is_same(parameter, weight):
                weight = parameter
            elif parameter is not None and is_same(parameter, b):
                weight, is_row_major = parameter, True
    call = product.prepare(weight, a, is_row_major)
    if call.recompute and not torch.compiler.is_compiling() and not is_of(owner, b):
        call = replace(call, recompute="")  # a copy to be quantized again has more bytes than codes
    return call.multiply(a, b, offs.to(torch.int32))


def is_of(owner: Any, b: Tensor) -> bool:
    """Tells whether `b` is memory of one of the module's parameters, and no copy."""
    parameters = [p for p in owner._parameters.values() if p is not None]
    memory = {getattr(p, "_local_tensor", p).untyped_storage()._cdata for p in parameters}
    return b.untyped_storage()._cdata in memory


def is_same(parameter: Tensor, view: Tensor) -> bool:
    """Tells whether `view` is all of the parameter's memory, in the same layout."""
    return (
        type(parameter) is nn.Parameter
        and parameter.dtype == view.dtype
        and parameter.shape == view.shape
        and parameter.stride() == view.stride()
        and parameter.data_ptr() == view.data_ptr()
    )


class NamedExperts(Converted):
    """A module whose forward multiplies rows with its named parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with ProductMode(self) as mode:  # type: ignore[arg-type]
            out = super().forward(*args, **kwargs)  # type: ignore[misc]
        mode.require_all()
        return out


GROUPED = tuple(
    function
    for function in (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None))
    if function is not None
)
BATCHED = (torch.bmm, Tensor.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)


class ProductMode(TorchFunctionMode):
    """Replaces a forward's products with named parameters: those of torch's grouped_mm and bmm.

    A cast or a transpose of a parameter still counts as the parameter.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.names = [
            name.removesuffix(PRODUCT)
            for name, child in module._modules.items()
            if isinstance(child, GroupedProduct)
        ]
        self.multiplied: set[str] = set()
        weights = {name: getattr(module, name) for name in self.names}
        self.derived = {id(weight): (name, weight) for name, weight in weights.items()}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = [*args, *kwargs.values()]
        name = self.name_of(operands[1]) if len(operands) > 1 else None
        if name is not None and func in GROUPED:
            return self.grouped(name, *args, **kwargs)
        if name is not None and func in BATCHED and operands[0].dim() == 3:
            return self.batched(name, operands[0], operands[1])
        out = func(*args, **kwargs)
        name = self.name_of(operands[0]) if operands else None
        is_whole = isinstance(out, Tensor) and out.dim() == 3
        if name is not None and is_whole and out.numel() == operands[0].numel():
            self.derived[id(out)] = name, out
        return out

    def name_of(self, value: Any) -> str | None:
        found = self.derived.get(id(value))
        return None if found is None else found[0]

    def product(self, name: str) -> GroupedProduct:
        self.multiplied.add(name)
        product = product_of(self.module, name)
        assert product is not None
        return product

    def grouped(self, name: str, mat_a: Tensor, mat_b: Tensor, **options: Any) -> Tensor:
        """Returns torch's grouped_mm of rows in groups."""
        offs, bias = options.get("offs"), options.get("bias")
        if offs is None or bias is not None or mat_a.dim() != 2:
            raise RuntimeError(
                f"{type(self.module).__name__}.{name}: expected grouped_mm of rows (M, K) with "
                "offs and without a bias"
            )
        y = multiply(self.module, self.product(name), mat_a, mat_b, offs)
        return y.to(options.get("out_dtype") or y.dtype)

    def batched(self, name: str, a_ECK: Tensor, b_EKN: Tensor) -> Tensor:
        """Returns a batched product, whose groups have C rows each."""
        experts, rows, _ = a_ECK.shape
        offs = torch.arange(1, experts + 1, dtype=torch.int32, device=a_ECK.device) * rows
        y = multiply(self.module, self.product(name), a_ECK.flatten(0, 1), b_EKN, offs)
        return y.unflatten(0, (experts, rows))

    def require_all(self) -> None:
        """Raises RuntimeError where a named parameter was in no product that was replaced."""
        missed = [name for name in self.names if name not in self.multiplied]
        if missed:
            raise RuntimeError(
                f"{type(self.module).__name__}: expected its forward to multiply with "
                f"{', '.join(missed)} by torch's grouped_mm, bmm or matmul, got no such product"
            )
