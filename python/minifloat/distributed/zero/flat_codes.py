"""Lays out and gathers the codes of weights whose masters are sharded over ranks.

Ranks gather a direction's codes in the flat order of the weight's elements. Those are its **flat
codes** (public name: wires). A rowwise direction's flat codes are its codes. Where a columnwise
direction holds the rowwise codes, transposed, it needs none. Any other columnwise direction is
transposed from its flat codes after the gather.

WireLayout describes one flat buffer a rank, with the shard codes of many weights, and gathers it:

    shard codes of a rank    | fragment of flat codes 0 | fragment of flat codes 1 | …
                             each at the same offset on every rank, a multiple of 16 bytes
    gathered                 (ranks, bytes of a rank's shard codes)

By default shards begin at even elements, so no byte of 4-bit codes is divided. Where the caller's
cuts divide a byte, both fragments hold that byte, with zeros in the other's half. The bytes are
merged by OR.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..._native import ops
from ...checks import require_int
from ...spec import Spec
from ...tensor.directions import require_memory
from ...tensor.quantized import Quantized, require_tensor
from ...tensor.quantized_tensor import QuantizedTensor
from ..handshake import raise_on_all, require_same

# (matrices, their transposes, rows, cols, bits) of the native MatrixTransposes
Transpose = tuple[Tensor, Tensor, int, int, int]


class Uncopied:
    """Holds what is cached for one weight's memory. A copy of the weight has none."""

    def __deepcopy__(self, memo: object) -> None:
        return None


@dataclass(frozen=True, eq=False)
class WeightPlan(Uncopied):
    """The tensors and native casts of one weight. They are made once and used in all steps."""

    rowwise: Quantized | None
    columnwise: Quantized | None
    parts: tuple[Quantized, ...]  # directions cast from the master, each with flat codes
    flat_codes: tuple[Tensor, ...]
    casts: tuple[object, ...]  # torch.classes.minifloat.ShardCast of each part, of one matrix
    transposes: tuple[Transpose, ...]  # after the gather


def plan_of(weight: QuantizedTensor) -> WeightPlan:
    """Returns the weight's cached plan; a new one where its directions were replaced."""
    if not isinstance(weight, QuantizedTensor):
        raise TypeError(f"expected QuantizedTensor weights, got {type(weight).__name__}")
    plan: WeightPlan | None = weight.__dict__.get("master_plan")
    if plan is None or (plan.rowwise, plan.columnwise) != (weight.rowwise, weight.columnwise):
        plan = weight.__dict__["master_plan"] = _new_plan(weight)
    return plan


def _new_plan(weight: QuantizedTensor) -> WeightPlan:
    row, col = weight.rowwise, weight.columnwise
    *experts, rows, cols = weight.shape
    is_derived = False
    if row is not None and col is not None and row.spec == col.spec:
        is_derived = Spec.parse(row.spec).transposes_exactly
    parts = tuple(p for p in (row, None if is_derived else col) if p is not None)
    flat_codes = []
    for part in parts:
        codes = part.codes
        if part.columnwise:
            shape = (*experts, rows, Spec.parse(part.spec).sizes(rows, cols).code_cols)
            kept: Tensor | None = weight.__dict__.get("columnwise_flat_codes")
            codes = codes.new_zeros(shape) if kept is None else kept
            weight.__dict__["columnwise_flat_codes"] = codes
        flat_codes.append(codes)
    transposes: list[Transpose] = []
    if col is not None:
        bits = Spec.parse(col.spec).code_bits
        transposes.append((flat_codes[-1], col.codes, rows, cols, bits))
    if row is not None and col is not None and is_derived:
        for source, target in ((row.scale, col.scale), (row.amax, col.amax)):
            is_grid = source.dim() == 2 + len(experts)
            height, width = source.shape[-2:] if is_grid else (1, source.numel())
            if source.numel() > 0:
                transposes.append((source, target, height, width, 8 * source.element_size()))
    rounds = weight.dtype == torch.bfloat16
    casts = tuple(
        torch.classes.minifloat.ShardCast(p.spec, p.columnwise, rows, cols, rounds) for p in parts
    )
    return WeightPlan(row, col, parts, tuple(flat_codes), casts, tuple(transposes))


