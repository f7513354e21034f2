"""mf.grouped_mlp computes a mixture's experts as a function of matrices that the caller holds.

It shares its code with mf.MoE: both call Products.run (feed_forward.py), and over several ranks
ExpertParallel (ranks/parallel_experts.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._native import ops
from ..checks import require_bool, require_int
from ..distributed.handshake import raise_on_all
from ..nn.cache.operand_cache import compute_dtype
from ..nn.grouped_product import ProductCall, matrix_of
from ..nn.registry import COMPUTE_DTYPE
from ..recipe import Recipe
from ..tensor.quantized_tensor import QuantizedTensor
from .feed_forward import (
    ALPHA,
    Gate,
    Products,
    input_names,
    order_rows,
    require_no_tangents,
)
from .ranks.parallel_experts import ALL, ExpertParallel, group_of, require_sending

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Weights = Tensor | Sequence[Tensor]  # w13 (E, 2I, D), or w1 and w3 (E, I, D)

# Titles that all ranks of a group were seen to call with, by this rank's sizes and options.
SEEN: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, str | None]]
SEEN = weakref.WeakKeyDictionary()
# Of each group: under capacity="all" each number of tokens has a title. Ranks make the same calls,
# so they forget the same ones, and compare them again.
MOST_SEEN = 256
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of slots


def grouped_mlp(
    x: Tensor,
    w13: Weights,
    w2: Tensor,
    indices: Tensor,
    weights: Tensor,
    recipe: str | Recipe = "mxfp8",
    *,
    b13: Tensor | Sequence[Tensor | None] | None = None,
    b2: Tensor | None = None,
    limit: float | None = None,
    alpha: float = ALPHA,
    interleaved: bool = False,
    rng: Tensor | None = None,
    amax_history: Sequence[Tensor] | None = None,
    token_ids: Tensor | None = None,
    first_expert: int = 0,
    group: DeviceMesh | dist.ProcessGroup | None = None,
    dispatch: str = COMPUTE_DTYPE,
    capacity: int | str | None = None,
    dropped: Tensor | None = None,
) -> Tensor:
    """Computes each token's weighted sum of the SwiGLU experts it is sent to, differentiably.

    Any expert may be empty. Without a capacity no row is dropped. Without a group no pass waits for
    the device, and for backward it saves x, gate and up, the routing and the order: 2D / k + 4I +
    12 bytes a row in bfloat16.

    With `group`, x, indices and weights are this rank's tokens, and the matrices, biases and
    histories those of this rank's n = E / ranks experts, with numbers from rank · n on. The
    gradients of matrices are sums over all ranks' tokens. All ranks call it together, forward and
    backward. Random bits come from the first rank's rng.

    Args:
        x: (T, D), float32 or bfloat16.
        w13: (E, 2I, D), gate before up, or a list of w1 (gate) and w3 (up), each (E, I, D). Either
            may be the transposed view of a contiguous tensor, which is not copied, or a
            QuantizedTensor of the recipe's formats.
        w2: (E, D, I).
        indices: (T, k) integers, the experts of each token, each at most once. A slot whose number
            is negative, or E or more, adds nothing.
        weights: (T, k) floating-point numbers, of the slots. They multiply h in float32.
        recipe: the formats of the products. x and g take no spec with 2D blocks.
        b13: (E, 2I), or a list of two (E, I).
        b2: (E, D).
        limit: bound of gate and up, with up + 1, as in gpt-oss; None: silu(gate) * up.
        alpha: factor within the sigmoid where there is a limit.
        interleaved: whether gate and up alternate along w13's 2I.
        rng: int64 (seed, forward count[, module stream]), required by stochastic rounding. Backward
            reads the tensor too, so it must not be written to before.
        amax_history: float32 (6, E, 1 + length) for each of the two or three products, required by
            delayed scaling.
        token_ids: (T) distinct integers: the tokens' numbers among all ranks, by which each
            expert's rows are sorted and random bits are drawn; None: 0, 1, ….
        first_expert: the number of the first matrix among all ranks' experts.
        group: the ranks that have the other experts, a process group or one dimension of a
            DeviceMesh; None: all experts are here. token_ids and first_expert must be absent: the
            ranks' order numbers tokens and experts.
        dispatch, capacity: as those of mf.expert_parallel.
        dropped: int64 (1), on x's device, to which this rank's rows past the capacity are added.

    Returns:
        (T, D), in x's dtype or autocast's.

    Raises:
        TypeError, ValueError: an argument is not as expected, or the ranks' arguments differ. With
            a group a TypeError is a ValueError, which every rank raises in the first call.

    Source: docs/moe.md.

    Example:
        >>> x, w13, w2 = torch.ones(3, 32), torch.ones(4, 128, 32), torch.ones(4, 32, 64)
        >>> indices = torch.tensor([[0, 3], [1, 3], [2, 3]])  # two experts a token
        >>> weights = torch.full((3, 2), 0.5)
        >>> mf.grouped_mlp(x, w13, w2, indices, weights, "mxfp8").shape
        torch.Size([3, 32])
    """
    inputs = as_sequence(w13, 1)
    names = *input_names(len(inputs)), "w2"
    histories = as_sequence(amax_history, len(names))
    biases = as_sequence(b13, len(inputs))
    ranks = None if group is None else group_of("grouped_mlp: group", group)
    try:
        require_shapes(x, inputs, w2, indices, weights, histories)
        require_options(x, w2, biases, len(inputs), b2, token_ids)
        gate = Gate.of(limit, alpha, require_bool("interleaved", interleaved))
        require_int("first_expert", first_expert, 0)
        require_no_tangents("grouped_mlp", (x, *inputs, w2, weights, *biases, b2))
        parsed = Recipe(recipe)
        require_state(parsed, rng, histories)
        if ranks is None:
            require_absent(dispatch, capacity, dropped)
        else:
            require_sending("grouped_mlp", dispatch, capacity)
            require_alone(token_ids, first_expert)
            require_dropped(x, dropped)
    except (TypeError, ValueError) as error:
        if ranks is None:
            raise
        raise_on_all(error, ranks)
    operands = [
        w.operands(parsed, torch.is_grad_enabled()) if isinstance(w, QuantizedTensor) else None
        for w in (*inputs, w2)
    ]
    calls = [
        ProductCall(
            parsed.text,
            rng,
            ops.stream(name),
            history,
            codes,
            first_expert,
            reads_values=parsed.reads_values_of_w,
        )
        for name, history, codes in zip(names, histories, operands)
    ]
    matrices = [matrix_of(w, call) for w, call in zip((*inputs, w2), calls)]
    products = Products(gate, calls, matrices, biases, b2)
    if ranks is None:
        order = order_rows(indices, w2.shape[0], token_ids)
        return products.sum_slots(x.to(compute_dtype(x)), indices, weights, order)
    parallel = ExpertParallel(
        "grouped_mlp", ranks, w2.shape[0] * dist.get_world_size(ranks), dispatch, capacity
    )
    parallel.dropped = dropped
    return run_agreed(parallel, products, x, indices, weights)


def run_agreed(
    parallel: ExpertParallel, products: Products, x: Tensor, indices: Tensor, weights: Tensor
) -> Tensor:
    """Computes each token's weighted sum of experts, on whatever ranks they are.

    Ranks compare what they call at the first call with the same sizes, recipe and dtype, and with
    exact sizes at each call.
    """
    capacity, recipe = parallel.capacity, products.calls[-1].recipe
    sizes = parallel.experts, *products.matrices[-1].shape[1:], indices.shape[1], recipe
    kind = parallel.dispatch, capacity, compute_dtype(x), x.device
    key = *sizes, *kind, x.shape[0] if capacity == ALL else None
    seen = SEEN.setdefault(parallel.group, {})
    parallel.agreed_config = seen.get(key)
    y = parallel.forward(lambda *_: products, x, indices, weights)
    seen[key] = parallel.agreed_config
    if len(seen) > MOST_SEEN:
        del seen[next(iter(seen))]
    return y


# ---- checks --------------------------------------------------------------------------------------


def as_sequence(value: Any, count: int) -> tuple[Any, ...]:
    """Returns a list's items; of None as many as `count`, of another value itself."""
    if value is None:
        return (None,) * count
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def require_alone(token_ids: Tensor | None, first_expert: int) -> None:
    """Raises ValueError where arguments are given that a group's order of ranks excludes."""
    if token_ids is not None or first_expert != 0:
        raise ValueError(
            "grouped_mlp: expected no token_ids and first_expert beside a group, whose ranks' "
            f"order numbers tokens and experts, got {first_expert=} and token_ids "
            f"{'absent' if token_ids is None else tuple(token_ids.shape)}"
        )


