"""The ops that QuantizedTensor has itself; every other op runs on its values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._native import ops
from ..spec import Spec
from .quantized import Quantized, map_tensors, raw_scale
from .quantized_tensor import NOMINAL_DTYPES, QuantizedTensor, handles
from .slicing import cut

aten, c10d = torch.ops.aten, torch.ops.c10d


@handles(ops.quantize.default)
def quantize(
    func: Any,
    x: Tensor,
    row: str,
    col: str,
    *,
    amax_row: Tensor | None = None,
    amax_col: Tensor | None = None,
    decoded_row: bool = False,
    decoded_col: bool = False,
    **random: Any,
) -> Any:
    """The codes it holds. What it does not hold is refused, not rounded a second time.

    Codes of a delayed scale were made under the amax that is given again here.
    """
    if not isinstance(x, QuantizedTensor):
        return NotImplemented
    given = [spec for spec, amax in ((row, amax_row), (col, amax_col)) if amax is not None]
    if not all(Spec.parse(spec).is_delayed for spec in given):
        raise ValueError("quantize: a QuantizedTensor keeps its own amax; expected amax=None")

    def answer(spec: str, columnwise: bool, decoded: bool) -> tuple[Tensor, ...]:
        none = [x.new_empty(0, dtype=d) for d in (torch.uint8, torch.float32, torch.float32)]
        values = x.new_empty(0, dtype=torch.bfloat16)
        if not spec:
            return (*none, values)
        part = x.direction(Spec.parse(spec).text, columnwise)
        if decoded:
            values = ops.decode(part.codes, part.scale, part.spec, part.shape[1])
        return part.codes, raw_scale(part), part.amax, values

    return (*answer(row, False, decoded_row), *answer(col, True, decoded_col))


@handles(ops.linear.default, ops.linear_group.default)
def layer(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Inference mode hands composite ops over whole; what they are made of reads the codes."""
    return func.decompose(*args, **kwargs)


@handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def alias(func: Any, x: QuantizedTensor) -> Any:
    same = x._map(lambda part: part)
    same.is_slice = x.is_slice
    return same


@handles(aten.clone.default)
def clone(func: Any, x: QuantizedTensor, *, memory_format: Any = None) -> Any:
    return x._map(lambda part: map_tensors(part, torch.clone))


@handles(aten._to_copy.default)
def to_copy(
    func: Any,
    x: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    non_blocking: bool = False,
    **layout: Any,
) -> Any:
    """Another nominal dtype or device: the same codes. Any other dtype: the values."""
    if dtype is not None and dtype not in NOMINAL_DTYPES:
        return NotImplemented
    if not x.owns_codes and device in (None, x.device):
        return x._map(lambda part: part, dtype)

    def move(t: Tensor) -> Tensor:
        return t.to(device=device or t.device, non_blocking=non_blocking, copy=True)

    return x._map(lambda part: map_tensors(part, move), dtype)


@handles(aten.empty_like.default)
def empty_like(
    func: Any,
    x: QuantizedTensor,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    **layout: Any,
) -> Any:
    """Memory for the same codes, which copies and collectives fill. Of any other dtype: plain."""
    if dtype is not None and dtype not in NOMINAL_DTYPES:
        return NotImplemented
    empty = partial(torch.empty_like, device=device, pin_memory=bool(pin_memory))
    return x._map(lambda part: map_tensors(part, empty), dtype)


