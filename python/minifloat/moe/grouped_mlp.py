"""mf.grouped_mlp: the products of a mixture's experts as a function, on one process or on ranks.

On ranks it is the forward of an mf.MoE that mf.expert_parallel has divided (ranks/),
of matrices that the caller gives.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._native import ops
from ..nn.grouped_product import GroupedProduct, ProductCall, matrix_of
from ..nn.names import PRODUCT
from ..recipe import Recipe
from ..tensor.quantized_tensor import QuantizedTensor
from .feed_forward import Matrices, Plan, compute_dtype, run_experts
from .mlp_checks import require_no_tangents, require_options, require_shapes
from .permute import order_rows
from .ranks.parallel_experts import ALL, ExpertParallel, group_of, require_sending
from .swiglu import ALPHA, Gate

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Weights = Tensor | Sequence[Tensor]  # w13 (E, 2I, D), or w1 and w3 (E, I, D)

# Titles that all ranks of a group were seen to call with, by this rank's sizes and options.
SEEN: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, str | None]]
SEEN = weakref.WeakKeyDictionary()


class GivenProduct(GroupedProduct):
    """A product of experts whose arguments a caller gives. It has no state."""

    def __init__(self, recipe: Recipe, given: ProductCall) -> None:
        nn.Module.__init__(self)
        self.recipe, self.given = recipe, given

    def prepare(self, *args: Any, **kwargs: Any) -> ProductCall:
        return self.given


class GivenExperts:
    """The experts of one call, as ExpertParallel reads those of an mf.MoE.

    Args:
        names: of the weights: w13 or w1 and w3, and w2.
        weights: this rank's.
        biases: as many, or None each.
        gate: the form of SwiGLU.
        recipe: of the products.
        calls: the arguments of each product.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        weights: tuple[Tensor, ...],
        biases: tuple[Tensor | None, ...],
        gate: Gate,
        recipe: Recipe,
        calls: Sequence[ProductCall],
    ) -> None:
        self.weight_names, self.input_names = names, names[:-1]
        self.bias_names = tuple(name.replace("w", "b") for name in self.input_names)
        self.gate, self.recipe = gate, recipe
        for name, weight, bias in zip(names, weights, biases):
            setattr(self, name, weight)
            setattr(self, name.replace("w", "b"), bias)
        self.experts, self.dim, self.hidden = weights[-1].shape  # experts: of this rank
        self._modules = {n + PRODUCT: GivenProduct(recipe, c) for n, c in zip(names, calls)}


@dataclass(frozen=True)
class Ranks:
    """The arguments of mf.grouped_mlp about ranks."""

    group: Any
    dispatch: str
    capacity: int | str | None
    dropped: Tensor | None

    def require(self, x: Tensor, token_ids: Tensor | None, first_expert: int) -> None:
        """Checks these arguments, and those that they exclude."""
        given = (self.dispatch, self.capacity, self.dropped)
        if self.group is None:
            if given != ("bf16", None, None):
                raise ValueError(
                    "grouped_mlp: expected dispatch, capacity and dropped beside a group, got "
                    f"{given} without one"
                )
            return
        self.ranks()
        require_sending("grouped_mlp", self.dispatch, self.capacity)
        if token_ids is not None or first_expert != 0:
            raise ValueError(
                "grouped_mlp: expected no token_ids and first_expert beside a group, whose ranks' "
                f"order numbers tokens and experts, got {first_expert=} and token_ids "
                f"{'absent' if token_ids is None else tuple(token_ids.shape)}"
            )
        self.require_counter(x)

    def require_counter(self, x: Tensor) -> None:
        """Checks the counter of dropped rows."""
        count = self.dropped
        if count is None:
            return
        is_right = isinstance(count, Tensor) and tuple(count.shape) == (1,)
        if not is_right or count.dtype != torch.int64 or count.device != x.device:
            got = (
                f"{count.dtype} {tuple(count.shape)} on {count.device}"
                if isinstance(count, Tensor)
                else repr(count)
            )
            raise ValueError(f"grouped_mlp: expected dropped as int64 (1) on {x.device}, got {got}")

    def ranks(self) -> dist.ProcessGroup:
        """Returns the process group."""
        return group_of("grouped_mlp: group", self.group)

    def compute(self, experts: GivenExperts, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """Computes each token's weighted sum of experts, on whatever ranks they are.

        Ranks compare what they call at the first call with the same sizes, recipe and dtype, and
        with exact sizes at each call.
        """
        group = self.ranks()
        count = experts.experts * dist.get_world_size(group)
        link = ExpertParallel("grouped_mlp", group, count, self.dispatch, self.capacity, None)
        link.dropped = self.dropped
        sizes = count, experts.dim, experts.hidden, indices.shape[1], experts.recipe.text
        kind = self.dispatch, self.capacity, compute_dtype(x), x.device
        key = *sizes, *kind, x.shape[0] if self.capacity == ALL else None
        seen = SEEN.setdefault(group, {})
        link.agreement.title = seen.get(key)
        y = link.forward(link, experts, x, indices, weights)
        seen[key] = link.agreement.title
        return y


def require_state(recipe: Recipe, rng: Tensor | None, histories: tuple[Tensor | None, ...]) -> None:
    """Requires the tensors of a recipe before any rank sends."""
    for name, is_needed, given in (
        ("rng", recipe.is_stochastic, (rng,)),
        ("amax_history", recipe.is_delayed, histories),
    ):
        if is_needed and any(value is None for value in given):
            raise ValueError(f"grouped_mlp: recipe {recipe} needs {name}, got None")


def as_sequence(value: Any, count: int) -> tuple[Any, ...]:
    """Returns a list's items; of None as many as `count`, of another value itself."""
    if value is None:
        return (None,) * count
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


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
    dispatch: str = "bf16",
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
        rng: int64 (seed, forward count), required by stochastic rounding. Backward reads the tensor
            too, so it must not be written to before.
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
        TypeError, ValueError: an argument is not as expected, or the ranks' arguments differ.

    Source: docs/moe.md.
    """
    inputs = as_sequence(w13, 1)
    names = ("w13", "w2") if len(inputs) == 1 else ("w1", "w3", "w2")
    histories = as_sequence(amax_history, len(names))
    biases = as_sequence(b13, len(inputs))
    require_shapes(x, inputs, w2, indices, weights, histories)
    require_options(x, w2, biases, len(inputs), b2, token_ids)
    require_no_tangents("grouped_mlp", (x, *inputs, w2, weights, *biases, b2))
    parsed = Recipe(recipe)
    ranks = Ranks(group, dispatch, capacity, dropped)
    ranks.require(x, token_ids, first_expert)
    operands = [
        w.operands(parsed, torch.is_grad_enabled()) if isinstance(w, QuantizedTensor) else None
        for w in (*inputs, w2)
    ]
    calls = [
        ProductCall(parsed.text, rng, ops.stream(name), history, codes, first_expert)
        for name, history, codes in zip(names, histories, operands)
    ]
    gate = Gate(limit, alpha, interleaved)
    if group is not None:
        require_state(parsed, rng, histories)
        experts = GivenExperts(names, (*inputs, w2), (*biases, b2), gate, parsed, calls)
        return ranks.compute(experts, x, indices, weights)
    plan = Plan(gate, tuple(calls[:-1]), calls[-1])
    matrices = Matrices(
        tuple(matrix_of(w) for w in inputs),
        biases,
        matrix_of(w2),
    )
    order = order_rows(indices, w2.shape[0], token_ids)
    return run_experts(plan, x.to(compute_dtype(x)), indices, weights, order, matrices, b2)