def require_absent(dispatch: str, capacity: int | str | None, dropped: object) -> None:
    """Raises ValueError where arguments are given that only a group reads."""
    if (dispatch, capacity, dropped) != (COMPUTE_DTYPE, None, None):
        raise ValueError(
            "grouped_mlp: expected dispatch, capacity and dropped beside a group, got "
            f"{(dispatch, capacity, dropped)} without one"
        )


def require_state(recipe: Recipe, rng: object, histories: tuple[Tensor | None, ...]) -> None:
    """Checks the random state and the histories that a recipe reads, before any rank sends."""
    if recipe.is_delayed and any(history is None for history in histories):
        raise ValueError(f"grouped_mlp: recipe {recipe} needs amax_history, got None")
    if rng is None:
        if recipe.is_stochastic:
            raise ValueError(f"grouped_mlp: recipe {recipe} needs rng, got None")
    elif not (isinstance(rng, Tensor) and rng.dtype == torch.int64 and rng.shape in ((2,), (3,))):
        raise ValueError(f"grouped_mlp: expected rng as int64 (2) or (3), got {shown(rng)}")


def require_dropped(x: Tensor, dropped: Any) -> None:
    """Checks the tensor to which dropped rows are added."""
    is_count = isinstance(dropped, Tensor) and dropped.dtype == torch.int64
    if dropped is None or (is_count and dropped.shape == (1,) and dropped.device == x.device):
        return
    got = shown(dropped)
    raise ValueError(f"grouped_mlp: expected dropped as int64 (1) on {x.device}, got {got}")


