"""Casts of a shard that give the bytes which the whole has there: what it cannot see, it is told.

origin    where the shard begins, for the random bits
amax      of the tensor, and of rows that the ranks cut: one MAX over the ranks a cast
blocks    and transforms lie within one shard; other sizes are refused before anything is sent
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..._native import ops
from ...recipe import Recipe
from ...spec import Spec
from ...tensor.quantized_tensor import QuantizedTensor
from ..amaxes import reduce_amaxes

# Operands by their row of an amax history; a name is that of the operand's random stream.
PLACES = ("x/fprop", "w/fprop", "g/dgrad", "w/dgrad", "g/wgrad", "x/wgrad")
FPROP_X, FPROP_W, DGRAD_G, DGRAD_W, WGRAD_G, WGRAD_X = range(len(PLACES))
COLUMNWISE = (DGRAD_W, WGRAD_G, WGRAD_X)
IN_FORCE, RUNNING = 0, 1  # columns of an amax history
RANDOM_UNIT = 16  # elements that share their random words


class Operand(NamedTuple):
    """One direction of a matrix: codes and scales, or under bf16 the values and nothing."""

    codes: Tensor
    scale: Tensor
    amax: Tensor


class Tokens(NamedTuple):
    """Of the rows that a rank has of x: so many stretches, of so many rows next to each other."""

    stretches: int
    length: int


@dataclass(frozen=True, eq=False)
class ShardedLayer:
    """What casts and products depend on besides the tensors."""

    recipe: Recipe
    group: dist.ProcessGroup
    dim: int  # of W that is cut
    tokens: Tokens | None = None  # of x, where its codes are gathered
    rng: Tensor | None = None
    history: Tensor | None = None
    stream: int = 0
    needs_dx: bool = False
    needs_dw: bool = False
    given: Any = None  # linear.GivenInput: x, where another layer has quantized it
    weight: tuple[Operand, Operand] | None = None  # W's codes, where it is unchanged

    def spec(self, place: int) -> str:
        product = (self.recipe.fprop, self.recipe.dgrad, self.recipe.wgrad)[place // 2]
        return (product.a, product.b)[place % 2]

    def cut(self, operand: str) -> int | None:
        """The dimension of x, w or g that the ranks cut; None: each has the whole."""
        if operand == "w":
            return self.dim
        if operand == "g":
            return 1 if self.dim == 0 else None
        return 1 if self.dim == 1 else (None if self.tokens is None else 0)


# ---- sizes ---------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def shard_unit(spec: str, columnwise: bool, dim: int) -> int:
    """What a shard's length along a matrix's own dimension must be a multiple of."""
    if spec == "bf16":
        return 1
    along = dim != columnwise  # the contraction dimension is the last one as read
    random = RANDOM_UNIT if along and Spec.parse(spec).is_stochastic else 1
    return max(Spec.parse(spec).unit[int(along)], random)


def tokens_fit(recipe: Recipe, tokens: Tokens) -> bool:
    """Can x's codes be gathered? Not in bf16, nor where random bits need each row's place."""
    row, col = recipe.fprop.a, recipe.wgrad.b
    if row == "bf16" or Spec.parse(row).is_stochastic or Spec.parse(col).is_stochastic:
        return False
    units = shard_unit(row, False, 0), shard_unit(col, True, 0)
    return all(tokens.length % unit == 0 for unit in units)


def require_fit(layer: ShardedLayer, weight: Tensor) -> None:
    """ValueError where a block, a transform or a random word is more than one rank's."""
    world, length, name = dist.get_world_size(layer.group), weight.shape[layer.dim], "NK"[layer.dim]
    for place, title in enumerate(PLACES):
        operand, spec = title[0], layer.spec(place)
        dim = layer.cut(operand)
        if dim is None or (operand == "x" and dim == 0):
            continue
        wanted = shard_unit(spec, place in COLUMNWISE, dim)
        if length % wanted:
            raise ValueError(
                f"linear: expected {name} / ranks as a multiple of {wanted} for {title} in {spec}, "
                f"got {name} = {length * world} over {world} ranks, {length} each"
            )


