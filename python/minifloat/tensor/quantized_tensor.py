"""QuantizedTensor: a weight as codes, with independent rowwise and columnwise parts.

    rowwise     codes of W (N, K), which fprop reads       at least one
    columnwise  codes of Wᵀ (K, N), which dgrad reads      is present

Its shape is W's, and its dtype is nominal. W may be (E, N, K), a matrix for each expert with scales
of its own. Ops are of four kinds:

    mf.tensor.quantize      returns the codes, in the present specs only
    copy, move, slice       copy the codes; slices on block boundaries only
    in-place ops            run on the values, which are rounded again to nearest, in place
    other ops               run on the values

The handlers of ops are in dispatch.py.

Only views of the whole tensor, in its shape, share its memory. `w[0] = value` changes w; a write to
values, such as w[0].zero_() or one to w.t() or w.diagonal(), does not. A write to a slice or a
part, such as w.chunk(2)[0], is refused: a checkpoint that is loaded into other shards than it was
saved from would write so. `w.data = values` gives w new memory, as torch does, with the values'
codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from operator import attrgetter
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..private_torch import OpOverload, refuse_addresses
from ..recipe import FORWARD_W, Recipe
from ..spec import Spec
from .attributes import attributes_of
from .directions import TENSORS, require_direction, require_nearest, transposed, weight_shape
from .memory import NO_ADDRESS, MemoryOfCodes
from .quantized import Operand, Operands, Quantized, quantize_both, require_tensor

NOMINAL_DTYPES = (torch.float32, torch.bfloat16)
Description = tuple[str, tuple[int, ...]]  # spec and shape of a part
Context = tuple[Description | None, Description | None, torch.dtype]
Op = OpOverload[..., Any]
Handler = Callable[..., Any]
OTHERS = "others"  # the key of the handler of all ops that have none
HANDLERS: dict[object, Handler] = {}


def handles(*funcs: object) -> Callable[[Handler], Handler]:
    """Registers a handler of these ops. It may return NotImplemented, to run on the values."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(funcs, handler))
        return handler

    return register


