"""Casts of matrices that the ranks of a group have cut along I: their bytes are one process's.

    amaxes        of a tensor, of an expert, or of rows that the ranks cut: the largest of all ranks
    random bits   come from the place in the whole operand

A fused w13 (E, 2I, D), and its gradient, have two parts along I: gate and up. Each rank has its cut
of both, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._native import ops
from ..distributed.amaxes import reduce_amaxes
from ..spec import Spec
from ..tensor.operands import Operands


class CutOperand(NamedTuple):
    """One direction of a matrix: codes, scale and amax, as products read them."""

    codes: Tensor
    scale: Tensor
    amax: Tensor


class Random(NamedTuple):
    """The random bits of one operand: int64 (seed, count), and the name of their use."""

    rng: Tensor
    stream: int


class Part(NamedTuple):
    """A part of one tensor of an operand along a dimension; None: the whole tensor."""

    t: Tensor
    dim: int | None = None


@dataclass(frozen=True)
class Cut:
    """Where the ranks of a group cut a weight of experts (E, N, K), and x and g with it.

    Args:
        group: the ranks.
        rank: this one's number in the group.
        ranks: their number.
        dim: of the weight: N (1) or K (2).
        parts: the parts along that dimension, each cut: 2 of fused gate and up, else 1.
    """

    group: Any
    rank: int
    ranks: int
    dim: int
    parts: int = 1

    def dim_of(self, matrix: str) -> int | None:
        """Returns the dimension, rows (0) or columns (1), of x, w or g that the ranks cut."""
        return {"x": (None, 1), "w": (0, 1), "g": (1, None)}[matrix][self.dim - 1]

    def cast(
        self,
        matrix: str,
        values: Tensor,
        text: str,
        columnwise: bool,
        *,
        random: Random | None = None,
        active_amax: Tensor | None = None,
        row_ids: Tensor | None = None,
        **groups: Any,
    ) -> CutOperand:
        """Quantizes this rank's cut of a matrix in one direction.

        Args:
            matrix: "x", "w" or "g".
            values: this rank's cut: (M, columns), or (E, rows, columns) of a weight.
            text: the spec.
            columnwise: whether the transpose is read.
            random: under stochastic rounding.
            active_amax: under delayed scaling; None: the amax of the values, of all ranks.
            row_ids: int32 (M), the rows of the random counter.
            groups: the arguments `groups` and `group_unit` of the op quantize.

        Returns:
            The operand. Under delayed scaling its amax is the current one, of all ranks.
        """
        spec, at = Spec.parse(text), self.dim_of(matrix)
        is_along = at is not None and (at == 1) != columnwise  # cuts the rows as read
        amax = active_amax
        if self._needs_amax_of_ranks(spec, is_along, at) and not spec.is_delayed:
            own = ops.amax(values, text, columnwise, groups=groups.get("groups"))
            amax = self.largest(own)
        options: dict[str, Any] = {"amax_col" if columnwise else "amax_row": amax, **groups}
        if spec.is_stochastic and random is not None:
            options |= {"rng": random.rng, "stream_row": random.stream}
            options["stream_col"] = random.stream
            if not columnwise and groups:
                options["row_ids"] = row_ids
        is_whole = spec.is_stochastic and at is not None and (self.parts > 1 or not is_along)
        if is_whole:
            assert at is not None
            found = self._cast_within_whole(values, text, columnwise, at, options)
        else:
            if spec.is_stochastic and at is not None:
                begin = self.rank * values.shape[at - 2]
                options["origin"] = (0, begin) if at == 1 else (begin, 0)
            found = quantized(values, text, columnwise, options)
        if spec.is_delayed and at is not None:
            return found._replace(amax=self.largest(found.amax))
        return found

    def largest(self, amaxes: Tensor) -> Tensor:
        """Returns the largest amaxes of the ranks."""
        return reduce_amaxes(amaxes, self.group)

    @staticmethod
    def _needs_amax_of_ranks(spec: Spec, is_along: bool, at: int | None) -> bool:
        is_of_tensor = at is not None and spec.amax_of == "tensor"
        return is_of_tensor or (is_along and spec.amax_of == "row")

    def _cast_within_whole(
        self, values: Tensor, text: str, columnwise: bool, at: int, options: dict[str, Any]
    ) -> CutOperand:
        """Quantizes the whole matrix, with zeros for the other ranks' cuts, and takes this rank's.

        The op numbers the rows of experts as read by the rows of the matrix that it reads, so the
        random bits of cut rows come from their place only where it reads the whole. This costs as
        much as the cast of the whole matrix.
        """
        dim, places = at - 2, self._places(values.shape[at - 2])
        shape = list(values.shape)
        shape[dim] *= self.ranks
        whole = values.new_zeros(shape)
        length = values.shape[dim] // self.parts
        for part, (begin, end) in enumerate(places):
            own = values.narrow(dim, part * length, length)
            whole.narrow(dim, begin, end - begin).copy_(own)
        out = quantized(whole, text, columnwise, options)
        read = -3 - dim if columnwise else dim  # the dimension of the operand as read
        return joined([part_of(out, Spec.parse(text), read, *place) for place in places])

    def _places(self, length: int) -> list[tuple[int, int]]:
        """Returns the begin and end, in the whole, of each part of a cut of this length."""
        own = length // self.parts
        begins = [(part * self.ranks + self.rank) * own for part in range(self.parts)]
        return [(begin, begin + own) for begin in begins]


def quantized(values: Tensor, text: str, columnwise: bool, options: dict[str, Any]) -> CutOperand:
    """Calls the op quantize for one direction."""
    row, col = ("", text) if columnwise else (text, "")
    out = ops.quantize(values, row, col, **options)
    return CutOperand(*Operands.of(out).direction(columnwise)[:3])


def part_of(operand: CutOperand, spec: Spec, dim: int, begin: int, end: int) -> list[Part]:
    """Returns the elements [begin, end) of rows (-2) or columns (-1), which cut no block."""
    byte = 1 if dim == -2 else 8 // spec.code_bits  # elements
    codes = Part(operand.codes.narrow(dim, begin // byte, (end - begin) // byte), dim)
    scale, amax = Part(operand.scale), Part(operand.amax)
    if spec.has_blocks:
        size = spec.block[dim]
        scale = Part(operand.scale.narrow(dim, begin // size, (end - begin) // size), dim)
    elif spec.amax_of == "row" and dim == -2:
        scale, amax = (Part(t.narrow(-1, begin, end - begin), -1) for t in (operand.scale, amax.t))
    return [codes, scale, amax]


def joined(parts: list[list[Part]]) -> CutOperand:
    """Returns the operand of parts that lie next to each other."""
    tensors = zip(*parts)
    return CutOperand(
        *(p[0].t if p[0].dim is None else torch.cat([q.t for q in p], p[0].dim) for p in tensors)
    )