def wires(weight: QuantizedTensor) -> tuple[Tensor, ...]:
    """Returns the flat codes that a gather fills, one tensor for each direction with flat codes.

    Args:
        weight: a QuantizedTensor (rows, cols) or (experts, rows, cols).

    Returns:
        Contiguous uint8 (…, rows, bytes a row) for each such direction. Rowwise flat codes are the
        weight's codes. Columnwise ones are separate memory, allocated at the first call and stored
        with the weight.

    Raises:
        TypeError: the weight is no QuantizedTensor.

    Example:
        >>> weight = mf.QuantizedTensor.from_tensor(torch.ones(32, 64), "mxfp8", "mxfp8")
        >>> rowwise, columnwise = mf.distributed.wires(weight)
        >>> rowwise.data_ptr() == weight.rowwise.codes.data_ptr()
        True
        >>> columnwise.shape  # as W, not as its transpose
        torch.Size([32, 64])
    """
    return plan_of(weight).flat_codes


def attach_wires(weight: QuantizedTensor, memory: Sequence[Tensor]) -> None:
    """Moves the weight's flat codes, with their values, into `memory`.

    Args:
        weight: a QuantizedTensor.
        memory: contiguous uint8 tensors of the shapes of wires(weight), on the same device, such
            as views of one flat buffer.

    Raises:
        TypeError, ValueError: the weight is no QuantizedTensor, or the memory does not fit.

    Example:
        >>> weight = mf.QuantizedTensor.from_tensor(torch.ones(32, 64), "nvfp4/16x16")
        >>> buffer = torch.empty(32 * 32, dtype=torch.uint8)  # for all weights, say
        >>> mf.distributed.attach_wires(weight, [buffer.view(32, 32)])
        >>> weight.rowwise.codes.data_ptr() == buffer.data_ptr()
        True
    """
    plan = plan_of(weight)
    if len(memory) != len(plan.flat_codes):
        raise ValueError(
            f"attach_wires: expected {len(plan.flat_codes)} buffers, got {len(memory)}"
        )
    for new, old in zip(memory, plan.flat_codes):
        require_tensor("attach_wires: memory", new)
        wanted, got = ((t.dtype, tuple(t.shape), t.device) for t in (old, new))
        if wanted != got or not new.is_contiguous():
            raise ValueError(f"attach_wires: expected contiguous memory {wanted}, got {got}")
        require_memory("attach_wires: memory", new)
    for part, new, old in zip(plan.parts, memory, plan.flat_codes):
        new.copy_(old)
        if part.columnwise:
            weight.__dict__["columnwise_flat_codes"] = new
        else:
            weight.rowwise = replace(part, codes=new)
    del weight.__dict__["master_plan"]


# ---- the layout of a rank's shard codes ----------------------------------------------------------