@handles(aten.copy_.default)
def copy_(func: Any, target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(target, QuantizedTensor):
        return NotImplemented
    target._write(source)
    return target


@handles(aten.view.default, aten._unsafe_view.default)
def view(func: Any, x: QuantizedTensor, size: Any) -> Any:
    """To its own shape: itself. To another: of the values."""
    given = [length for length in size if length != -1]
    wanted = [x.numel() // max(torch.Size(given).numel(), 1) if n == -1 else n for n in size]
    return alias(func, x) if list(x.shape) == wanted else NotImplemented


@handles(aten.as_strided.default)
def as_strided(
    func: Any, x: QuantizedTensor, size: Any, stride: Any, storage_offset: int | None = None
) -> Any:
    """In its own layout: itself."""
    is_whole = list(size) == list(x.shape) and list(stride) == list(x.stride())
    return alias(func, x) if is_whole and not storage_offset else NotImplemented


# ---- pieces --------------------------------------------------------------------------------------


def piece(x: QuantizedTensor, dim: int, start: int, end: int) -> QuantizedTensor:
    """Rows or columns [start, end) of both directions."""

    def cut_part(part: Quantized) -> Quantized:
        return cut(part, 1 - dim if part.columnwise else dim, start, end)

    return x._map(cut_part)


@handles(aten.split_with_sizes.default)
def split_with_sizes(func: Any, x: QuantizedTensor, sizes: Any, dim: int = 0) -> Any:
    dim = dim % 2
    if sum(sizes) != x.shape[dim]:
        return NotImplemented
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [piece(x, dim, end - size, end) for size, end in zip(sizes, ends)]


@handles(aten.split.Tensor)
def split(func: Any, x: QuantizedTensor, size: int, dim: int = 0) -> Any:
    dim = dim % 2
    length = x.shape[dim]
    if size <= 0:
        return NotImplemented
    starts = range(0, length, size)
    return [piece(x, dim, start, min(start + size, length)) for start in starts]


@handles(aten.slice.Tensor)
def slice_(
    func: Any,
    x: QuantizedTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Any:
    if step != 1:
        return NotImplemented
    dim = dim % 2
    begin, stop, _ = slice(start, end).indices(x.shape[dim])
    if (begin, stop) == (0, x.shape[dim]):
        return alias(func, x)
    part = piece(x, dim, begin, max(begin, stop))
    part.is_slice = True
    return part


# ---- collectives ---------------------------------------------------------------------------------
# What torch's distribute_tensor makes a DTensor with: it splits, pads, scatters or broadcasts.


@handles(aten.constant_pad_nd.default)
def pad(func: Any, x: QuantizedTensor, lengths: Any, value: Any = 0) -> Any:
    """Refused on every rank, before any of them waits for another."""
    raise ValueError(
        "QuantizedTensor: codes cannot be padded; expected a dimension that the ranks cut as a "
        f"multiple of their number, got a last piece {tuple(x.shape)} to be padded by "
        f"{max(lengths)}"
    )


def raw_tensors(x: QuantizedTensor) -> list[Tensor]:
    """Codes, scale and amax of both directions, as bytes where they are any."""
    parts = [part for part in (x.rowwise, x.columnwise) if part is not None]
    tensors = [t for part in parts for t in (part.codes, raw_scale(part), part.amax)]
    return [t for t in tensors if t.numel() > 0]


@handles(c10d.scatter_.default)
def scatter(func: Any, outputs: Any, inputs: Any, *how: Any, **options: Any) -> Any:
    """The pieces of one rank, to each its own: codes and scales, byte for byte."""
    (output,) = outputs
    pieces = [[raw_tensors(piece) for piece in rank_inputs] for rank_inputs in inputs]
    calls = [
        ([own], [[piece[i] for piece in rank_pieces] for rank_pieces in pieces])
        for i, own in enumerate(raw_tensors(output))
    ]
    return outputs, in_turn(func, calls, how, options)


@handles(c10d.broadcast_.default)
def broadcast(func: Any, tensors: Any, *how: Any, **options: Any) -> Any:
    """One rank's codes and scales, byte for byte, to all."""
    (tensor,) = tensors
    return tensors, in_turn(func, [([t],) for t in raw_tensors(tensor)], how, options)


def in_turn(func: Any, calls: Any, how: Any, options: Any) -> Any:
    """Collectives of one group, which end in turn; what the caller waits for is the last one.

    All as async_op: a backend gives nothing to wait for otherwise.
    """
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("async_op") - len(calls[0])
    how = [True if i == place else given for i, given in enumerate(how)]
    options = {name: name == "async_op" or given for name, given in options.items()}
    works = [func(*call, *how, **options)[1] for call in calls]
    for work in works[:-1]:
        work.wait()
    return works[-1]


# ---- plain tensors of its shape ------------------------------------------------------------------


@handles(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_empty.default,
    aten.new_full.default,
)
def plain_like(func: Any, x: QuantizedTensor, *args: Any, **kwargs: Any) -> Tensor:
    """Optimizer state and the like: ordinary tensors, made without reading the codes."""
    return func(torch.empty(x.shape, dtype=x.dtype, device=x.device), *args, **kwargs)