class QuantizedTensor(MemoryOfCodes, Tensor):
    """A weight as codes and scales, for the parameter of a layer.

    Build one with from_tensor, or from results of mf.tensor.quantize.

    Args:
        rowwise: codes of W (N, K) or (E, N, K), or None. A QuantizedTensor alone becomes a
            torch.nn.Parameter of the same memory: accelerate and others make parameters again by
            type(parameter)(value, requires_grad=…).
        columnwise: codes of Wᵀ, from mf.tensor.quantize(W, columnwise=True), or None.
        dtype: the nominal dtype, float32 or bfloat16: that of dequantized values. None: bfloat16.
        requires_grad: as of any tensor.

    Raises:
        TypeError: a part is no Quantized, or a QuantizedTensor is not alone.
        ValueError: both parts are None, or a part's tensors do not fit its spec and shape, or its
            spec rounds stochastically.

    Example:
        >>> weight = mf.QuantizedTensor.from_tensor(torch.full((32, 64), 0.3), "nvfp4/16x16")
        >>> weight.rowwise.codes.shape  # two a byte
        torch.Size([32, 32])
        >>> layer = torch.nn.Linear(64, 32, bias=False)
        >>> layer.weight = torch.nn.Parameter(weight)
        >>> layer(torch.ones(2, 64)).shape
        torch.Size([2, 32])
    """

    rowwise: Quantized | None
    columnwise: Quantized | None
    owns_codes = True  # False: a cast, which changes only the nominal dtype, shares the codes
    is_slice = False  # whether this is a copy of codes, where torch's slice would be a view

    @staticmethod
    def __new__(
        cls,
        rowwise: Quantized | QuantizedTensor | None,
        columnwise: Quantized | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        if isinstance(rowwise, Tensor):
            return parameter_of_codes(rowwise, columnwise, dtype, requires_grad)
        shapes: dict[tuple[int, ...], torch.device] = {}
        for name, part in (("rowwise", rowwise), ("columnwise", columnwise)):
            if part is not None:
                is_columnwise = name == "columnwise"
                require_direction(f"QuantizedTensor: {name}", part, is_columnwise, cls.owns_codes)
                require_nearest(part.spec)
                shapes[weight_shape(part)] = part.codes.device
        if len(shapes) != 1:
            raise ValueError(
                "QuantizedTensor: expected a rowwise part, a columnwise one, or both parts of one "
                f"matrix, got {list(shapes) or 'neither'}"
            )
        dtype = dtype or torch.bfloat16
        if dtype not in NOMINAL_DTYPES:
            raise ValueError(f"QuantizedTensor: expected dtype in {NOMINAL_DTYPES}, got {dtype}")
        ((shape, device),) = shapes.items()
        out = Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        out._hold(rowwise, columnwise)
        return out

    def _hold(self, rowwise: Quantized | None, columnwise: Quantized | None) -> None:
        self.rowwise, self.columnwise = rowwise, columnwise
        refuse_addresses(self, NO_ADDRESS)

    @classmethod
    def from_tensor(
        cls, x: Tensor, row_spec: str | None, col_spec: str | None = None
    ) -> QuantizedTensor:
        """Quantizes a matrix to nearest.

        Args:
            x: (rows, cols) or (experts, rows, cols), float32 or bfloat16, which becomes the nominal
                dtype.
            row_spec: of the rowwise part; None: no such part.
            col_spec: of the columnwise part; None: no such part.

        Returns:
            The quantized weight.

        Raises:
            ValueError: x is no matrix, both specs are None, or a spec is stochastic or delayed.
        """
        row = require_nearest(row_spec, False).text if row_spec else None
        col = require_nearest(col_spec, False).text if col_spec else None
        return cls._of_parts(*quantize_both(x.detach().contiguous(), row, col), x.dtype)

    # ---- parts -----------------------------------------------------------------------------------

    @property
    def specs(self) -> tuple[str | None, str | None]:
        """The specs of the rowwise and of the columnwise part; None: no such part."""
        rowwise, columnwise = self.rowwise, self.columnwise
        return rowwise.spec if rowwise else None, columnwise.spec if columnwise else None

    @property
    def directions(self) -> list[Quantized]:
        """The rowwise and the columnwise part: one or both."""
        return [part for part in (self.rowwise, self.columnwise) if part is not None]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Computes the values of the codes, without a gradient.

        Args:
            dtype: float32 or bfloat16; None: the nominal dtype.

        Returns:
            A torch.Tensor of this shape.

        Raises:
            ValueError: all parts are transformed (`+rht`).
        """
        dtype = dtype or self.dtype
        part = next((p for p in self.directions if not Spec.parse(p.spec).transform), None)
        if part is None:
            raise ValueError(f"QuantizedTensor: expected values, got transformed ones in {self!r}")
        values = part.dequantize(dtype)
        return values.mT.contiguous() if part.columnwise else values

    def direction(self, spec: str, columnwise: bool) -> Quantized:
        """Returns the codes of one direction, if need be transposed from the other direction.

        Raises:
            ValueError: no part has codes in `spec` that transpose exactly.
        """
        part, other = self.rowwise, self.columnwise
        if columnwise:
            part, other = other, part
        if part is not None and part.spec == spec:
            return part
        if other is not None and other.spec == spec and Spec.parse(spec).transposes_exactly:
            return transposed(other)
        wanted = "columnwise" if columnwise else "rowwise"
        raise ValueError(f"QuantizedTensor: asked for {wanted} {spec} of {self!r}")

    def operands(
        self, recipe: Recipe, columnwise: bool, is_row_major: bool = False
    ) -> list[Tensor]:
        """Returns the eight tensors of the op layer_operands, of a weight under a recipe.

        Args:
            recipe: of the products: fprop reads W (N, K) rowwise, dgrad columnwise.
            columnwise: whether dgrad reads the weight.
            is_row_major: whether this is Wᵀ (…, K, N).

        Raises:
            ValueError: the weight does not hold these codes.
        """
        row = col = Operand.none(self.device)
        if recipe.fprop.b != "bf16":
            row = Operand.of(self.direction(recipe.fprop.b, is_row_major))
        if columnwise and recipe.dgrad.b == FORWARD_W:
            col = row
        elif columnwise and recipe.dgrad.b != "bf16":
            col = Operand.of(self.direction(recipe.dgrad.b, not is_row_major))
        return Operands(row, col).tensors()

    def update_usage(self, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Drops a direction (False), or transposes it from the other direction (True).

        Raises:
            ValueError: neither direction would be left, or the transpose is not exact.
        """
        kept = [self.rowwise, self.columnwise]
        for i, wanted in enumerate((rowwise, columnwise)):
            if wanted and kept[i] is None:
                kept[i] = self.direction(self.directions[0].spec, bool(i))
            elif wanted is False:
                kept[i] = None
        if kept == [None, None]:
            raise ValueError("QuantizedTensor: update_usage would drop both directions")
        self.rowwise, self.columnwise = kept

    def _map(
        self, fn: Callable[[Quantized], Quantized], dtype: torch.dtype | None = None
    ) -> QuantizedTensor:
        """Returns a QuantizedTensor of fn(part) for each part."""
        rowwise, columnwise = (p and fn(p) for p in (self.rowwise, self.columnwise))
        return self._of_parts(rowwise, columnwise, dtype or self.dtype)

    @classmethod
    def _of_parts(
        cls, rowwise: Quantized | None, columnwise: Quantized | None, dtype: torch.dtype
    ) -> QuantizedTensor:
        """Builds a QuantizedTensor of valid parts, of another one or of a trace, without checks."""
        part = rowwise if rowwise is not None else columnwise
        assert part is not None
        shape, device = weight_shape(part), part.codes.device
        out = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        out._hold(rowwise, columnwise)
        return out

    # torch makes these of views, whose memory is not that of the codes.

    def __setitem__(self, index: Any, value: Any) -> None:
        """Writes to elements: all values are rounded again.

        Raises:
            ValueError: this is a slice, or has no values, as all parts are transformed.
        """
        values = self * 1  # autograd records it
        values[index] = value
        self.copy_(values)

    def fill_diagonal_(self, fill_value: float, wrap: bool = False) -> QuantizedTensor:
        """Writes to the diagonal: all values are rounded again.

        Raises:
            ValueError: as __setitem__.
        """
        self.copy_((self * 1).fill_diagonal_(fill_value, wrap))
        return self

    def _write(self, source: Tensor) -> None:
        """Writes a source in place: its bytes where the layouts are equal, else rounded values."""
        if self.is_slice:
            raise ValueError(
                "QuantizedTensor: a slice has codes of its own, a write to it would not reach the "
                f"whole; expected a write to the whole or a clone, got a slice {tuple(self.shape)}"
            )
        if isinstance(source, QuantizedTensor):
            others = source.directions
            if (source.specs, source.shape) != (self.specs, self.shape):
                source = source.dequantize()
        if not isinstance(source, QuantizedTensor):
            values = source.to(device=self.device, dtype=self.dtype).expand(self.shape)
            others = [p for p in quantize_both(values.contiguous(), *self.specs) if p is not None]
        for part, other in zip(self.directions, others):
            for name in TENSORS:
                getattr(part, name).copy_(getattr(other, name))
        self.count_write()

    def count_write(self) -> None:
        """Counts a write to the codes, as torch does not below __torch_dispatch__.

        Backward, which reads codes or values of before, then raises as after any write in place.
        """
        written = [t for t in (self, *self.inner_tensors()) if not t.is_inference()]
        torch.autograd.graph.increment_version(written)

    # ---- torch's protocols -----------------------------------------------------------------------

    @property
    def data(self) -> Tensor:
        """An alias of the codes. Assigned values are rounded to nearest, in the present specs.

        An assigned QuantizedTensor brings its own specs and codes.
        """
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, source: Tensor) -> None:
        """Takes the codes of a QuantizedTensor, or of values that are rounded here.

        torch's setter changes only what the tensor shows outside: dtype, device.

        Raises:
            TypeError: source is no tensor.
            ValueError: source has another shape, or is neither float32 nor bfloat16.
        """
        require_tensor("QuantizedTensor: data", source)
        if source.shape != self.shape or source.dtype not in NOMINAL_DTYPES:
            raise ValueError(
                f"QuantizedTensor: data: expected {tuple(self.shape)} of a dtype in "
                f"{NOMINAL_DTYPES}, got {tuple(source.shape)} {source.dtype}; for a weight of "
                "another shape or dtype call mf.restore_(model) first"
            )
        if not isinstance(source, QuantizedTensor):
            source = self.from_tensor(source, *self.specs)
        Tensor.data.__set__(self, source)  # type: ignore[attr-defined]
        self.rowwise, self.columnwise = source.rowwise, source.columnwise
        self.is_slice = source.is_slice

    def __repr__(self, *, tensor_contents: object = None) -> str:
        row, col = self.specs
        return (
            f"{type(self).__name__}(rowwise={row!r}, columnwise={col!r}, "
            f"shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"
        )

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        names, context = [], []
        for side, part in (("rowwise", self.rowwise), ("columnwise", self.columnwise)):
            names += [f"_{side}_{name}" for name in TENSORS] if part is not None else []
            context.append(None if part is None else (part.spec, part.shape))
        return names, (context[0], context[1], self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Context, outer_size: object, outer_stride: object
    ) -> QuantizedTensor:
        row, col, dtype = context

        def part(side: str, spec: str, shape: tuple[int, ...]) -> Quantized:
            codes, scale, amax = (inner[f"_{side}_{name}"] for name in TENSORS)
            return Quantized(codes, scale, amax, spec, shape, side == "columnwise")

        rowwise = part("rowwise", *row) if row else None
        columnwise = part("columnwise", *col) if col else None
        return cls._of_parts(rowwise, columnwise, dtype)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        leaf = self.requires_grad, isinstance(self, nn.Parameter)
        parts = self.rowwise, self.columnwise, self.dtype
        return _rebuild_tensor, (*parts, *leaf, attributes_of(self))

    def __deepcopy__(self, memo: dict[int, QuantizedTensor]) -> QuantizedTensor:
        if id(self) not in memo:
            leaf = self.requires_grad, isinstance(self, nn.Parameter)
            memo[id(self)] = twin = _as_leaf(self.detach().clone(), *leaf)
            twin.__dict__.update(deepcopy(attributes_of(self), memo))
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Op,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func, HANDLERS[OTHERS])
        result = handler(func, *args, **kwargs)
        return HANDLERS[OTHERS](func, *args, **kwargs) if result is NotImplemented else result


