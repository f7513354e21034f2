"""WireLayout: one flat buffer a rank for the shard codes of many weights, and its all-gather.

    shard codes of a rank    | fragment of flat codes 0 | fragment of flat codes 1 | …
                             each at the same offset on every rank, a multiple of 16 bytes
    gathered                 (ranks, bytes of a rank's shard codes)

Default cuts are on even elements, so no byte of 4-bit codes is divided. Where the caller's cuts
divide a byte, both fragments hold it, each with the other's nibble zero. Merging ORs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..._native import ops
from ...checks import require_int
from ...tensor.quantized_tensor import QuantizedTensor
from .master_weights import wires
from .weight_plan import plan_of


@dataclass(frozen=True)
class Wire:
    """Flat codes of one direction: the weight's index, the fragments' offset, each rank's bytes."""

    weight: int
    offset: int
    ranges: tuple[tuple[int, int], ...]

    def divided_bytes(self) -> list[tuple[int, int]]:
        """Lists (rank, byte) for each rank that begins inside a byte of an earlier rank."""
        divided, last = [], -1
        for rank, (begin, end) in enumerate(self.ranges):
            if begin == end:
                continue
            if begin < last:
                divided.append((rank, begin))
            last = max(last, end)
        return divided


@dataclass(frozen=True)
class WireLayout:
    """The layout of a rank's shard codes: which bytes of which weight lie where.

    Attributes:
        ranks: the number of ranks.
        cuts: for each weight (ranks + 1) flat elements: each shard's begin, and the weight's end.
        wires: for each direction with flat codes its weight, offset and byte ranges.
        piece_bytes: bytes of one rank's shard codes.
        numbers: the layout as integers, an argument of the native operators.
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
        if require_int("WireLayout: ranks", ranks) < 1:
            raise ValueError(f"WireLayout: expected at least one rank, got {ranks}")
        for weight in model_weights:
            plan_of(weight)
        if cuts is None:
            cuts = [ops.even_cuts(*rows_of(weight), ranks) for weight in model_weights]
        _require_cuts(model_weights, cuts, ranks)
        owners = [i for i, weight in enumerate(model_weights) for _ in plan_of(weight).parts]
        specs = [spec for weight in model_weights for spec in plan_of(weight).specs]
        numbers = ops.fragment_layout(
            specs,
            [model_weights[i].shape[-1] for i in owners],
            [cut for i in owners for cut in cuts[i]],
            ranks,
        )
        found = []
        for k, i in enumerate(owners):
            offset, *ends = numbers[k * (1 + 2 * ranks) : (k + 1) * (1 + 2 * ranks)]
            found.append(Wire(i, offset, tuple(zip(ends[::2], ends[1::2]))))
        return cls(ranks, tuple(tuple(cut) for cut in cuts), tuple(found), numbers[-1], numbers)

    def _require_rank(self, rank: int) -> None:
        if not 0 <= require_int("WireLayout: rank", rank) < self.ranks:
            raise ValueError(f"WireLayout: expected a rank below {self.ranks}, got {rank}")

    def shards(self, rank: int) -> list[tuple[int, int]]:
        """Lists each weight's shard on one rank.

        Args:
            rank: 0 to ranks - 1.

        Returns:
            For each weight the flat elements [begin, end).

        Raises:
            ValueError: the rank is out of range.
        """
        self._require_rank(rank)
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
        self._require_rank(rank)
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
        found = [wire for wire in self.wires if wire.weight == weight]
        for wire in found:
            for rank, byte in wire.divided_bytes():
                raise ValueError(
                    f"WireLayout: expected cuts on even elements for a gather in place, but weight "
                    f"{weight} is cut inside byte {byte} before rank {rank}: gather fragments, and "
                    "merge_fragments"
                )
        return [wire.ranges for wire in found]

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
            group: the process group, of as many ranks as the layout.

        Raises:
            RuntimeError, ValueError: sizes do not fit the layout.
        """
        gathered = piece.new_empty(self.ranks * self.piece_bytes)
        dist.all_gather_into_tensor(gathered, piece, group=group)
        self.merge_fragments(gathered, model_weights)

    def merge_fragments(self, gathered: Tensor, model_weights: Sequence[QuantizedTensor]) -> None:
        """Copies gathered shard codes into the weights' flat codes; ORs bytes that cuts divide.

        Args:
            gathered: uint8, ranks * piece_bytes in the order of the ranks.
            model_weights: the weights of the layout, in its order.

        Raises:
            RuntimeError, ValueError: sizes do not fit the layout.
        """
        memory = [wire for weight in model_weights for wire in wires(weight)]
        ops.merge_fragments(gathered, memory, self.numbers, self.ranks)


def rows_of(weight: QuantizedTensor) -> tuple[int, int]:
    """Returns the number of rows, of all experts together, and the columns."""
    return weight.shape[:-1].numel(), weight.shape[-1]


def _require_cuts(
    weights: Sequence[QuantizedTensor], cuts: Sequence[Sequence[int]], ranks: int
) -> None:
    if len(cuts) != len(weights):
        raise ValueError(f"WireLayout: expected cuts of {len(weights)} weights, got {len(cuts)}")
    for i, (weight, cut) in enumerate(zip(weights, cuts)):
        whole = (0, weight.numel())
        if len(cut) != ranks + 1 or (cut[0], cut[-1]) != whole or list(cut) != sorted(cut):
            raise ValueError(
                f"WireLayout: expected {ranks + 1} cuts of weight {i} that rise from 0 to "
                f"{whole[1]}, got {list(cut)}"
            )