# ---- casts ---------------------------------------------------------------------------------------


def own_amax(layer: ShardedLayer, x: Tensor, cut: int, place: int) -> Tensor | None:
    """The maxima of this shard that the others must know, flat; None: there are none."""
    spec, columnwise = layer.spec(place), place in COLUMNWISE
    kind = Spec.parse(spec).amax_of
    is_shared = kind == "tensor" or (kind == "row" and cut == (0 if columnwise else 1))
    if not is_shared or Spec.parse(spec).is_delayed:
        return None
    return ops.amax(x, spec, columnwise)


def whole_amaxes(
    layer: ShardedLayer, x: Tensor, cut: int | None, places: list[int]
) -> dict[int, Tensor]:
    """Of the casts that need more than this shard's: the amax of the whole, in one all-reduce."""
    if cut is None or isinstance(x, QuantizedTensor):  # codes keep the whole's
        return {}
    own = {p: own_amax(layer, x, cut, p) for p in places}
    shared = {place: amax for place, amax in own.items() if amax is not None}
    if shared:
        flat = torch.cat([amax.view(-1) for amax in shared.values()])
        pieces = reduce_amaxes(flat, layer.group).split([a.numel() for a in shared.values()])
        shared = {p: piece.view_as(shared[p]) for p, piece in zip(shared, pieces)}
    return shared


def record_amax(layer: ShardedLayer, place: int, amax: Tensor, cut: int | None) -> None:
    """Under delayed scaling: this step's own amax, of the whole."""
    assert layer.history is not None
    whole = amax if cut is None else reduce_amaxes(amax.view(1), layer.group).view(())
    running = layer.history[place, RUNNING]
    torch.maximum(running, whole, out=running)


def quantize_coded(
    layer: ShardedLayer, x: Tensor, cut: int | None, places: list[int], origin: list[int]
) -> dict[int, Operand]:
    """The directions of x that have codes, by place."""
    amaxes = whole_amaxes(layer, x, cut, places)
    options: dict[str, Any] = {"row": "", "col": "", "origin": origin}
    for place in places:
        side, spec = "col" if place in COLUMNWISE else "row", layer.spec(place)
        options[side] = spec
        options[f"stream_{side}"] = ops.stream(PLACES[place]) ^ layer.stream
        options[f"amax_{side}"] = amaxes.get(place)
        if Spec.parse(spec).is_delayed and layer.history is not None:
            options[f"amax_{side}"] = layer.history[place, IN_FORCE]
        if Spec.parse(spec).is_stochastic:
            options["rng"] = layer.rng
    out = ops.quantize(x, **options)
    return {p: Operand(*(out[4:7] if p in COLUMNWISE else out[:3])) for p in places}


def cast(
    layer: ShardedLayer,
    x: Tensor,
    row: int | None,
    col: int | None,
    held: tuple[Operand, Operand] | None = None,
) -> tuple[Operand | None, Operand | None]:
    """Both directions of a matrix, or of this rank's shard of it, from one read.

    held: what is known of those that have codes.
    """
    wanted = [place for place in (row, col) if place is not None]
    if not wanted:
        return None, None
    operand = PLACES[wanted[0]][0]
    cut, origin = layer.cut(operand), [0, 0]
    if cut is not None and (operand, cut) != ("x", 0):
        origin[cut] = dist.get_rank(layer.group) * x.shape[cut]  # of tokens nothing asks for it
    coded = [place for place in wanted if layer.spec(place) != "bf16"]
    if held is not None:
        found = {place: held[place in COLUMNWISE] for place in coded}
    else:
        found = quantize_coded(layer, x, cut, coded, origin) if coded else {}
    for place in wanted:
        if place not in coded:
            none = x.new_empty(0, dtype=torch.float32)
            found[place] = Operand(x.t() if place in COLUMNWISE else x, none, none)
        elif Spec.parse(layer.spec(place)).is_delayed and held is None:
            record_amax(layer, place, found[place].amax, cut)
    return (
        None if row is None else found[row],
        None if col is None else found[col],
    )