class Wire(NamedTuple):
    """The flat codes of one direction: the weight's index, the offset, and each rank's bytes."""

    weight: int
    offset: int
    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class WireLayout:
    """The layout of a rank's shard codes: which bytes of which weight lie where.

    Attributes:
        ranks: the number of ranks.
        cuts: for each weight (ranks + 1) flat elements: each shard's begin, and the weight's end.
        wires: for each direction with flat codes its weight, offset and byte ranges.
        piece_bytes: bytes of one rank's shard codes.
        numbers: the layout as integers, an argument of the native operators.

    Example:
        >>> weight = mf.QuantizedTensor.from_tensor(torch.ones(32, 64), "nvfp4/16x16")
        >>> layout = mf.distributed.WireLayout.of([weight], ranks=2)
        >>> layout.shards(rank=1)  # flat elements
        [(1024, 2048)]
        >>> layout.new_piece(like=torch.empty(0)).shape  # bytes of a rank
        torch.Size([512])
    """

    ranks: int
    cuts: tuple[tuple[int, ...], ...]
    wires: tuple[Wire, ...]
    piece_bytes: int
    numbers: list[int]

    @classmethod
    def of(
        cls,
        model_weights: Sequence[QuantizedTensor],
        ranks: int,
        cuts: Sequence[Sequence[int]] | None = None,
    ) -> WireLayout:
        """Lays out the shard codes of some weights.

        Args:
            model_weights: QuantizedTensors, in the order of every later call.
            ranks: the number of ranks, at least 1.
            cuts: for each weight (ranks + 1) flat elements that rise from 0 to its size. None: even
                shards, cut on even elements.

        Returns:
            The layout, equal on every rank.

        Raises:
            TypeError: a weight is no QuantizedTensor.
            ValueError: ranks or cuts are out of range.
        """
        require_int("WireLayout: ranks", ranks, least=1)
        parts = [(i, p) for i, w in enumerate(model_weights) for p in plan_of(w).parts]
        sizes = [(weight.shape[:-1].numel(), weight.shape[-1]) for weight in model_weights]
        if cuts is None:
            cuts = [ops.even_cuts(rows, cols, ranks) for rows, cols in sizes]
        if len(cuts) != len(sizes):
            raise ValueError(f"WireLayout: expected cuts of {len(sizes)} weights, got {len(cuts)}")
        for i, ((rows, cols), cut) in enumerate(zip(sizes, cuts)):
            ends = 0, rows * cols
            if len(cut) != ranks + 1 or (cut[0], cut[-1]) != ends or list(cut) != sorted(cut):
                raise ValueError(
                    f"WireLayout: expected {ranks + 1} cuts of weight {i} that rise from 0 to "
                    f"{ends[1]}, got {list(cut)}"
                )
        numbers = ops.fragment_layout(
            [part.spec for _, part in parts],
            [sizes[i][1] for i, _ in parts],
            [cut for i, _ in parts for cut in cuts[i]],
            ranks,
        )
        found = []
        for k, (i, _) in enumerate(parts):
            offset, *ends = numbers[k * (1 + 2 * ranks) : (k + 1) * (1 + 2 * ranks)]
            found.append(Wire(i, offset, tuple(zip(ends[::2], ends[1::2]))))
        return cls(ranks, tuple(tuple(cut) for cut in cuts), tuple(found), numbers[-1], numbers)

    def shards(self, rank: int) -> list[tuple[int, int]]:
        """Lists each weight's shard on one rank.

        Args:
            rank: 0 to ranks - 1.

        Returns:
            For each weight the flat elements [begin, end).

        Raises:
            ValueError: the rank is out of range.
        """
        rank = require_int("WireLayout: rank", rank, 0, self.ranks - 1)
        return [(cut[rank], cut[rank + 1]) for cut in self.cuts]

    def new_piece(self, like: Tensor) -> Tensor:
        """Allocates a rank's shard codes.

        Args:
            like: a tensor on the device of the weights.

        Returns:
            uint8 (piece_bytes), zero.
        """
        return like.new_zeros(self.piece_bytes, dtype=torch.uint8)

    def fragments(self, piece: Tensor, rank: int) -> list[tuple[Tensor, ...]]:
        """Returns views of a rank's shard codes, the fragments of quantize_master_weights.

        Args:
            piece: uint8 (piece_bytes), of new_piece.
            rank: 0 to ranks - 1.

        Returns:
            For each weight uint8 fragments, one for each direction with flat codes.

        Raises:
            ValueError: the rank is out of range.
        """
        require_int("WireLayout: rank", rank, 0, self.ranks - 1)
        found: list[list[Tensor]] = [[] for _ in self.cuts]
        for wire in self.wires:
            begin, end = wire.ranges[rank]
            found[wire.weight].append(piece[wire.offset : wire.offset + end - begin])
        return [tuple(of_weight) for of_weight in found]

    def byte_ranges(self, weight: int) -> list[tuple[tuple[int, int], ...]]:
        """Lists the bytes of each rank in one weight's flat codes, for a gather in place.

        Args:
            weight: the weight's index in the layout.

        Returns:
            For each direction with flat codes, for each rank, the bytes [begin, end).

        Raises:
            ValueError: a cut on an odd element divides a byte.
        """
        found = [wire.ranges for wire in self.wires if wire.weight == weight]
        for ranges in found:
            last = 0
            for rank, (begin, end) in enumerate(ranges):
                if begin < min(last, end):
                    raise ValueError(
                        f"WireLayout: expected cuts on even elements for a gather in place, but "
                        f"weight {weight} is cut inside byte {begin} before rank {rank}: gather "
                        "fragments, and merge_fragments"
                    )
                last = max(last, end)
        return found

    def gather(
        self,
        piece: Tensor,
        model_weights: Sequence[QuantizedTensor],
        group: dist.ProcessGroup | None,
    ) -> None:
        """Gathers all ranks' shard codes into the weights' flat codes, in one all-gather.

        Args:
            piece: uint8 (piece_bytes), this rank's shard codes.
            model_weights: the weights of the layout, in its order.
            group: the process group, of as many ranks as the layout; None: the default group.

        Raises:
            TypeError: an argument is of another type. Where there are other ranks it is a
                ValueError.
            ValueError: sizes do not fit the layout, layouts of ranks differ, or a rank is missing;
                on every rank.
        """
        ranks = dist.group.WORLD if group is None else group
        try:
            self._require_fitting(piece, ranks)
            memory = self._memory_of(model_weights)
        except (TypeError, ValueError) as error:
            raise_on_all(error, ranks)
        require_same(
            "WireLayout.gather of",
            self._text,
            cast(dist.ProcessGroup, ranks),
            expected="WireLayout: expected all {} ranks to gather {}",
            differs="WireLayout: expected all ranks to gather by one layout",
        )
        gathered = piece.new_empty(self.ranks * self.piece_bytes)
        dist.all_gather_into_tensor(gathered, piece, group=group)
        ops.merge_fragments(gathered, memory, self.numbers, self.ranks)

    @cached_property
    def _text(self) -> str:
        """What ranks compare of a layout."""
        number = ops.stream(f"{self.numbers}")
        return f"{len(self.cuts)} weights, {self.piece_bytes} bytes a rank, cut by number {number}"

    def _require_fitting(self, piece: object, ranks: object) -> None:
        """Raises TypeError or ValueError where arguments of a gather do not fit the layout."""
        if not isinstance(ranks, dist.ProcessGroup):
            raise TypeError(
                f"WireLayout: group: expected a process group or None, got {ranks!r} "
                f"({type(ranks).__name__})"
            )
        if (size := dist.get_world_size(ranks)) != self.ranks:
            raise ValueError(f"WireLayout: group: expected {self.ranks} ranks, got {size}")
        found = require_tensor("WireLayout: piece", piece)
        is_fitting = found.dtype == torch.uint8 and found.shape == (self.piece_bytes,)
        if not is_fitting or not found.is_contiguous():
            raise ValueError(
                f"WireLayout: piece: expected contiguous uint8 ({self.piece_bytes}), got "
                f"{found.dtype} {tuple(found.shape)} with strides {found.stride()}"
            )
        require_memory("WireLayout: piece", found)

    def _memory_of(self, model_weights: object) -> list[Tensor]:
        """Returns the flat codes of the layout's weights.

        Raises:
            TypeError: there is something else than QuantizedTensors.
            ValueError: their number or sizes are not the layout's.
        """
        if not isinstance(model_weights, Sequence):
            raise TypeError(
                "WireLayout: model_weights: expected a list of QuantizedTensors, got "
                f"{type(model_weights).__name__}"
            )
        memory = [wire for weight in model_weights for wire in wires(weight)]
        expected = [max(end for _, end in wire.ranges) for wire in self.wires]
        if (got := [wire.numel() for wire in memory]) != expected:
            raise ValueError(
                f"WireLayout: model_weights: expected flat codes of {expected} bytes, got {got}"
            )
        return memory

    def merge_fragments(self, gathered: Tensor, model_weights: Sequence[QuantizedTensor]) -> None:
        """Copies gathered shard codes into the weights' flat codes; ORs bytes that cuts divide.

        Args:
            gathered: uint8, ranks * piece_bytes in the order of the ranks.
            model_weights: the weights of the layout, in its order.

        Raises:
            RuntimeError, ValueError: sizes do not fit the layout.
        """
        ops.merge_fragments(gathered, self._memory_of(model_weights), self.numbers, self.ranks)
