"""Experts modules of other libraries, converted in place: a class is derived, nothing copied.

    ProjectionExperts   Hugging Face (projections.py): gate_up_proj and down_proj
    CountedExperts      torchtitan 0.2: rows and each expert's count
    GroupedMmExperts    torchtitan since: products by the method _grouped_mm(self, *, A, B_t, offs)
    NamedExperts        any module whose forward calls grouped_mm or bmm with the named parameters

A converted module is an instance of its former class, with the same parameters, hooks and keys.

CountedExperts have rows in the order of the experts:

    rows of expert 0 | rows of expert 1 | … | rows that belong to no expert
    gate, up = rows · w1ᵀ, rows · w3ᵀ        h = SwiGLU(gate, up)        y = h · w2ᵀ

Their own forward multiplies bfloat16 values by torch's grouped_mm. A group may have any number of
rows here. Expert parallelism is torchtitan's: each rank has some experts of all.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from ...nn.cache.operand_cache import compute_dtype
from ...nn.convert.reads import NOTHING, Reads
from ...nn.grouped_product import (
    GroupedProduct,
    HasProducts,
    call_of,
    matrix_of,
    product_of,
)
from ...nn.names import PRODUCT, join
from ...nn.registry import is_distributed
from ...nn.state.recipe_state import ExpertRange
from ...private_torch import grouped_mm, has_transform
from ..feed_forward import Gate, Order, Products, uncompiled
from .calls import CountedCall
from .implementations import class_of, code_starts
from .known import known_digest
from .same_forward import compare_forward, compare_grouped_mm, expected_counted
from .settings import SETTINGS, read_settings, require_settings

NAMES = ("w1", "w3", "w2")  # of torchtitan: (E, I, D), (E, I, D), (E, D, I)
# The activation is in a module's code, not in its parameters, so modules are found by class.
CLASSES = (("torchtitan.models.moe.moe", "GroupedExperts"),)
# Products that NamedExperts replace.
GROUPED = (grouped_mm, F.grouped_mm)
BATCHED = (torch.bmm, Tensor.bmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)


class Converted(HasProducts, nn.Module):
    """A form of experts. A copy or a pickle of a converted module derives its class again."""

    original: ClassVar[type[nn.Module]]
    form: ClassVar[type[Converted]]
    _settings: Reads = NOTHING

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Tells whether a module has this form."""
        return True

    @staticmethod
    def reason_against(module: nn.Module) -> str | None:
        """Returns how a module's forward parts from its conversion; None: not at all."""
        return None

    @staticmethod
    def replaced(module: nn.Module) -> tuple[Callable[..., object], ...]:
        """Returns the functions of a module's class that the conversion stands for."""
        return ()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        require_settings(self)
        return rebuilt, (self.original, self.form), self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        keep_settings(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Converted:
        """Copies the module, also of a class that torch has derived, as parametrize does."""
        require_settings(self)
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__dict__, memo))
        return copied


def keep_settings(module: Converted) -> None:
    """Keeps the settings that the functions which a conversion replaces read, at its conversion."""
    replaced = module.form.replaced(module)
    module.__dict__[SETTINGS] = read_settings(module, *replaced) if replaced else NOTHING


def converted_class(original: type[nn.Module], form: type[Converted]) -> type[Converted]:
    """Derives the class of a converted module, once."""
    for known in form.__subclasses__():
        if known.original is original:
            return known
    members = {"original": original, "form": form, "__module__": original.__module__}
    return type(original.__name__, (form, original), members)


def rebuilt(original: type[nn.Module], form: type[Converted]) -> Converted:
    """Returns an empty instance of a derived class."""
    cls = converted_class(original, form)
    return cls.__new__(cls)


def multiply(
    owner: nn.Module, product: GroupedProduct, a: Tensor, b: Tensor, offs: Tensor
) -> Tensor:
    """Multiplies rows of experts; a weight that is a view of a parameter is cast once a step."""
    weight, is_row_major, parameters = b.transpose(-2, -1), False, []
    if not torch.compiler.is_compiling() and not has_transform():  # whose tensors have no memory
        parameters = [p for p in owner._parameters.values() if p is not None]
    for parameter in parameters:
        if is_same(parameter, weight):
            weight = parameter
        elif is_same(parameter, b):
            weight, is_row_major = parameter, True
    call = product.prepare(weight, a, is_row_major)
    if call.recompute and parameters and memory_of(b) not in map(memory_of, parameters):
        call = replace(call, recompute="")  # a copy to be quantized again has more bytes than codes
    return call.multiply(a, b, offs.to(torch.int32))


