"""Sorts the rows of a mixture by their experts, and computes the experts by the op grouped_mlp.

    slots of tokens         t0s0 t0s1 t1s0 t1s1 …      a pair of token and slot has the number
                                                       token * k + slot
    rows, by expert         [e0: t1s0 …][e1: …]…       within a group, pairs are in ascending order

    take_rows               row <- its token           gradient: slots of a token, summed
    add_slots               token <- its rows, summed  gradient: row <- its token

Sums are in fp32, slot by slot, and are rounded once. So no sum depends on the device's threads.
Nothing waits for the device: no size depends on how tokens are routed.

    h = silu(gate) · up · weight                                         limit is None
    h = a · sigmoid(alpha · a) · (u + 1) · weight                        limit: gpt-oss
        a = min(gate, limit)        u = clamp(up, -limit, limit)

SwiGLU is in fp32; h and the gradients are rounded once, to the dtype of gate and up. The routing
weight multiplies h, so that the rows of y = h · w2 are not needed in backward.

Shape suffixes: T tokens, k slots, M = T * k rows, E experts, D model width, I hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .._native import ops
from ..checks import require_number
from ..nn.grouped_product import ProductCall, Sharding
from ..tensor.quantized import Operand

ResultT = TypeVar("ResultT")

ALPHA = 1.702  # of gpt-oss


# ---- the order of rows ---------------------------------------------------------------------------


class Order(NamedTuple):
    """The permutation from pairs of token and slot to rows, which are sorted by expert.

    Args:
        pairs: int32 (M), the number of each row's pair.
        places: int32 (T, k), the row of each pair: the inverse of `pairs`.
        offs: int32 (E), the end of each expert's rows.
        row_ids: int32 (M), the numbers from which each row's random bits come: those of its pair,
            or of a pair with the token's id in place of the token's number.
    """

    pairs: Tensor
    places: Tensor
    offs: Tensor
    row_ids: Tensor

    @property
    def tokens(self) -> Tensor:
        """The token of each row, int32 (M)."""
        return self.pairs // self.slots

    @property
    def slots(self) -> int:
        """k, or 1 where there are no slots."""
        return max(self.places.shape[1], 1)


def order_rows(indices_Tk: Tensor, experts: int, token_ids_T: Tensor | None = None) -> Order:
    """Sorts pairs of token and slot by their expert.

    Args:
        indices_Tk: (T, k) integers, the expert of each slot. A slot whose number is negative, or
            `experts` or more, is a row past the last end, which no expert computes.
        experts: E.
        token_ids_T: (T) distinct integers, the tokens' numbers among all ranks, by which rows of
            an expert are sorted and random bits are drawn; None: 0, 1, ….

    Returns:
        The order, on the device of the indices.
    """
    slots = indices_Tk.shape[1]
    by_id = None if token_ids_T is None else token_ids_T.argsort()
    sorted_Tk = indices_Tk.detach() if by_id is None else indices_Tk.detach()[by_id]
    narrow = torch.int16 if experts < 2**15 - 1 else torch.int32
    chosen = as_expert(sorted_Tk.reshape(-1), experts).to(narrow)
    by_expert, order = torch.sort(chosen, stable=True)
    numbers = torch.arange(experts, dtype=narrow, device=chosen.device)
    offs = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
    if by_id is not None:
        order = by_id[order // slots] * slots + order % slots
    rows = torch.arange(order.shape[0], dtype=torch.int32, device=chosen.device)
    # Made of `order`, which is a batch under torch.func.vmap: nothing else may be written to there.
    places = torch.empty_like(order, dtype=torch.int32).scatter_(0, order, rows)
    pairs = order.to(torch.int32)
    row_ids = pairs
    if token_ids_T is not None:
        row_ids = (token_ids_T[order // slots] * slots + order % slots).to(torch.int32)
    return Order(pairs, places.view(indices_Tk.shape), offs, row_ids)


def as_expert(indices: Tensor, experts: int) -> Tensor:
    """Returns `experts` for each slot without an expert, and the other numbers as they are."""
    if indices.dtype.itemsize < 4:  # uint8 does not hold the number 256
        indices = indices.int()
    return indices.masked_fill((indices < 0) | (indices > experts), experts)


def take_rows(x: Tensor, order: Order) -> Tensor:
    """Copies the token of each row, (T, …) -> (M, …), of any dtype; differentiably."""
    return ops.take_rows(x, order.pairs, order.slots, places=order.places)


def add_slots(rows_MD: Tensor, order: Order, base_TD: Tensor | None = None) -> Tensor:
    """Sums the rows of each token in fp32, in the order of its slots, differentiably.

    Args:
        rows_MD: (M, D), float32 or bfloat16.
        order: of the rows.
        base_TD: float32 (T, D), which the rows are added to.

    Returns:
        (T, D), in the dtype of the rows.
    """
    return ops.add_slots(rows_MD, order.places, base_TD, pairs=order.pairs)


# ---- the products --------------------------------------------------------------------------------


class Gate(NamedTuple):
    """The form of SwiGLU, as ops take it.

    Args:
        limit: bound of gate and up; None: no bound, and up is not moved by one.
        alpha: factor within the sigmoid, where there is a limit.
        interleaved: whether gate and up alternate along the columns of a fused product; else gate
            comes first.
    """

    limit: float | None = None
    alpha: float = ALPHA
    interleaved: bool = False

    @classmethod
    def of(cls, limit: object, alpha: object, interleaved: bool = False) -> Gate:
        """Returns the gate of a caller's arguments.

        Raises:
            TypeError: `limit` or `alpha` is no number.
            ValueError: one is not finite or negative, or `limit` is 0.
        """
        bound = None if limit is None else require_number("limit", limit)
        if bound == 0:
            raise ValueError("limit: expected a number above 0, or None, got 0")
        return cls(bound, require_number("alpha", alpha), interleaved)


def input_names(count: int) -> tuple[str, ...]:
    """Returns the names of the matrices of gate and up, which are one or two."""
    return ("w13",) if count == 1 else ("w1", "w3")


@dataclass(frozen=True)
class Products:
    """The arguments of the experts' products that do not depend on the rows.

    Args:
        gate: the form of SwiGLU.
        calls: of w13, or of w1 and w3; then of w2.
        matrices: B (E, K, N) of each product.
        biases: (E, N) of w13, or of w1 and w3, or None each.
        output_bias: (E, D) of w2.
        tokens: x as the products of w13 read it, where x is quantized already.
        sharding: the ranks that cut the matrices along I; None: this rank has all of I.
    """

    gate: Gate
    calls: Sequence[ProductCall]
    matrices: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    output_bias: Tensor | None = None
    tokens: Operand | None = None
    sharding: Sharding | None = None

    def run(self, x: Tensor, weights: Tensor, order: Order, **options: Any) -> Tensor:
        """Computes the experts of rows without the bias of w2, differentiably.

        Args:
            x: (T, D), float32 or bfloat16.
            weights: (T, k), of the slots.
            order: of the rows.
            options: of the op. base: float32 (T, D), which the rows of each token are added to.
                sums: whether the rows of each token are summed. x_codes: codes, scale and amax of
                x, which then gives its shape, dtype and device alone. gradient: an empty
                torch.classes.minifloat.GradientCodes, which `Combine` fills in backward, before
                this op reads it; None: the gradient of rows has values.

        Returns:
            (T, D), or without sums the rows (M, D), in x's dtype.
        """
        calls, none = self.calls, [x.new_empty(0)] * 8
        tokens = self.tokens
        return ops.grouped_mlp(
            x,
            weights,
            list(order),
            list(self.matrices),
            list(self.biases),
            [call.recipe for call in calls],
            **self.gate._asdict(),
            rng=[call.rng for call in calls],
            first_expert=max(call.first_expert for call in calls),  # 0 of one without a recipe
            amax_history=[call.amax_history for call in calls],
            streams=[call.stream for call in calls],
            x_operands=None if tokens is None else [*tokens, *Operand.none(x.device)],
            weight_operands=[t for call in calls for t in call.operands or none],
            recompute=[call.recompute for call in calls],
            **({} if self.sharding is None else self.sharding._asdict()),
            **options,
        )

    def sum_slots(
        self, x_TD: Tensor, indices_Tk: Tensor, weights_Tk: Tensor, order: Order
    ) -> Tensor:
        """Computes each token's weighted sum of its experts, (T, D) in x's dtype."""
        base = weighted_biases(indices_Tk, weights_Tk, self.output_bias)
        return self.run(x_TD, weights_Tk, order, base=base)


def weighted_biases(
    indices_Tk: Tensor, weights_Tk: Tensor, bias_ED: Tensor | None
) -> Tensor | None:
    """Returns the sum over slots of weight times bias, float32 (T, D), as one product.

    A row's bias is not part of h · w2, because the routing weight multiplies it too.
    """
    if bias_ED is None:
        return None
    experts = bias_ED.shape[0]
    kind = "cpu" if bias_ED.is_meta else bias_ED.device.type  # torch knows no autocast of meta
    with torch.autocast(kind, enabled=False):
        # One more column, of slots without an expert.
        shape = indices_Tk.shape[0], experts + 1
        zeros = torch.zeros(shape, dtype=torch.float32, device=bias_ED.device)
        chosen_Tk = as_expert(indices_Tk.long(), experts)
        dense_TE = zeros.scatter_add(1, chosen_Tk, weights_Tk.float())
        return dense_TE[:, :experts] @ bias_ED.float()


def uncompiled(function: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Decorates a function that compiled code calls and does not trace.

    torch.compiler.disable imports the compiler, so it is called at the function's first call.
    """
    disabled = cache(lambda: torch.compiler.disable(function))

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> ResultT:
        return disabled()(*args, **kwargs)

    return call


def require_no_tangents(function: str, tensors: Iterable[Tensor | None]) -> None:
    """Raises NotImplementedError where forward-mode differentiation reaches experts.

    Compiled code calls ops that check this themselves.
    """
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    for tensor in tensors:
        if isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{function}: expected tensors without a tangent, got one of shape "
                f"{tuple(tensor.shape)}: forward-mode differentiation does not pass through a "
                "quantized product; use reverse mode, or leave the experts in high precision"
            )
