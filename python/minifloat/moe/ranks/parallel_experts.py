"""Expert parallelism: each rank of a group has E / ranks experts, and rows travel to them.

    counts of rows, tokens, random states      one small all_to_all
    rows of tokens -> ranks of their experts   one all_to_all    backward: gradients of tokens <-
    results -> ranks of their tokens           one all_to_all    backward: gradients of results <-

The operands of an expert's products equal, byte for byte, those of one process with the tokens of
all ranks in the order of the ranks: rows are sorted by the numbers of their pairs among all ranks,
random bits come from these numbers, and from the random state of the group's first rank.

Shape suffixes: T tokens, k slots, M = T * k rows, R ranks, E experts of all ranks, n of this one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...checks import require_int
from ...nn.grouped_product import ProductCall, call_of, local_of, matrix_of, product_of
from ...nn.state.recipe_state import ExpertRange
from ...recipe import Recipe
from ...tensor.operands import Operand
from ..feed_forward import Matrices, Plan, compute, compute_dtype, weighted_biases
from ..permute import Order, add_slots, order_rows
from ..router import is_recomputed
from ..token_cast import TokenCast
from .agreement import Agreement, to_host
from .code_experts import CombineCodes, DispatchCodes, Way
from .dispatch import (
    CapacityRoute,
    CombineRows,
    Dispatcher,
    DispatcherRoute,
    DispatchRows,
    ExactRoute,
    Route,
    order_received,
)
from .row_codes import CodeSender, G, X, why_values

ALL = "all"  # the capacity that drops no row
DISPATCHES = ("bf16", "codes")


class Exchanged(NamedTuple):
    """What the ranks of a group send each other before rows."""

    sent: Tensor  # int64 (R, n), rows from this rank to each rank's experts
    received: Tensor  # int64 (R, n), rows from each rank to this rank's experts
    first_token: Tensor  # int64 (), the tokens of the ranks before this one
    rng: Tensor  # int64 (calls, 2), the first rank's random states
    titles: Tensor  # int64 (R), the numbers of the ranks' layers


class ExpertParallel:
    """The forward of an mf.MoE's experts over a group of ranks.

    Args:
        name: of the layer, for messages.
        group: the ranks, in the order of their experts.
        experts: E.
        dispatch, capacity, dispatcher: as those of mf.expert_parallel.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        experts: int,
        dispatch: str,
        capacity: int | str | None,
        dispatcher: Dispatcher | None,
    ) -> None:
        self.name, self.group, self.dispatch = name, group, dispatch
        self.capacity, self.dispatcher = capacity, dispatcher
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.experts, self.local = experts, experts // self.ranks
        self.agreement = Agreement(group)
        # int64 (1), rows that this rank dropped since the last mf.step; None: it cannot drop any.
        self.dropped: Tensor | None = None
        self.step_dropped = 0  # rows that this rank dropped in the step before
        self.forward = uncompiled()

    def __deepcopy__(self, memo: object) -> ExpertParallel:
        made = copy.copy(self)
        made.dropped = None
        made.agreement = copy.copy(self.agreement)
        return made

    @property
    def first_expert(self) -> int:
        """The number of this rank's first expert."""
        return self.rank * self.local

    @property
    def expert_range(self) -> ExpertRange:
        """This rank's experts, for the state of products."""
        return ExpertRange(self.first_expert, self.local, self.experts, self.group)

    def compute(
        self,
        module: Any,
        x_TD: Tensor,
        indices_Tk: Tensor,
        weights_Tk: Tensor,
        cast: TokenCast | None = None,
    ) -> Tensor:
        """Computes each token's weighted sum of the experts `module`, on whatever ranks they are.

        `forward` is this function, called as forward(self, …): compiled code does not trace it.
        """
        x = x_TD.to(compute_dtype(x_TD))
        order = order_rows(indices_Tk, self.experts)
        # Rows that arrive require a gradient where the weights of their slots do.
        needs = x.requires_grad or weights_Tk.requires_grad
        calls = [call_of(module, name, x, needs_columnwise=needs) for name in module.input_names]
        calls.append(call_of(module, "w2", x, needs_columnwise=True))
        title = self._title(module, x, indices_Tk)
        exchanged = self._exchange(order, calls, self.agreement.begin(title, x.device))
        calls = [  # with the group's random state
            replace(call, rng=None if call.rng is None else rng, first_expert=self.first_expert)
            for call, rng in zip(calls, exchanged.rng)
        ]
        plan = Plan(module.gate, tuple(calls[:-1]), calls[-1])
        biases = [getattr(module, name) for name in module.bias_names]
        matrices = Matrices(
            tuple(matrix_of(getattr(module, name)) for name in module.input_names),
            tuple(bias if bias is None else local_of(bias) for bias in biases),
            matrix_of(module.w2),
        )
        rows = torch.arange(order.pairs.shape[0], dtype=torch.int32, device=x.device)
        expert_M = torch.searchsorted(order.offs, rows, right=True)  # E for a row of no expert
        slots = indices_Tk.shape[1]
        route = self._route(exchanged, expert_M, slots, title)
        ids = order.pairs + (exchanged.first_token * slots).int()
        local_M = torch.where(expert_M < self.experts, expert_M % self.local + 1, 0).int()
        way = Way(route, *self._senders(plan), order, ids)
        tokens = cast.rowwise(x_TD) if cast is not None and way.x is not None else None
        returned = run_on_ranks(way, plan, x, weights_Tk, local_M, matrices, self.local, tokens)
        base = None
        if module.b2 is not None:
            # The import takes 50 ms.
            from torch.distributed._functional_collectives import all_gather_tensor_autograd

            if isinstance(route, CapacityRoute):  # a row that was dropped has no bias either
                is_sent = route.is_sent.take(order.places.long())
                weights_Tk = weights_Tk.masked_fill(~is_sent, 0)
            bias = local_of(module.b2).float().contiguous()
            bias = all_gather_tensor_autograd(bias, 0, self.group)
            base = weighted_biases(indices_Tk, weights_Tk, bias)
        return add_slots(returned, order, base)

    def _senders(self, plan: Plan) -> tuple[CodeSender | None, CodeSender | None]:
        """Returns the casts of x and of the gradient; None of what travels as values."""
        found = []
        for name, calls in ((X, plan.inputs), (G, (plan.output,))):
            is_code = self.dispatch == "codes" and why_values(name, calls) is None
            sender = CodeSender(name, calls[0], self.group, self.first_expert, self.local)
            found.append(sender if is_code else None)
        return found[0], found[1]

    # ---- what ranks agree on ---------------------------------------------------------------------

    def _title(self, module: Any, x: Tensor, indices_Tk: Tensor) -> str:
        biases = [b for b in (*module.bias_names, "b2") if getattr(module, b) is not None]
        text = (
            f"{self.name}: {self.experts} experts of {module.dim} x {module.hidden}, k = "
            f"{indices_Tk.shape[1]}, recipe {recipe_of(module).text}, {x.dtype}, "
            f"{', '.join((*module.weight_names, *biases))}, {module.gate}, "
            f"dispatch={self.dispatch!r}, capacity={self.capacity!r}"
        )
        return f"{text}, {x.shape[0]} tokens" if self.capacity == ALL else text

    def _exchange(self, order: Order, calls: list[ProductCall], title: Tensor) -> Exchanged:
        """Tells every rank this rank's counts of rows and tokens, its layer and random states."""
        offs = order.offs.long()
        sent = offs.diff(prepend=offs.new_zeros(1)).view(self.ranks, self.local)
        tokens = torch.full((1,), order.places.shape[0], dtype=torch.int64, device=offs.device)
        states = [offs.new_zeros(2) if call.rng is None else call.rng[:2] for call in calls]
        own = torch.cat([tokens, title, *states])
        message = torch.cat([sent, own.expand(self.ranks, -1)], dim=1)
        answer = torch.empty_like(message)
        dist.all_to_all_single(answer, message, group=self.group)
        received, others = answer[:, : self.local], answer[:, self.local :]
        first_token, rng = others[: self.rank, 0].sum(), others[0, 2:].reshape(-1, 2)
        return Exchanged(sent, received, first_token, rng, others[:, 1])

    def _route(self, exchanged: Exchanged, expert_M: Tensor, slots: int, title: str) -> Route:
        """Returns the way of this forward's rows.

        Raises:
            ValueError: the ranks' layers differ.
        """
        rows, ranks = expert_M.shape[0], self.ranks
        if self.dispatcher is not None or self.capacity is not None:
            self.agreement.compare(title, exchanged.titles, is_on_all=False)
        if self.dispatcher is not None:
            return DispatcherRoute(self.dispatcher, expert_M.int())
        counts = exchanged.sent.sum(1)
        if self.capacity is None:
            numbers = to_host(torch.cat([counts, exchanged.received.sum(1), exchanged.titles]))
            self.agreement.compare(title, numbers[2 * ranks :], is_on_all=True)
            return ExactRoute(self.group, numbers[:ranks], numbers[ranks : 2 * ranks], rows)
        most = rows // max(slots, 1) * min(slots, self.local)  # a token has an expert once
        capacity = most if self.capacity == ALL else int(self.capacity)
        route = CapacityRoute(self.group, counts, capacity, rows, capacity < most)
        if self.capacity != ALL:
            self._count(route.dropped)
        return route

    # ---- capacity --------------------------------------------------------------------------------

    def _count(self, dropped: Tensor) -> None:
        """Adds dropped rows to the counter, once a forward."""
        if self.dropped is None or self.dropped.device != dropped.device:
            self.dropped = torch.zeros(1, dtype=torch.int64, device=dropped.device)
        if not is_recomputed():
            self.dropped.add_(dropped)

    def describe(self, module: Any) -> str:
        """Returns what this rank has, and how the operands of the experts `module` travel."""
        if self.dispatch == "bf16":
            return f"{self}, sends values"
        recipe, texts = recipe_of(module), []
        for name, readers in ((X, len(module.input_names)), (G, 1)):
            why = why_values(name, [ProductCall(recipe.text)] * readers)
            spec = recipe.fprop.a if name == X else recipe.dgrad.a
            texts.append(f"{name[0]} as {spec}" if why is None else f"{name[0]} as values ({why})")
        return f"{self}, sends {' and '.join(texts)}"

    def __repr__(self) -> str:
        own = "" if self.dispatcher is None else ", own dispatcher"
        capacity = "" if self.capacity is None else f", capacity={self.capacity!r}"
        return (
            f"experts {self.first_expert} to {self.first_expert + self.local - 1} on rank "
            f"{self.rank} of {self.ranks}{capacity}{own}"
        )


