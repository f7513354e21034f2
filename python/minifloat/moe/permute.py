"""The order of a mixture's rows, and the two copies between tokens and rows.

    slots of tokens         t0s0 t0s1 t1s0 t1s1 …      the number of a pair is token * k + slot
    rows, by expert         [e0: t1s0 …][e1: …]…       within a group, pairs are in ascending order

    take_rows               row <- its token           gradient: slots of a token, summed
    add_slots               token <- its rows, summed  gradient: row <- its token

Sums are in fp32, slot by slot, and are rounded once. So no sum depends on the device's threads.
Nothing waits for the device: no size depends on how tokens are routed.

Shape suffixes: T tokens, k slots, M = T * k rows, E experts, D width of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._native import ops


class Order(NamedTuple):
    """Where the rows of the experts come from.

    Args:
        pairs: int32 (M), the number of the pair of each row.
        places: int32 (T, k), the row of each pair.
        offs: int32 (E), the end of each expert's rows.
        row_ids: int32 (M), which random bits each row draws: its pair, or that of the token's id.
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


NO_ORDER = (None,) * 4  # gradients of an order's tensors


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
    places = torch.empty_like(rows).scatter_(0, order, rows).view(indices_Tk.shape)
    pairs = order.to(torch.int32)
    row_ids = pairs
    if token_ids_T is not None:
        row_ids = (token_ids_T[order // slots] * slots + order % slots).to(torch.int32)
    return Order(pairs, places, offs, row_ids)


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