def shown(value: object) -> str:
    """Returns a value for an error: of a tensor its dtype, shape and device."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)} on {value.device}"
    return repr(value)


def require_shapes(
    x: Tensor,
    inputs: tuple[Tensor, ...],
    w2: Tensor,
    indices: Tensor,
    weights: Tensor,
    histories: tuple[Tensor | None, ...],
) -> None:
    """Checks shapes, and dtypes of the routing, of grouped_mlp; the products check the rest."""
    tensors = {"x": x, "w2": w2, "indices": indices, "weights": weights}
    for name, value in (*tensors.items(), *(("w13", w) for w in inputs)):
        if not isinstance(value, Tensor):
            raise TypeError(f"grouped_mlp: expected {name} as a tensor, got {type(value).__name__}")
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
            f"{weights.dtype}; convert others by weights.float()"
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
    given = [("b2", b2), ("token_ids", token_ids), *(("b13", bias) for bias in biases)]
    for name, value in given:
        if not (value is None or isinstance(value, Tensor)):
            raise TypeError(
                f"grouped_mlp: expected {name} as a tensor or None, got {type(value).__name__}"
            )
        if name != "token_ids" and value is not None and not value.is_floating_point():
            raise ValueError(f"grouped_mlp: expected {name} in floating point, got {value.dtype}")
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
