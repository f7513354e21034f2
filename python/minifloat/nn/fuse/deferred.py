"""Results that are not computed until something reads them: Deferred, DeferredNorm.

A converted layer reads its input as codes. Where only such layers read a norm's result, the norm
returns a DeferredNorm, and each layer gets the codes from the norm's input by one op:

    x -> mf.RMSNorm -> DeferredNorm -> mf.Linear: ops.norm_operands(x, weight) -> x_operands
                       anchor ------------------> mf.Linear: ops.linear(anchor, W, x_operands)

The anchor is a tensor of the result's shape and dtype that has no memory of its own (one expanded
zero). The gradients of all readers are summed at the anchor, and then the norm's backward runs
once. The codes have the bytes of the result's codes.

Anything else that reads a Deferred reads its plain tensor: attributes, operators and functions of
torch compute that tensor with values(), whose gradient goes to the same anchor. From then on layers
read the plain tensor too, so that they see what was written to it.

torch.compile traces these objects. Nothing is cached there: the compiler removes repeated ops.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils import checkpoint

from ..._native import ops
from ..cache.operand_conditions import can_reuse, conditions_of, reads_codes

VALUE_DTYPES = (torch.float32, torch.bfloat16)  # of inputs of the ops
# Attributes of the result that its anchor has too. `is_contiguous` and `stride` differ.
OF_ANCHOR = (
    "device",
    "dtype",
    "element_size",
    "dim",
    "get_device",
    "is_complex",
    "is_cpu",
    "is_cuda",
    "is_floating_point",
    "is_inference",
    "is_meta",
    "is_nested",
    "is_sparse",
    "itemsize",
    "layout",
    "names",
    "ndim",
    "ndimension",
    "nelement",
    "numel",
    "requires_grad",
    "shape",
    "size",
)
BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor",
)  # fmt: skip
OTHERS = (
    "lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert", "getitem", "bool", "float",
    "int", "index", "contains",
)  # fmt: skip
OPERATORS = (*BINARY, *(f"r{name}" for name in BINARY), *OTHERS)
# These write to the plain tensor, which must stay the one that later reads return.
WRITING_OPERATORS = (
    "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor",
    "setitem",
)  # fmt: skip


class AnchoredNorm(torch.autograd.Function):
    """A norm's values, whose gradient goes to the anchor."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *arguments: Any) -> Tensor:
        return ops.norm(*arguments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None, None, None


def is_writing(name: str) -> bool:
    """Tells whether a method or function of this name writes to its first argument."""
    if name.endswith("__"):
        return name.strip("_") in WRITING_OPERATORS
    return name.endswith("_")


class Deferred:
    """A result that is computed when something reads it.

    Subclasses define anchor and compute().
    """

    anchor: Tensor
    _values: Tensor | None

    def compute(self) -> Tensor:
        """Computes the plain tensor, differentiably."""
        raise NotImplementedError

    @property
    def is_computed(self) -> bool:
        """Tells whether something has read the plain tensor, and may have written to it."""
        return self._values is not None

    def values(self, keeps: bool = False) -> Tensor:
        """Returns the plain tensor.

        Args:
            keeps: whether later reads return this tensor in compiled code too.
        """
        values = self._values
        if values is None:
            values = self.compute()
            if keeps or not torch.compiler.is_compiling():
                self._values = values
        return values

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keeps = is_writing(getattr(func, "__name__", ""))
        return func(*plain(args, keeps), **plain(kwargs or {}, keeps))

    def __getattr__(self, name: str) -> Any:
        if name in OF_ANCHOR:
            return getattr(self.anchor, name)
        if name in ("anchor", "_values"):  # before __init__ has set it
            raise AttributeError(name)
        return getattr(self.values(is_writing(name)), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("data", "grad", "requires_grad"):
            setattr(self.values(keeps=True), name, value)
        else:
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.anchor)

    def __iter__(self) -> Any:
        return iter(self.values())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.values()!r})"

    def __hash__(self) -> int:
        return id(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values().__reduce_ex__(protocol)  # copied and pickled as the plain tensor

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        if self.requires_grad:
            raise TypeError(
                f"{type(self).__name__}: expected a reader that keeps the gradient, got DLPack, as "
                "torch.as_tensor, torch.asarray and torch.tensor read what is no torch.Tensor; "
                "pass x.clone() or x.detach(), or convert the model without fuse=True"
            )
        return self.values().__dlpack__(*args, **kwargs)

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.values().__array__(*args, **kwargs)


def plain(value: Any, keeps: bool = False) -> Any:
    """Returns a value, a list, a tuple or a dict with plain tensors for what is deferred."""
    if isinstance(value, Deferred):
        return value.values(keeps)
    if type(value) in (list, tuple):
        return type(value)([plain(v, keeps) for v in value])
    if type(value) is dict:
        return {k: plain(v, keeps) for k, v in value.items()}
    return value


def _operator(name: str, keeps: bool) -> Any:
    method = getattr(Tensor, f"__{name}__")

    def apply(self: Deferred, *others: Any) -> Any:
        return method(self.values(keeps), *plain(others))

    return apply


for _name in OPERATORS:
    setattr(Deferred, f"__{_name}__", _operator(_name, keeps=False))
for _name in WRITING_OPERATORS:
    setattr(Deferred, f"__{_name}__", _operator(_name, keeps=True))


class OperandRequest(NamedTuple):
    """The operands that a layer reads, and its state that they depend on.

    Args:
        recipe: its text.
        columnwise: whether the layer's backward reads xᵀ.
        is_shared: whether the operands are a function of the values alone.
        rng, amax_history, stream: of the layer.
    """

    recipe: str
    columnwise: bool
    is_shared: bool
    rng: Tensor | None
    amax_history: Tensor | None
    stream: int


class DeferredNorm(Deferred):
    """The result of a norm.

    Args:
        x: (…, D), float32 or bfloat16.
        weight: (D), of x's dtype; None: ones.
        bias: (D), of x's dtype; None: zeros.
        kind: "rms", "rms_rounded" or "layer", as the op `norm` takes it.
        eps: of the norm.
        readers: the number of layers that read the result.
    """

    def __init__(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        kind: str,
        eps: float,
        readers: int,
    ) -> None:
        self._values = None
        self.anchor = ops.deferred_norm(x, weight, bias, kind, eps)
        self._arguments = (x.detach(), detached(weight), detached(bias), kind, eps)
        self._version = version_of(x)
        self._operands: dict[Any, list[Tensor]] = {}
        self._readers_left = readers

    def compute(self) -> Tensor:
        self._require_readable()
        if not self.anchor.requires_grad:
            return ops.norm(*self._arguments)
        with torch.enable_grad():
            return cast(Any, AnchoredNorm).apply(self.anchor, *self._arguments)

    def operands(self, request: OperandRequest) -> list[Tensor]:
        """Returns the result's eight tensors of operands, as the op `linear` takes them."""
        self._require_readable()
        if torch.compiler.is_compiling() or not request.is_shared:
            return self._cast(request)
        key = (request.recipe, request.columnwise, conditions_of(self.anchor))
        operands = self._operands.get(key)
        if operands is None:
            operands = self._operands[key] = self._cast(request)
        self._readers_left -= 1
        if self._readers_left <= 0:
            self._operands.clear()
        return operands

    def _cast(self, request: OperandRequest) -> list[Tensor]:
        return ops.norm_operands(
            *self._arguments,
            request.recipe,
            columnwise=request.columnwise,
            rng=request.rng,
            amax_history=request.amax_history,
            stream=request.stream,
        )

    def _require_readable(self) -> None:
        """Raises where the result would not be that of the norm's call, or lose its gradient."""
        if torch.compiler.is_compiling():
            return
        if version_of(self._arguments[0]) != self._version:
            raise RuntimeError(
                "a deferred norm: expected its input unchanged until the layers have read the "
                "norm's result, but the input was modified by an inplace operation; convert the "
                "model without fuse=True"
            )
        is_lost = self.anchor.requires_grad and not torch.is_grad_enabled()
        if is_lost and is_in_reentrant_checkpoint():
            raise RuntimeError(
                "a deferred norm: expected a checkpoint with use_reentrant=False around a module "
                "that reads the norm's result, got use_reentrant=True, which passes gradients to "
                "tensors alone; or convert the model without fuse=True"
            )


def source_of(layer: Any, input: Deferred) -> DeferredNorm | None:
    """Returns a deferred input that the layer reads as codes; None: the layer reads values."""
    recipe = layer.recipe
    if not isinstance(input, DeferredNorm) or input.is_computed:
        return None
    if not reads_codes(recipe.fprop.a, recipe.wgrad.b):
        return None
    anchor, weight = input.anchor, layer.weight
    if hasattr(weight, "device_mesh") or weight.device != anchor.device:
        return None
    kind = anchor.device.type
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) != anchor.dtype:
        return None
    return input


def request_of(
    layer: Any, rng: Tensor | None, amax_history: Tensor | None, stream: int, *readers: Any
) -> OperandRequest:
    """Returns the layer's request for the operands of a deferred input.

    Args:
        layer: the one that reads them, or the first of them.
        rng: its random state.
        amax_history: its amax history.
        stream: its stream.
        readers: other layers that read the same operands.
    """
    recipe = layer.recipe
    has_wgrad = any(reader.weight.requires_grad for reader in (layer, *readers))
    return OperandRequest(
        recipe.text,
        torch.is_grad_enabled() and has_wgrad,
        can_reuse(recipe.fprop.a, recipe.wgrad.b, allows_delayed=False),
        rng,
        amax_history,
        stream,
    )


def detached(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.detach()


def version_of(x: Tensor) -> int:
    """Returns torch's count of writes to the tensor; 0 where torch keeps none."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


def is_in_reentrant_checkpoint() -> bool:
    """Tells whether this thread runs the forward of a reentrant checkpoint, without gradients."""
    frame: FrameType | None = sys._getframe()
    code = checkpoint.CheckpointFunction.forward.__code__
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False
