"""Handlers of the ops that read a QuantizedTensor's codes. Every other op runs on its values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, wraps
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor

from .._native import ops
from ..private_torch import tree_leaves, tree_map
from ..spec import Spec
from .directions import map_tensors, slice_elements
from .memory import has_memory, refuse_memory
from .quantized import Operand, Quantized, raw_scale
from .quantized_tensor import NOMINAL_DTYPES, OTHERS, Handler, Op, QuantizedTensor, handles

aten, c10d = torch.ops.aten, torch.ops.c10d


@handles(OTHERS)
def run_on_values(func: Op, *args: object, **kwargs: object) -> object:
    """Runs an op on the values. Arguments that the op writes to are rounded again, in place."""
    values: dict[int, Tensor] = {}

    def values_of(leaf: object) -> object:
        if not isinstance(leaf, QuantizedTensor):
            return leaf
        key = id(leaf.directions[0].codes)  # which aliases share
        if key not in values:
            values[key] = leaf.dequantize()
        return values[key]

    result = func(*tree_map(values_of, args), **tree_map(values_of, kwargs))
    written: dict[int, QuantizedTensor] = {}
    arguments = func._schema.arguments
    given = {**dict(zip([argument.name for argument in arguments], args)), **kwargs}
    for argument in arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(given.get(argument.name)) if is_written else ():
            if isinstance(leaf, QuantizedTensor):
                now = values[id(leaf.directions[0].codes)]
                require_same_shape(func, leaf, now)
                leaf._write(now)
                written[id(now)] = leaf
    return tree_map(lambda leaf: written.get(id(leaf), leaf), result) if written else result


def require_same_shape(func: Op, before: QuantizedTensor, now: Tensor) -> None:
    """Raises ValueError where an op in place, such as t_ or resize_, gave values another shape."""
    if now.shape != before.shape:
        raise ValueError(
            f"QuantizedTensor: {func}: expected an op in place that keeps the shape "
            f"{tuple(before.shape)} of codes, got values {tuple(now.shape)}"
        )


@handles(aten.erfinv_.default)
def erfinv_(func: Op, x: QuantizedTensor) -> NoReturn:
    """Refuses what nn.init.trunc_normal_ calls: it is infinite where values were rounded to ±1."""
    raise ValueError(
        "QuantizedTensor: erfinv_: expected values, got a weight of codes, which nn.init."
        "trunc_normal_ would round after each of its five ops; draw into a tensor, and copy it: "
        "weight.copy_(nn.init.trunc_normal_(torch.empty(weight.shape)))"
    )


@handles(ops.quantize.default)
def quantize(func: Op, x: Tensor, row: str, col: str, **options: object) -> tuple[Tensor, ...]:
    """Returns the codes of a QuantizedTensor; other specs are refused, not rounded a second time.

    An amax is accepted only for delayed scaling, where the codes were cast under that amax.
    """
    if not isinstance(x, QuantizedTensor):
        return NotImplemented

    def operand(spec: str, side: str) -> Operand:
        if not spec:
            return Operand.none(x.device)
        parsed, columnwise = Spec.parse(spec), side == "col"
        if options.get(f"amax_{side}") is not None and not parsed.is_delayed:
            raise ValueError("quantize: a QuantizedTensor keeps its own amax; expected amax=None")
        part = x.direction(parsed.text, columnwise)
        out, length = Operand.of(part), part.shape[-1]
        if options.get(f"decoded_{side}"):
            out = out._replace(decoded=ops.decode(out.codes, out.scale, spec, length))
        if options.get(f"fp8_{side}"):
            codes, scale = ops.fp4_as_fp8(out.codes, out.scale, out.amax, spec, length)
            out = out._replace(codes=codes, scale=scale)
        return out

    return (*operand(row, "row"), *operand(col, "col"))


@handles(ops.quantize_delayed.default)
def quantize_delayed(
    func: Op,
    x: Tensor,
    row: str,
    col: str,
    amax_history: Tensor,
    history_row: int,
    history_col: int,
    **options: object,
) -> tuple[Tensor, ...]:
    """Returns the codes of a QuantizedTensor, and raises the history to the amaxes that they have.

    The amaxes of delayed directions are not returned, as of a cast of values.
    """
    if not isinstance(x, QuantizedTensor):
        return NotImplemented
    tensors = list(quantize(func, x, row, col, **options))
    for spec, place, index in ((row, history_row, 2), (col, history_col, 6)):
        if spec and Spec.parse(spec).is_delayed:
            current = amax_history[place, ..., 1]
            torch.maximum(current, tensors[index], out=current)
            tensors[index] = tensors[index].new_empty(0)
    return tuple(tensors)


@handles(ops.linear.default, ops.linear_group.default, ops.mlp.default)
def layer(func: Op, *args: object, **kwargs: object) -> object:
    """Decomposes a composite op, which inference mode dispatches as a whole."""
    return func.decompose(*args, **kwargs)


@handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def alias(func: Op, x: QuantizedTensor) -> QuantizedTensor:
    """Returns a QuantizedTensor of the same memory."""
    out = x._map(lambda part: part)
    out.is_slice = x.is_slice
    return out


def copies_codes(handler: Handler) -> Handler:
    """Gives a copy of codes that the tensor does not own the values: their memory may be freed."""

    @wraps(handler)
    def copy(func: Op, x: QuantizedTensor, *args: object, **options: object) -> object:
        return handler(func, x, *args, **options) if x.owns_codes else NotImplemented

    return copy


@handles(aten.clone.default)
@copies_codes
def clone(func: Op, x: QuantizedTensor, *, memory_format: object = None) -> QuantizedTensor:
    """Copies the codes."""
    return x._map(lambda part: map_tensors(part, torch.clone))


@handles(aten._to_copy.default)
def to_copy(
    func: Op,
    x: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **layout: object,
) -> QuantizedTensor:
    """Copies the codes to a device or nominal dtype; another dtype has the values."""
    if dtype is not None and dtype not in NOMINAL_DTYPES:
        return NotImplemented
    if not x.owns_codes:
        is_cast = dtype not in (None, x.dtype) and device in (None, x.device)
        return x._map(lambda part: part, dtype) if is_cast else NotImplemented
    move = partial(Tensor.to, device=device, non_blocking=non_blocking, copy=True)
    return x._map(lambda part: map_tensors(part, move), dtype)


@handles(aten._pin_memory.default)
@copies_codes
def pin_memory(func: Op, x: QuantizedTensor, *device: object, **options: object) -> QuantizedTensor:
    """Copies the codes to pinned memory."""
    return x._map(lambda part: map_tensors(part, lambda t: func(t, *device, **options)))


@handles(aten.is_pinned.default)
def is_pinned(func: Op, x: QuantizedTensor, *device: object, **options: object) -> bool:
    """Tells whether all codes, scales and amaxes are in pinned memory."""
    return all(func(t, *device, **options) for t in x.inner_tensors() if t.numel() > 0)


@handles(aten.empty_like.default)
def empty_like(
    func: Op,
    x: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    **layout: object,
) -> Tensor:
    """Allocates memory for codes; for a dtype that has none, or where x owns none, for values.

    Copies and collectives fill it.
    """
    pinned = bool(pin_memory)
    if not x.owns_codes or (dtype is not None and dtype not in NOMINAL_DTYPES):
        dtype, device = dtype or x.dtype, device or x.device
        return torch.empty(x.shape, dtype=dtype, device=device, pin_memory=pinned)
    empty = partial(torch.empty_like, device=device, pin_memory=pinned)
    return x._map(lambda part: map_tensors(part, empty), dtype)


@handles(aten.new_empty.default)
def new_empty(
    func: Op,
    x: QuantizedTensor,
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    **layout: object,
) -> Tensor:
    """Allocates memory as empty_like for the present shape; for another one, for values.

    torch.distributed.checkpoint.async_save copies a tensor so: an empty one gets its attributes.
    """
    if list(size) == list(x.shape):
        return empty_like(func, x, dtype=dtype, device=device, pin_memory=pin_memory)
    like = torch.empty(0, dtype=x.dtype, device=x.device)
    return func(like, size, dtype=dtype, device=device, pin_memory=pin_memory, **layout)


@handles(aten.copy_.default)
def copy_(func: Op, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Writes to a QuantizedTensor."""
    if not isinstance(target, QuantizedTensor):
        return NotImplemented
    target._write(source)
    return target