def recipe_of(module: Any) -> Recipe:
    """Returns the recipe of all products of experts."""
    product = product_of(module, "w2")
    return Recipe("bf16") if product is None else product.recipe


@lru_cache(maxsize=1)
def uncompiled() -> Callable[..., Tensor]:
    """Returns ExpertParallel.compute as a function that compiled code calls and does not trace.

    torch.compiler.disable imports the compiler, so it is called when a layer is divided first.
    """
    return torch.compiler.disable(ExpertParallel.compute)


def group_of(title: str, mesh: Any) -> dist.ProcessGroup:
    """Returns the ranks of a mesh dimension or of a process group.   title: for errors."""
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if not hasattr(mesh, "get_group"):
        raise TypeError(
            f"{title}: expected a DeviceMesh of one dimension, or a process group that this rank "
            f"is in, got {mesh!r} ({type(mesh).__name__})"
        )
    if mesh.ndim != 1:
        raise ValueError(f"{title}: expected one dimension, got {mesh.ndim} ({mesh})")
    return mesh.get_group()


def require_sending(function: str, dispatch: object, capacity: object) -> None:
    """Checks how rows are to be sent.   function: for errors."""
    if dispatch not in DISPATCHES:
        raise ValueError(f"{function}: dispatch: expected one of {DISPATCHES}, got {dispatch!r}")
    if capacity is None or capacity == ALL:
        return
    if isinstance(capacity, str):
        raise ValueError(
            f"{function}: capacity: expected a number of rows, {ALL!r} or None, got {capacity!r}"
        )
    require_int(f"{function}: capacity", capacity, 1, unit="row")


def run_on_ranks(
    way: Way,
    plan: Plan,
    x: Tensor,
    weights_Tk: Tensor,
    local_M: Tensor,
    matrices: Matrices,
    experts: int,
    tokens: Operand | None,
) -> Tensor:
    """Sends rows to their experts, computes them there, and returns the results, (M, D).

    Args:
        local_M: int32, the rows' experts, as the last field of dispatch.ROW_METADATA.
        tokens: x as codes, where x is quantized already.
    """
    codes: list[Tensor] = []
    if way.x is not None:
        values, weights_A, ids, local_A, *codes = DispatchCodes.apply(
            way, x, weights_Tk, local_M, tokens
        )
    else:
        values, weights_A, ids, local_A = DispatchRows.apply(
            way.route, x, weights_Tk, way.ids, local_M, *way.sent
        )
    order = order_received(ids, local_A, experts)
    gradient = None if way.g is None else torch.classes.minifloat.GradientCodes()
    rows = compute(
        plan, values, weights_A, order, matrices, sums=False, codes=codes, gradient=gradient
    )
    if gradient is None:
        return CombineRows.apply(way.route, rows, order.pairs, order.places)
    return CombineCodes.apply(way, gradient, rows, order.places)