def memory_of(tensor: Tensor) -> int:
    """Returns the address of the storage that has a tensor's values, or a DTensor's on this rank"""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()._cdata


def is_same(parameter: Tensor, view: Tensor) -> bool:
    """Tells whether `view` is all of the parameter's memory, in the same layout."""
    return (
        type(parameter) is nn.Parameter
        and parameter.dtype == view.dtype
        and parameter.shape == view.shape
        and parameter.stride() == view.stride()
        and parameter.data_ptr() == view.data_ptr()
    )


# ---- named parameters ---------------------------------------------------------------------------


COMPUTING = threading.RLock()  # of a forward under torch's cache of computed parameters


class NamedExperts(Converted):
    """A module whose forward multiplies rows with its named parameters.

    torch.compile does not trace the forward: it would lose which tensors are of which parameter.
    """

    @uncompiled
    def forward(self, *args: object, **kwargs: object) -> object:
        if not isinstance(self, NamedExperts):  # kept by a wrapper past mf.restore_
            return type(self).forward(self, *args, **kwargs)
        if not parametrize.is_parametrized(self):
            return self._with_products(*args, **kwargs)
        # Its forward reads what the mode has read: torch's cache is one of all threads.
        with COMPUTING, parametrize.cached():
            return self._with_products(*args, **kwargs)

    def _with_products(self, *args: object, **kwargs: object) -> object:
        with ProductMode(self) as mode:
            out = super().forward(*args, **kwargs)
        mode.require_all()
        return out


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
        self.derived: list[tuple[str, Tensor]] = [(n, getattr(module, n)) for n in self.names]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        operands = [*args, *kwargs.values()]
        name = self.name_of(operands[1]) if len(operands) > 1 else None
        if name is not None and func in GROUPED:
            return self.grouped(name, *args, **kwargs)
        if name is not None and func in BATCHED and operands[0].dim() == 3:
            return self.batched(name, operands[0], operands[1])
        out = func(*args, **kwargs)
        name = self.name_of(operands[0]) if operands else None
        is_matrices = isinstance(out, Tensor) and out.dim() == 3
        if name is not None and is_matrices and out.numel() == operands[0].numel():
            self.derived.append((name, out))
        return out

    def name_of(self, value: object) -> str | None:
        """Returns the name of the parameter that a value is, or is derived from."""
        for name, tensor in self.derived:
            if tensor is value:
                return name
        return None

    def product(self, name: str) -> GroupedProduct:
        self.multiplied.add(name)
        return cast(GroupedProduct, product_of(self.module, name))

    def grouped(
        self,
        name: str,
        mat_a: Tensor,
        mat_b: Tensor,
        offs: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Returns torch's grouped_mm of rows in groups."""
        if offs is None or bias is not None or mat_a.dim() != 2:
            raise RuntimeError(
                f"{type(self.module).__name__}.{name}: expected grouped_mm of rows (M, K) with "
                "offs and without a bias"
            )
        y = multiply(self.module, self.product(name), mat_a, mat_b, offs)
        return y.to(out_dtype or y.dtype)

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


# ---- torchtitan ----------------------------------------------------------------------------------


class CountedExperts(Converted):
    """torchtitan's experts, called with rows and their counts."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        return (type(module).__module__, type(module).__name__) in CLASSES

    @staticmethod
    def reason_against(module: nn.Module) -> str | None:
        if known_digest(module) is not None:
            return None
        # Its grouped_mm multiplies values of bf16, its loop those of any dtype.
        setting = {"use_grouped_mm": False}
        calls = [CountedCall()]
        return compare_forward(module, NAMES[-1], False, expected_counted, calls, **setting)

    @staticmethod
    def replaced(module: nn.Module) -> tuple[Callable[..., object], ...]:
        return code_starts(module)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        if not isinstance(self, CountedExperts):  # kept by a wrapper past mf.restore_
            return type(self).forward(self, x, num_tokens_per_expert)
        require_settings(self)
        rows = x.to(compute_dtype(x))
        ids = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
        offs = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        order = Order(ids, ids[:, None], offs, ids)  # each row is a token of its own, with one slot
        weights = [getattr(self, name) for name in NAMES]  # computed, perhaps
        for name, weight in zip(NAMES, weights):
            keep_own_experts(self, name, weight)
        calls = [
            call_of(self, name, weight, rows, needs_columnwise=True)
            for name, weight in zip(NAMES, weights)
        ]
        matrices = [matrix_of(weight, call) for weight, call in zip(weights, calls)]
        ones = torch.ones(rows.shape[0], 1, dtype=torch.float32, device=rows.device)
        products = Products(Gate(), calls, matrices, (None, None))
        return products.run(rows, ones, order, sums=False).type_as(x)


def keep_own_experts(module: nn.Module, name: str, weight: Any) -> None:
    """Tells the product of a weight which experts this rank has, where torchtitan divides them.

    Raises:
        ValueError: ranks shard each expert's matrix, which no product here can multiply exactly.
    """
    product = product_of(module, name)
    if not is_distributed(weight) or product is None:
        return
    mesh = weight.device_mesh
    if len(weight.placements) > 1 or not weight.placements[0].is_shard(0):
        raise ValueError(
            f"{type(module).__name__}.{name}: expected whole experts on each rank (expert parallel "
            f"alone), got {weight.placements} over {mesh}; leave experts that tensor parallelism "
            "cuts in bf16, by filter_fqns or a recipe map"
        )
    if product.expert_range is None:
        own, experts = weight.to_local().shape[0], weight.shape[0]
        begin = mesh.get_local_rank() * own
        product.keep_experts(ExpertRange(begin, own, experts, mesh.get_group()))
        product.first_expert = begin


def thread_number() -> int:
    """Returns a number of this thread; 0 in compiled code."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


class GroupedMmExperts(Converted):
    """A module with torchtitan's method. Its products are numbered in the order of the calls."""

    PRODUCT_NAME = "grouped_mm_{}"
    _calls: dict[int, int]  # of a forward, so far, by the number of its thread

    @staticmethod
    def fits(module: nn.Module) -> bool:
        method = getattr(type(module), "_grouped_mm", None)
        return callable(method) and {"A", "B_t", "offs"} <= {*inspect.signature(method).parameters}

    @staticmethod
    def reason_against(module: nn.Module) -> str | None:
        return compare_grouped_mm(module)

    @staticmethod
    def replaced(module: nn.Module) -> tuple[Callable[..., object], ...]:
        return (class_of(module)._grouped_mm,)  # type: ignore[attr-defined]

    @classmethod
    def number_products(
        cls, module: nn.Module, names: Sequence[str], products: Sequence[GroupedProduct], fqn: str
    ) -> None:
        """Names products, so far called by parameters, by their number among a forward's calls."""
        for i, (name, product) in enumerate(zip(names, products)):
            del module._modules[name + PRODUCT]
            product.rename(join(fqn, cls.PRODUCT_NAME.format(i)))
            module.add_module(cls.PRODUCT_NAME.format(i) + PRODUCT, product)
        module.__dict__["_calls"] = {0: 0}

    def forward(self, *args: object, **kwargs: object) -> object:
        if not isinstance(self, GroupedMmExperts):  # kept by a wrapper past mf.restore_
            return type(self).forward(self, *args, **kwargs)
        require_settings(self)
        self._calls[thread_number()] = 0
        return super().forward(*args, **kwargs)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        thread = thread_number()
        number = self._calls.get(thread, -1)  # -1: outside a forward, as a checkpoint within it
        product = product_of(self, self.PRODUCT_NAME.format(number))
        if product is None:
            where = "outside its forward" if number < 0 else f"after {number} of them"
            raise RuntimeError(
                f"{self.original.__name__}: expected a product for each 3D parameter in a forward, "
                f"got a call of _grouped_mm {where}"
            )
        self._calls[thread] = number + 1
        return multiply(self, product, A, B_t, offs)
