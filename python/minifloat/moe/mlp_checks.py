"""Checks of the arguments of mf.grouped_mlp, before any product."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad


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


WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of slots


def require_shapes(
    x: Tensor,
    inputs: tuple[Tensor, ...],
    w2: Tensor,
    indices: Tensor,
    weights: Tensor,
    histories: tuple[Tensor | None, ...],
) -> None:
    """Checks shapes, and dtypes of the routing, of grouped_mlp; the products check the rest."""
    for name, tensor, dims in (("x", x, 2), ("w2", w2, 3), ("indices", indices, 2)):
        if tensor.dim() != dims:
            shape = tuple(tensor.shape)
            raise ValueError(f"grouped_mlp: expected {name} of {dims} dimensions, got {shape}")
    experts, dim, hidden = w2.shape
    parts = len(inputs)
    if parts not in (1, 2):
        raise ValueError(f"grouped_mlp: expected w13, or a list of w1 and w3, got {parts} tensors")
    wanted = (experts, hidden * (3 - parts), dim)
    if any(tuple(w.shape) != wanted for w in inputs):
        name = "w13" if parts == 1 else "w1 and w3"
        raise ValueError(
            f"grouped_mlp: expected {name} as {wanted}, by w2's {tuple(w2.shape)}, "
            f"got {[tuple(w.shape) for w in inputs]}"
        )
    if x.shape[1] != dim or indices.shape[0] != x.shape[0] or weights.shape != indices.shape:
        raise ValueError(
            f"grouped_mlp: expected x (T, {dim}), indices (T, k) and weights (T, k), got "
            f"{tuple(x.shape)}, {tuple(indices.shape)} and {tuple(weights.shape)}"
        )
    if indices.is_floating_point() or indices.dtype == torch.bool:
        raise ValueError(f"grouped_mlp: expected indices as integers, got {indices.dtype}")
    if weights.dtype not in WEIGHTS:
        raise ValueError(
            "grouped_mlp: expected weights as float32, bfloat16, float16 or float64, got "
            f"{weights.dtype}; weights.float() converts others"
        )
    if len(histories) != parts + 1:
        raise ValueError(
            f"grouped_mlp: expected amax_history for {parts + 1} products, got {len(histories)}"
        )


def require_options(
    x: Tensor,
    w2: Tensor,
    biases: tuple[Tensor | None, ...],
    inputs: int,
    b2: Tensor | None,
    token_ids: Tensor | None,
) -> None:
    """Checks the optional arguments of grouped_mlp whose shapes no product checks."""
    if len(biases) != inputs:
        raise ValueError(
            f"grouped_mlp: expected a bias in b13 for each of {inputs} matrices, got {len(biases)}"
        )
    if b2 is not None and tuple(b2.shape) != tuple(w2.shape[:2]):
        raise ValueError(
            f"grouped_mlp: expected b2 as {tuple(w2.shape[:2])}, by w2's {tuple(w2.shape)}, got "
            f"{tuple(b2.shape)}"
        )
    if token_ids is None:
        return
    is_integer = not token_ids.is_floating_point() and token_ids.dtype != torch.bool
    if not is_integer or tuple(token_ids.shape) != (x.shape[0],):
        raise ValueError(
            f"grouped_mlp: expected token_ids as ({x.shape[0]},) integers, got {token_ids.dtype} "
            f"{tuple(token_ids.shape)}"
        )