for _side in ("rowwise", "columnwise"):
    for _name in TENSORS:  # the tensors that __tensor_flatten__ names
        setattr(QuantizedTensor, f"_{_side}_{_name}", property(attrgetter(f"{_side}.{_name}")))


# ---- parameters ----------------------------------------------------------------------------------


def parameter_of_codes(
    value: Tensor, columnwise: object, dtype: torch.dtype | None, requires_grad: bool
) -> QuantizedTensor:
    """Returns a parameter that shares the memory of a QuantizedTensor; TypeError for values."""
    if not isinstance(value, QuantizedTensor):
        raise TypeError(
            "QuantizedTensor: expected codes, a Quantized or a QuantizedTensor, got values, a "
            f"{type(value).__name__}, without their specs; use from_tensor(values, …)"
        )
    if columnwise is not None or dtype not in (None, value.dtype):
        raise TypeError(
            "QuantizedTensor: expected a QuantizedTensor alone, got columnwise or dtype with it"
        )
    return cast(QuantizedTensor, nn.Parameter(value, requires_grad))


def _as_leaf(tensor: Tensor, requires_grad: bool, is_parameter: bool) -> QuantizedTensor:
    leaf = nn.Parameter(tensor) if is_parameter else tensor
    return cast(QuantizedTensor, leaf.requires_grad_(requires_grad))


def _rebuild_tensor(
    rowwise: Quantized | None,
    columnwise: Quantized | None,
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    attributes: Mapping[str, Any] = MappingProxyType({}),
) -> QuantizedTensor:
    tensor = QuantizedTensor(rowwise, columnwise, dtype)
    leaf = _as_leaf(tensor, requires_grad, is_parameter)
    leaf.__dict__.update(attributes)
    return leaf


torch.serialization.add_safe_globals([_rebuild_tensor])
