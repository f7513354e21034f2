"""A linear layer whose weight is cut over the ranks of a group: tensor parallel, on local tensors.

    W (N, K)        cut along N, "column-wise"          cut along K, "row-wise"
    x (M, K)        whole, or its rows (tokens)         columns
    y = x · Wᵀ      columns                             a sum over the ranks
    g (M, N)        columns                             whole
    dx = g · W      a sum over the ranks                columns
    dW = gᵀ · x     rows                                columns

A cast gives a shard the bytes that the whole has there. It is told what it cannot see:

    origin    where the shard begins, for the random bits
    amax      of the tensor, and of rows that the ranks cut: one MAX over the ranks a cast
    blocks    and transforms lie within one shard; other sizes are refused before anything is sent

Where x comes cut by tokens (sequence parallel) its codes are gathered, not its values: rowwise ones
in forward, those that wgrad reads in backward. Until then a rank keeps its own tokens' alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ._native import ops
from .gather import amax_of
from .parts import unit
from .recipe import Product, Recipe
from .shard_cast import reduce_amaxes

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


class GivenInput(NamedTuple):
    """x as fprop reads it, gathered, and as wgrad will: this rank's part, and how to gather it."""

    rowwise: Operand
    columnwise: Operand | None
    wgrad: GatheredOnce


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
    given: GivenInput | None = None  # x, where another layer has quantized it

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


def has_flag(spec: str, flag: str) -> bool:
    return flag in spec.split("+")[1:]


@lru_cache(maxsize=1024)
def shard_unit(spec: str, columnwise: bool, dim: int) -> int:
    """What a shard's length along a matrix's own dimension must be a multiple of."""
    if spec == "bf16":
        return 1
    along = dim != columnwise  # the contraction dimension is the last one as read
    random = RANDOM_UNIT if along and has_flag(spec, "sr") else 1
    return max(unit(spec, int(along)), random)


def tokens_fit(recipe: Recipe, tokens: Tokens) -> bool:
    """Can x's codes be gathered? Not in bf16, nor where random bits need each row's place."""
    row, col = recipe.fprop.a, recipe.wgrad.b
    if row == "bf16" or has_flag(row, "sr") or has_flag(col, "sr"):
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
    kind = amax_of(spec)
    is_shared = kind == "tensor" or (kind == "row" and cut == (0 if columnwise else 1))
    if not is_shared or has_flag(spec, "delayed"):
        return None
    return ops.amax(x, spec, columnwise)


def whole_amaxes(
    layer: ShardedLayer, x: Tensor, cut: int | None, places: list[int]
) -> dict[int, Tensor]:
    """Of the casts that need more than this shard's: the amax of the whole, in one all-reduce."""
    own = {} if cut is None else {p: own_amax(layer, x, cut, p) for p in places}
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
        if has_flag(spec, "delayed") and layer.history is not None:
            options[f"amax_{side}"] = layer.history[place, IN_FORCE]
        if has_flag(spec, "sr"):
            options["rng"] = layer.rng
    out = ops.quantize(x, **options)
    return {p: Operand(*(out[4:7] if p in COLUMNWISE else out[:3])) for p in places}


def cast(
    layer: ShardedLayer, x: Tensor, row: int | None, col: int | None
) -> tuple[Operand | None, Operand | None]:
    """Both directions of a matrix, or of this rank's shard of it, from one read."""
    wanted = [place for place in (row, col) if place is not None]
    if not wanted:
        return None, None
    operand = PLACES[wanted[0]][0]
    cut, origin = layer.cut(operand), [0, 0]
    if cut is not None and (operand, cut) != ("x", 0):
        origin[cut] = dist.get_rank(layer.group) * x.shape[cut]  # of tokens nothing asks for it
    coded = [place for place in wanted if layer.spec(place) != "bf16"]
    found = quantize_coded(layer, x, cut, coded, origin) if coded else {}
    for place in wanted:
        if place not in coded:
            none = x.new_empty(0, dtype=torch.float32)
            found[place] = Operand(x.t() if place in COLUMNWISE else x, none, none)
        elif has_flag(layer.spec(place), "delayed"):
            record_amax(layer, place, found[place].amax, cut)
    return (
        None if row is None else found[row],
        None if col is None else found[col],
    )


def multiply(
    a: Operand, b: Operand, product: Product, k: int, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return ops.scaled_mm(*a, *b, str(product), k=k, bias=bias, out_dtype=dtype)


# ---- tokens --------------------------------------------------------------------------------------


def gather(tensors: list[Tensor], group: dist.ProcessGroup) -> list[Tensor]:
    """Each as (ranks, …), all in one collective of bytes."""
    raw = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]
    sent, world = torch.cat(raw), dist.get_world_size(group)
    received = sent.new_empty(world * len(sent))
    dist.all_gather_into_tensor(received, sent, group=group)
    pieces = received.view(world, -1).split([len(r) for r in raw], dim=1)
    return [
        piece.contiguous().view(-1).view(t.dtype).view(world, *t.shape)
        for piece, t in zip(pieces, tensors)
    ]


