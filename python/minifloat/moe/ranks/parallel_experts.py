"""Expert parallelism: each rank of a group has E / ranks experts, and rows travel to them.

    counts of rows, tokens, random states      one small all_to_all
    rows of tokens -> ranks of their experts   one all_to_all    backward: gradients of tokens <-
    results -> ranks of their tokens           one all_to_all    backward: gradients of results <-

The operands of an expert's products equal, byte for byte, those of one process with the tokens of
all ranks in the order of the ranks: rows are sorted by the numbers of their pairs among all ranks,
random bits come from these numbers, and from the random state of the group's first rank.

Ranks compare titles, which describe a layer's configuration, or the titles' 64-bit numbers:

    first forward     ranks wait for each other, and compare their titles
    later             each rank sends its title's number with its counts of rows
        exact sizes   every rank reads the numbers of all ranks with the counts; where they differ,
                      ranks compare their titles as in the first forward, which raises on each
        else          a rank reads them where its own title has changed: nothing waits otherwise

Shape suffixes: T tokens, k slots, M = T * k rows, R ranks, E experts of all ranks, n of this one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._native import ops
from ...checks import require_int, require_one_of
from ...distributed.handshake import require_same
from ...nn.grouped_product import ProductCall, product_of
from ...nn.state.recipe_state import ExpertRange
from ...recipe import Recipe
from ...tensor.quantized import Operand
from ..feed_forward import (
    Order,
    Products,
    compute_dtype,
    input_names,
    order_rows,
    uncompiled,
    weighted_biases,
)
from ..router import is_recomputed
from .dispatch import CapacityRoute, Dispatcher, DispatcherRoute, ExactRoute, Route
from .exchange import CodeSender, G, Way, X, run_on_ranks, spec_of, why_values

Prepare = Callable[[Tensor, bool], Products]  # begins a forward, as Experts.prepare

ALL = "all"  # the capacity that drops no row
DISPATCHES = ("bf16", "codes")
DIVIDE = "expert_parallel: expected all {} ranks to divide {}"
EQUAL = "expert_parallel: expected all ranks to have the same layer"


def to_host(numbers: Tensor) -> list[int]:
    """Copies numbers to the host, and waits for the device.

    No other function of a forward does.
    """
    return numbers.tolist()


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
        dispatcher: Dispatcher | None = None,
    ) -> None:
        self.name, self.group, self.dispatch = name, group, dispatch
        self.capacity, self.dispatcher = capacity, dispatcher
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.experts, self.local = experts, experts // self.ranks
        self.first_expert = self.rank * self.local
        self.expert_range = ExpertRange(self.first_expert, self.local, experts, group)
        # The title that all ranks were seen to have; None: before the first forward.
        self.title: str | None = None
        # int64 (1), rows that this rank dropped since the last mf.step; None: it cannot drop any.
        self.dropped: Tensor | None = None
        self.step_dropped = 0  # rows that this rank dropped in the step before

    def __deepcopy__(self, memo: object) -> ExpertParallel:
        made = copy.copy(self)
        made.dropped = None
        return made

    @uncompiled
    def forward(
        self,
        prepare: Prepare,
        x_TD: Tensor,
        indices_Tk: Tensor,
        weights_Tk: Tensor,
        cast: Callable[[Tensor], Operand | None] | None = None,
    ) -> Tensor:
        """Computes each token's weighted sum of experts, on whatever ranks they are."""
        x = x_TD.to(compute_dtype(x_TD))
        order = order_rows(indices_Tk, self.experts)
        # Rows that arrive require a gradient where the weights of their slots do.
        products = prepare(x, x.requires_grad or weights_Tk.requires_grad)
        rows = torch.arange(order.pairs.shape[0], dtype=torch.int32, device=x.device)
        expert_M = torch.searchsorted(order.offs, rows, right=True)  # E for a row of no expert
        title, slots = self._title(products, x, indices_Tk), indices_Tk.shape[1]
        route, first_token, rng = self._exchange(order, products.calls, title, expert_M, slots)
        calls = [  # with the group's random state
            replace(call, rng=None if call.rng is None else state, first_expert=self.first_expert)
            for call, state in zip(products.calls, rng)
        ]
        products = replace(products, calls=calls)
        ids = order.pairs + (first_token * slots).int()
        local_M = torch.where(expert_M < self.experts, expert_M % self.local + 1, 0).int()
        senders = self._sender(X, calls[:-1]), self._sender(G, calls[-1:])
        way = Way(route, *senders, order, ids, local_M)
        tokens = cast(x_TD) if cast is not None and way.x is not None else None

        def biases_of_tokens() -> Tensor | None:
            bias, weights = products.output_bias, weights_Tk
            if bias is None:
                return None
            # The import takes 50 ms.
            from torch.distributed._functional_collectives import all_gather_tensor_autograd

            if isinstance(route, CapacityRoute):  # a row that was dropped has no bias either
                weights = weights.masked_fill(~route.is_sent.take(order.places.long()), 0)
            bias = all_gather_tensor_autograd(bias.float().contiguous(), 0, self.group)
            return weighted_biases(indices_Tk, weights, bias)

        return run_on_ranks(way, products, x, weights_Tk, tokens, biases_of_tokens)

    def _sender(self, name: str, calls: Sequence[ProductCall]) -> CodeSender | None:
        """Returns the cast of X or G, which `calls` read; None where it travels as values."""
        if self.dispatch != "codes" or why_values(name, calls) is not None:
            return None
        return CodeSender(name, calls[0], self.expert_range)

    # ---- what ranks agree on ---------------------------------------------------------------------

    def _title(self, products: Products, x: Tensor, indices_Tk: Tensor) -> str:
        _, hidden, dim = products.matrices[-1].shape
        names = *input_names(len(products.biases)), "w2"
        biases = zip(names, (*products.biases, products.output_bias))
        given = [name.replace("w", "b") for name, bias in biases if bias is not None]
        text = (
            f"{self.name}: {self.experts} experts of {dim} x {hidden}, k = "
            f"{indices_Tk.shape[1]}, recipe {products.calls[-1].recipe}, {x.dtype}, "
            f"{', '.join((*names, *given))}, {products.gate}, "
            f"dispatch={self.dispatch!r}, capacity={self.capacity!r}"
        )
        return f"{text}, {x.shape[0]} tokens" if self.capacity == ALL else text

    def _exchange(
        self,
        order: Order,
        calls: Sequence[ProductCall],
        title: str,
        expert_M: Tensor,
        slots: int,
    ) -> tuple[Route, Tensor, Tensor]:
        """Tells every rank this rank's counts of rows and tokens, its layer and random states.

        Returns:
            The way of this forward's rows; int64 (), the tokens of the ranks before this one; and
            int64 (calls, 2), the first rank's random states.

        Raises:
            ValueError: the ranks' layers differ, or a rank is missing.
        """
        offs = order.offs.long()
        number = torch.full((1,), ops.stream(title), dtype=torch.int64, device=offs.device)
        if self.title is None:
            self._meet(title)
            self.title = title
        sent = offs.diff(prepend=offs.new_zeros(1)).view(self.ranks, self.local)
        tokens = torch.full_like(number, order.places.shape[0])
        states = [offs.new_zeros(2) if call.rng is None else call.rng[:2] for call in calls]
        own = torch.cat([tokens, number, *states])
        message = torch.cat([sent, own.expand(self.ranks, -1)], dim=1)
        answer = torch.empty_like(message)
        dist.all_to_all_single(answer, message, group=self.group)
        received, others = answer[:, : self.local].sum(1), answer[:, self.local :]
        route = self._route(title, sent.sum(1), received, others[:, 1], expert_M, slots)
        return route, others[: self.rank, 0].sum(), others[0, 2:].reshape(-1, 2)

    def _route(
        self,
        title: str,
        sent_R: Tensor,
        received_R: Tensor,
        titles_R: Tensor,
        expert_M: Tensor,
        slots: int,
    ) -> Route:
        """Returns the way of this forward's rows.

        A rank whose title has changed compares the ranks' titles here; with exact sizes the others
        do where the way waits.
        """
        rows, ranks = expert_M.shape[0], self.ranks
        if title != self.title and not (self.dispatcher is None and self.capacity is None):
            self._compare(title, to_host(titles_R), is_on_all=False)
        if self.dispatcher is not None:
            return DispatcherRoute(self.dispatcher, expert_M.int())
        if self.capacity is None:
            on_device = torch.cat([sent_R, received_R, titles_R])

            def read() -> tuple[list[int], list[int]]:
                numbers = to_host(on_device)
                self._compare(title, numbers[2 * ranks :], is_on_all=True)
                return numbers[:ranks], numbers[ranks : 2 * ranks]

            exact = ExactRoute(self.group, read, rows)
            if title != self.title:
                exact.wait()  # before a cast that this rank alone may refuse
            return exact
        most = rows // max(slots, 1) * min(slots, self.local)  # a token has an expert once
        capacity = most if self.capacity == ALL else int(self.capacity)
        route = CapacityRoute(self.group, sent_R, capacity, rows, capacity < most)
        if self.capacity != ALL:
            self._count(route.dropped)
        return route

    def _meet(self, title: str) -> None:
        """Waits for all ranks, and raises ValueError on each where their titles differ."""
        require_same(
            "the forward of",
            title,
            self.group,
            expected=DIVIDE,
            absent="their layer is not divided",
            differs=EQUAL,
        )

    def _compare(self, title: str, numbers: list[int], is_on_all: bool) -> None:
        """Compares the titles' numbers, on all ranks or on this one, whose title has changed.

        Raises:
            ValueError: ranks differ: on every rank, with the titles of all, or on this rank.
        """
        if is_on_all and len(set(numbers)) > 1:
            self._meet(title)
        others = [i for i, number in enumerate(numbers) if number != numbers[self.rank]]
        if others:
            raise ValueError(
                f"{EQUAL}, but rank {self.rank} has {title} now, and ranks {others} have not; "
                f"before, all had {self.title}"
            )
        self.title = title

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
        product, texts = product_of(module, "w2"), []
        recipe = Recipe("bf16") if product is None else product.recipe
        for name, readers in ((X, len(module.input_names)), (G, 1)):
            why, operand = why_values(name, [ProductCall(recipe.text)] * readers), name[0]
            spec = spec_of(name, recipe).text
            texts.append(f"{operand} as {spec}" if why is None else f"{operand} as values ({why})")
        return f"{self}, sends {' and '.join(texts)}"

    def __repr__(self) -> str:
        own = "" if self.dispatcher is None else ", own dispatcher"
        capacity = "" if self.capacity is None else f", capacity={self.capacity!r}"
        return (
            f"experts {self.first_expert} to {self.first_expert + self.local - 1} on rank "
            f"{self.rank} of {self.ranks}{capacity}{own}"
        )


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
    require_one_of(f"{function}: dispatch", dispatch, DISPATCHES)
    if capacity is None or capacity == ALL:
        return
    if isinstance(capacity, str):
        raise ValueError(
            f"{function}: capacity: expected a number of rows, {ALL!r} or None, got {capacity!r}"
        )
    require_int(f"{function}: capacity", capacity, 1, unit="row")