@handles(aten.view.default, aten._unsafe_view.default)
def view(func: Op, x: QuantizedTensor, size: Sequence[int]) -> QuantizedTensor:
    """Returns an alias for the present shape; a view of another shape has the values."""
    known = torch.Size([length for length in size if length != -1])
    wanted = [x.numel() // max(known.numel(), 1) if n == -1 else n for n in size]
    return alias(func, x) if list(x.shape) == wanted else NotImplemented


@handles(aten.view.dtype)
def view_as_dtype(func: Op, x: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    """Returns an alias for the present dtype, and refuses to read bits of values."""
    return alias(func, x) if dtype == x.dtype else refuse_memory(f"view({dtype})")


@handles(aten.as_strided.default)
def as_strided(
    func: Op,
    x: QuantizedTensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> QuantizedTensor:
    """Returns an alias for the present layout; other layouts have the values."""
    is_whole = list(size) == list(x.shape) and list(stride) == list(x.stride())
    return alias(func, x) if is_whole and not storage_offset else NotImplemented


# ---- slices --------------------------------------------------------------------------------------


def copy_slice(x: QuantizedTensor, dim: int, start: int, end: int) -> QuantizedTensor:
    """Copies [start, end) of one dimension of each direction, for what torch has as a view.

    Of a gathered weight only directions that are in memory.

    Raises:
        ValueError: none is.
    """
    last = x.dim() - 1

    def slice_part(part: Quantized | None) -> Quantized | None:
        if part is None or not has_memory(part.codes):
            return None
        is_swapped = part.columnwise and dim >= last - 1
        return slice_elements(part, 2 * last - 1 - dim if is_swapped else dim, start, end)

    rowwise, columnwise = slice_part(x.rowwise), slice_part(x.columnwise)
    if rowwise is None and columnwise is None:
        raise ValueError(f"QuantizedTensor: expected codes in memory, got freed ones of {x!r}")
    out = QuantizedTensor._of_parts(rowwise, columnwise, x.dtype)
    out.is_slice = True
    return out


@handles(aten.split.Tensor, aten.split_with_sizes.default)
@handles(aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default)
def split(
    func: Op, x: QuantizedTensor, sizes: int | Sequence[int], dim: int = 0
) -> list[QuantizedTensor]:
    """Splits on block boundaries."""
    dim = dim % x.dim()
    length = x.shape[dim]
    if isinstance(sizes, int):
        starts = range(0, length, sizes) if sizes > 0 else ()
        sizes = [min(sizes, length - start) for start in starts]
    if not sizes or sum(sizes) != length:
        return NotImplemented
    ends = accumulate(sizes)
    return [copy_slice(x, dim, end - size, end) for size, end in zip(sizes, ends)]


@handles(aten.slice.Tensor)
def slice_(
    func: Op,
    x: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> QuantizedTensor:
    """Slices on block boundaries; steps other than 1 have the values."""
    if step != 1:
        return NotImplemented
    dim = dim % x.dim()
    begin, stop, _ = slice(start, end).indices(x.shape[dim])
    if (begin, stop) == (0, x.shape[dim]):
        return alias(func, x)
    return copy_slice(x, dim, begin, max(begin, stop))


# ---- collectives ---------------------------------------------------------------------------------
# torch's distribute_tensor makes a DTensor with these: it splits, pads, scatters or broadcasts.


@handles(aten.constant_pad_nd.default)
def pad(func: Op, x: QuantizedTensor, lengths: Sequence[int], value: float = 0) -> NoReturn:
    """Refuses, on every rank, before a rank waits for another."""
    raise ValueError(
        "QuantizedTensor: codes cannot be padded; expected a dimension that the ranks cut as a "
        f"multiple of their number, got a last shard {tuple(x.shape)} to be padded by "
        f"{max(lengths)}"
    )


def raw_tensors(x: QuantizedTensor) -> list[Tensor]:
    """Lists codes, scale (as bytes, or float32) and amax of both directions, except empty ones."""
    tensors = [t for part in x.directions for t in (part.codes, raw_scale(part), part.amax)]
    return [t for t in tensors if t.numel() > 0]


@handles(c10d.scatter_.default)
def scatter(
    func: Op,
    outputs: Sequence[QuantizedTensor],
    inputs: Sequence[Sequence[QuantizedTensor]],
    *how: object,
    **options: object,
) -> tuple[object, object]:
    """Scatters the shards of one rank to all ranks: the bytes of codes and scales."""
    (output,) = outputs
    shards = [[raw_tensors(shard) for shard in rank_inputs] for rank_inputs in inputs]
    calls = [
        ([received], [[shard[i] for shard in rank_shards] for rank_shards in shards])
        for i, received in enumerate(raw_tensors(output))
    ]
    return outputs, run_in_order(func, calls, how, options)


@handles(c10d.broadcast_.default)
def broadcast(
    func: Op, tensors: Sequence[QuantizedTensor], *how: object, **options: object
) -> tuple[object, object]:
    """Broadcasts one rank's codes and scales: their bytes."""
    (tensor,) = tensors
    return tensors, run_in_order(func, [([t],) for t in raw_tensors(tensor)], how, options)


def run_in_order(
    func: Op, calls: Sequence[tuple[object, ...]], how: Sequence[object], options: dict[str, object]
) -> object:
    """Runs collectives of one group, which end in their order, and returns the last one's work.

    All run with async_op: a backend returns no work otherwise.
    """
    names = [argument.name for argument in func._schema.arguments][len(calls[0]) :]
    options = {**dict(zip(names, how)), **options, "async_op": True}
    works = [func(*call, **options)[1] for call in calls]
    for work in works[:-1]:
        work.wait()
    return works[-1]


# ---- tensors of the same shape -------------------------------------------------------------------


@handles(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)
def tensor_like(func: Op, x: QuantizedTensor, *args: object, **kwargs: object) -> Tensor:
    """Makes a torch.Tensor, such as optimizer state, without reading the codes."""
    return func(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args, **kwargs)
