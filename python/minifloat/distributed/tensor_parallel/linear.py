"""A linear layer whose weight is cut over the ranks of a group: tensor parallel, on local tensors.

    W (N, K)        cut along N, "column-wise"          cut along K, "row-wise"
    x (M, K)        whole, or its rows (tokens)         columns
    y = x · Wᵀ      columns                             a sum over the ranks
    g (M, N)        columns                             whole
    dx = g · W      a sum over the ranks                columns
    dW = gᵀ · x     rows                                columns

Each cast gives a shard the bytes that the whole has there (operands.py).

Where x comes cut by tokens (sequence parallel) its codes are gathered, not its values: rowwise ones
in forward, those that wgrad reads in backward. Until then a rank keeps its own tokens' alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..._native import ops
from ...recipe import Product
from .operands import (
    COLUMNWISE,
    DGRAD_G,
    DGRAD_W,
    FPROP_W,
    FPROP_X,
    WGRAD_G,
    WGRAD_X,
    Operand,
    ShardedLayer,
    cast,
)

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


class GivenInput(NamedTuple):
    """x as fprop reads it, gathered, and as wgrad will: this rank's part, and how to gather it."""

    rowwise: Operand
    columnwise: Operand | None
    wgrad: GatheredOnce


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


def multiply(
    a: Operand, b: Operand, product: Product, k: int, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return ops.scaled_mm(*a, *b, str(product), k=k, bias=bias, out_dtype=dtype)


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


def weight_operands(
    layer: ShardedLayer, weight: Tensor, dtype: torch.dtype, *, rowwise: bool, columnwise: bool
) -> list[Tensor]:
    """W's codes, scale and amax of each direction, empty where not wanted or not codes."""
    row = FPROP_W if rowwise and layer.spec(FPROP_W) != "bf16" else None
    col = DGRAD_W if columnwise and layer.spec(DGRAD_W) != "bf16" else None
    found = cast(layer, weight.to(dtype).contiguous(), row, col)
    none = weight.new_empty(0, dtype=torch.float32)
    return [t for operand in found for t in operand or (none,) * 3]


class ShardedLinear(torch.autograd.Function):
    """y of local x (…, K) and W, both of this rank; its outputs and gradients: the table above."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ShardedLayer
    ) -> Tensor:
        given = quantize_input(layer, x) if layer.given is None else layer.given
        values = weight.to(x.dtype).contiguous()
        dgrad_w = DGRAD_W if layer.needs_dx else None
        w_rowwise, w_columnwise = cast(layer, values, FPROP_W, dgrad_w, layer.weight)
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
Reuse = Callable[[Callable[..., list[Tensor]]], list[Tensor] | None]


def sharded_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: ShardedLayer,
    share: Share | None = None,
    reuse: Reuse | None = None,
) -> Tensor:
    """(M, N) of one rank: its columns, or its part of the sum. Autocast as `linear` has it.

    share: hands over what layers of the same input have quantized, or lets it be made for so many.
    reuse: hands over W's codes where W is unchanged, made when first needed; None: not so.
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
        if reuse is not None:
            with torch.no_grad():
                codes = reuse(partial(weight_operands, layer, weight, x.dtype))
            if codes is not None:
                layer = replace(layer, weight=(Operand(*codes[:3]), Operand(*codes[3:])))
        return ShardedLinear.apply(x, weight, bias, layer)