def joined(pieces: Tensor, dim: int, stretches: int) -> Tensor:
    """(ranks, …), tokens along `dim` of the rest, as the whole: stretches in turn, ranks within."""
    apart = pieces.unflatten(1 + dim, (stretches, pieces.shape[1 + dim] // stretches))
    return apart.movedim(0, 1 + dim).flatten(dim, dim + 2).contiguous()


def gather_tokens(layer: ShardedLayer, operand: Operand, place: int) -> Operand:
    """x as read by a product, from the codes of all ranks' tokens."""
    assert layer.tokens is not None
    dim = 1 if place in COLUMNWISE else 0
    is_cut = [t.dim() > dim and t.numel() > 0 for t in operand]
    found = iter(gather([t for t, cut in zip(operand, is_cut) if cut], layer.group))
    return Operand(
        *(
            joined(next(found), dim, layer.tokens.stretches) if cut else t
            for t, cut in zip(operand, is_cut)
        )
    )


class GatheredOnce:
    """x as wgrad reads it: the first layer to ask gathers, and it is kept until the last has."""

    def __init__(self, readers: int) -> None:
        self.readers, self.left = readers, 0
        self.operand: Operand | None = None

    def get(self, layer: ShardedLayer, own: Operand) -> Operand:
        if self.operand is None:
            self.operand, self.left = gather_tokens(layer, own, WGRAD_X), self.readers
        operand, self.left = self.operand, self.left - 1
        if self.left == 0:
            self.operand = None
        return operand


def scatter_sum(layer: ShardedLayer, dx: Tensor) -> Tensor:
    """The sum over the ranks of dx (tokens of all, K), this rank's tokens of it."""
    assert layer.tokens is not None
    world = dist.get_world_size(layer.group)
    stretches, length = layer.tokens
    by_rank = dx.view(stretches, world, length, -1).transpose(0, 1).contiguous()
    out = by_rank.new_empty(by_rank.shape[1:])
    dist.reduce_scatter_tensor(out.view(-1), by_rank.view(-1), group=layer.group)
    return out


# ---- the layer -----------------------------------------------------------------------------------


def as_matrix(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).contiguous()


def quantize_input(layer: ShardedLayer, x: Tensor, readers: int = 1) -> GivenInput:
    """Both directions of x (…, K) for so many layers."""
    wgrad_x = WGRAD_X if layer.needs_dw else None
    rowwise, columnwise = cast(layer, as_matrix(x), FPROP_X, wgrad_x)
    assert rowwise is not None
    if layer.tokens is not None:
        rowwise = gather_tokens(layer, rowwise, FPROP_X)
    return GivenInput(rowwise, columnwise, GatheredOnce(readers))


class ShardedLinear(torch.autograd.Function):
    """y of local x (…, K) and W, both of this rank; its outputs and gradients: the table above."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ShardedLayer
    ) -> Tensor:
        given = quantize_input(layer, x) if layer.given is None else layer.given
        values = weight.to(x.dtype).contiguous()
        dgrad_w = DGRAD_W if layer.needs_dx else None
        w_rowwise, w_columnwise = cast(layer, values, FPROP_W, dgrad_w)
        assert w_rowwise is not None
        adds_bias = layer.dim == 0 or dist.get_rank(layer.group) == 0  # once, in a sum over ranks
        y = multiply(
            given.rowwise,
            w_rowwise,
            layer.recipe.fprop,
            x.shape[-1],
            bias if adds_bias else None,
            x.dtype,
        )
        ctx.wgrad_x = given.wgrad
        ctx.layer, ctx.x_shape = layer, x.shape
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(*(given.columnwise or (None,) * 3), *(w_columnwise or (None,) * 3))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layer, recipe = ctx.layer, ctx.layer.recipe
        saved = ctx.saved_tensors  # once: checkpointing runs forward again here
        x_columnwise, w_columnwise = Operand(*saved[:3]), Operand(*saved[3:])
        g, dx, dw, db = grad.contiguous(), None, None, None
        with torch.autocast(g.device.type, enabled=False):
            g_rowwise, g_columnwise = cast(
                layer,
                g,
                DGRAD_G if layer.needs_dx else None,
                WGRAD_G if layer.needs_dw else None,
            )
            if g_rowwise is not None:
                dx = multiply(g_rowwise, w_columnwise, recipe.dgrad, g.shape[1], None, g.dtype)
                if layer.tokens is not None:
                    dx = scatter_sum(layer, dx)
                dx = dx.view(ctx.x_shape)
            if g_columnwise is not None:
                if layer.tokens is not None:
                    x_columnwise = ctx.wgrad_x.get(layer, x_columnwise)
                dw = multiply(
                    g_columnwise, x_columnwise, recipe.wgrad, g.shape[0], None, ctx.dtypes[0]
                )
            if ctx.dtypes[1] is not None and ctx.needs_input_grad[2]:
                db = g.sum(0, dtype=torch.float32).to(ctx.dtypes[1])
        return dx, dw, db, None


Share = Callable[[Callable[[int], GivenInput]], GivenInput]


def sharded_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: ShardedLayer, share: Share | None = None
) -> Tensor:
    """(M, N) of one rank: its columns, or its part of the sum. Autocast as `linear` has it.

    share: hands over what layers of the same input have quantized, or lets it be made for so many.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight = x.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        if share is not None:
            with torch.no_grad():
                given = share(lambda readers: quantize_input(layer, x, readers))
            layer = replace(layer, given=given)
        return ShardedLinear.apply(x, weight, bias, layer)
