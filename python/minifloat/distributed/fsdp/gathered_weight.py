"""The whole weight on each rank, from the pieces that all ranks sent.

Rowwise codes are FSDP2's own memory, where those of all ranks follow each other; columnwise ones
are transposed from what travelled. Scales of blocks travel; others are of amaxes that all know.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..._native import ops
from ...spec import Spec
from ...tensor.quantized import Quantized, raw_scale
from ...tensor.quantized_tensor import TENSORS, QuantizedTensor
from .plan import Part
from .shard_layout import Layout, Piece, ceil_div


class GatheredWeight(QuantizedTensor):
    """What a gather brings. Its codes are FSDP2's memory, which a copy would keep from it.

    Its parts stay what they are, so that a compiled block, which asks for them at each call, gets
    them from attributes.
    """

    owns_codes = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flattened = super().__tensor_flatten__()
        for name in self.flattened[0]:
            side, tensor = name[1:].split("_")
            self.__dict__[name] = getattr(getattr(self, side), tensor)

    @classmethod
    def _of_parts(cls, *args: Any) -> Any:
        return cls(*args)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return self.flattened

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> GatheredWeight:
        whole = QuantizedTensor.__tensor_unflatten__(inner, context, outer_size, outer_stride)
        return GatheredWeight(whole.rowwise, whole.columnwise, whole.dtype)


for _side in ("rowwise", "columnwise"):
    for _name in TENSORS:
        setattr(GatheredWeight, f"_{_side}_{_name}", None)  # instances have their own


@contextmanager
def unversioned(*tensors: Tensor) -> Iterator[None]:
    """Writes to what FSDP2 has gathered again: the same values, for those who saved them."""
    versioned = tuple(t for t in tensors if not t.is_inference())
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(versioned):
        yield


@lru_cache(maxsize=1024)
def places_on(layout: Layout, device: torch.device) -> Tensor:
    return torch.tensor(layout.places, device=device)


def whole_table(sent: Tensor, layout: Layout) -> Tensor:
    """The scales of W by blocks of rows, from those of all ranks: bytes (world, table_bytes)."""
    height, width = layout.table_shape
    table = sent.contiguous().view(layout.table_dtype).view(layout.rows.world * height, width)
    if layout.places is not None:
        return table[places_on(layout, table.device)]
    return table[: ceil_div(layout.grown(layout.rows.n), layout.part.block)]


def empty_direction(part: Part, n: int, cols: int, device: torch.device) -> Quantized:
    """Room for one direction of W (n, cols), as read."""
    shape = (cols, n) if part.columnwise else (n, cols)
    spec = Spec.parse(part.spec)
    codes = torch.empty(shape[0], spec.sizes(*shape).code_cols, dtype=torch.uint8, device=device)
    scale = torch.empty(spec.scale_shape(*shape), dtype=spec.scale_dtype, device=device)
    amax = torch.empty(spec.amax_shape(shape[0]), dtype=torch.float32, device=device)
    return Quantized(codes, scale, amax, part.spec, shape, part.columnwise)


@dataclass
class Convoy:
    """The weights that FSDP2 gathers at once: what they transpose and copy are two calls, made when
    the last one is there."""

    last: weakref.ref[Any]
    sources: list[Tensor] = field(default_factory=list)
    transposes: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    copies: list[Tensor] = field(default_factory=list)

    def transpose(self, source: Tensor, to: Tensor, *sizes: int) -> None:
        self.sources.append(source)
        self.transposes.append(to)
        self.sizes += sizes

    def copy(self, to: list[Tensor], given: list[Tensor]) -> None:
        self.copies += to
        self.given += given

    def arrive(self) -> None:
        if not self.sources and not self.given:
            return
        with unversioned(*self.transposes, *self.copies):
            if self.sources:
                ops.transpose_many(self.sources, self.transposes, self.sizes)
            if self.given:
                torch._foreach_copy_(self.copies, self.given)
        for pending in (self.sources, self.transposes, self.sizes, self.given, self.copies):
            pending.clear()


def fill_codes(target: Quantized, layout: Layout, codes: Tensor, convoy: Convoy) -> None:
    """A direction's codes from the flat ones of a part: the same direction, or a square's other."""
    if not target.columnwise and target.codes.data_ptr() == codes.data_ptr():
        return
    rows = layout.grown(layout.rows.n)
    gathered = codes[: rows * layout.code_bytes]
    if target.columnwise:
        code_bits = Spec.parse(target.spec).code_bits
        convoy.transpose(gathered, target.codes, rows, layout.cols, code_bits)
    else:
        with unversioned(target.codes):
            target.codes.view(-1).copy_(gathered)


def fill_scales(target: Quantized, layout: Layout, table: Tensor) -> None:
    """table: scales by blocks of rows; of rows, with their amaxes."""
    with unversioned(target.scale, target.amax):
        if layout.part.amaxes == "row":
            target.scale.copy_(table[:, 0])
            target.amax.copy_(table[:, 1])
        else:
            raw_scale(target).copy_(table.t() if target.columnwise else table)


def known_of(target: Quantized, piece: Piece) -> tuple[list[Tensor], list[Tensor]]:
    """What all ranks know without a table, and where it goes: (to, from)."""
    if piece.table is None:
        return [target.scale, target.amax], [piece.scale, piece.amax]
    if target.amax.dim() == 0:  # NVFP4's, of the tensor; those of rows travel
        return [target.amax], [piece.amax]
    return [], []


def release(target: Quantized) -> None:
    """A direction that no gather has brought: an op that reads it says so."""
    (target.codes if target.columnwise else target.scale).untyped_storage().resize_(0)


def hold(t: Tensor) -> None:
    """Memory again for what was released."""
    if t.untyped_storage().size() == 0:
        t.untyped_storage().resize_(t.nbytes)
