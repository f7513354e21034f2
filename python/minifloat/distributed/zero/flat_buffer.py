"""WireLayout: many weights' shards in one flat buffer a rank, and their way back after a gather.

    piece of a rank    | fragment of wire 0 | fragment of wire 1 | …    each at the same offset on
                                                                        every rank, 16 bytes apart
    gathered           (ranks, bytes of a piece)

Cuts are on even elements, so that no byte of 4-bit codes is divided. Where the caller's own cuts
divide one, each of its two fragments holds it with the other's nibble zero, and merging ORs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._native import ops
from ...checks import require_int
from ...tensor.quantized_tensor import QuantizedTensor
from .master_weights import plan_of, wires


@dataclass(frozen=True)
class Wire:
    """Of one direction of weight `weight`: where its fragments lie, and each rank's bytes of it."""

    weight: int
    offset: int
    ranges: tuple[tuple[int, int], ...]

    def divided_bytes(self) -> list[tuple[int, int]]:
        """(rank, byte) for each rank that begins within a byte of an earlier one."""
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
    ranks: int
    cuts: tuple[tuple[int, ...], ...]  # of each weight: where its ranks' shards begin, and its end
    wires: tuple[Wire, ...]
    piece_bytes: int
    numbers: list[int]  # the same as the operators take it

    @classmethod
    def of(
        cls,
        model_weights: Sequence[QuantizedTensor],
        ranks: int,
        cuts: Sequence[Sequence[int]] | None = None,
    ) -> WireLayout:
        """Even shards of every weight, or the caller's: of each weight (ranks + 1) elements."""
        if require_int("WireLayout: ranks", ranks) < 1:
            raise ValueError(f"WireLayout: expected at least one rank, got {ranks}")
        for weight in model_weights:
            plan_of(weight)
        if cuts is None:
            cuts = [ops.even_cuts(*weight.shape, ranks) for weight in model_weights]
        _require_cuts(model_weights, cuts, ranks)
        owners = [i for i, weight in enumerate(model_weights) for _ in plan_of(weight).parts]
        specs = [spec for weight in model_weights for spec in plan_of(weight).specs]
        numbers = ops.fragment_layout(
            specs,
            [model_weights[i].shape[1] for i in owners],
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
        """Each weight's flat elements [begin, end) on this rank."""
        self._require_rank(rank)
        return [(cut[rank], cut[rank + 1]) for cut in self.cuts]

    def new_piece(self, like: Tensor) -> Tensor:
        """A rank's buffer, on the device of `like`."""
        return like.new_zeros(self.piece_bytes, dtype=torch.uint8)

    def fragments(self, piece: Tensor, rank: int) -> list[tuple[Tensor, ...]]:
        """Views of a rank's piece: what quantize_master_weights takes for each weight."""
        self._require_rank(rank)
        found: list[list[Tensor]] = [[] for _ in self.cuts]
        for wire in self.wires:
            begin, end = wire.ranges[rank]
            found[wire.weight].append(piece[wire.offset : wire.offset + end - begin])
        return [tuple(of_weight) for of_weight in found]

    def byte_ranges(self, weight: int) -> list[tuple[tuple[int, int], ...]]:
        """Each wire's bytes on each rank, for a gather in place; ValueError where one is shared."""
        own = [wire for wire in self.wires if wire.weight == weight]
        for wire in own:
            for rank, byte in wire.divided_bytes():
                raise ValueError(
                    f"WireLayout: expected cuts on even elements for a gather in place, but weight "
                    f"{weight} is cut inside byte {byte} before rank {rank}: gather fragments, and "
                    "merge_fragments"
                )
        return [wire.ranges for wire in own]

    def gather(self, piece: Tensor, model_weights: Sequence[QuantizedTensor], group: Any) -> None:
        """All ranks' pieces into the weights' wires: one all-gather."""
        gathered = piece.new_empty(self.ranks * self.piece_bytes)
        dist.all_gather_into_tensor(gathered, piece, group=group)
        self.merge_fragments(gathered, model_weights)

    def merge_fragments(self, gathered: Tensor, model_weights: Sequence[QuantizedTensor]) -> None:
        """(ranks, piece_bytes) into the weights' wires; shared bytes are ORed."""
        memory = [wire for weight in model_weights for wire in wires(weight)]
        ops.merge_fragments(gathered, memory, self.numbers, self.ranks)


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
