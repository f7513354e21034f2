"""Computes experts over the ranks of a group: each rank has E / ranks of them, and rows travel.

    counts of rows and tokens, hashes, random states     one small all-to-all
    rows of tokens  -> ranks of the experts              one all-to-all    backward: gradients <-
    results         -> ranks of the tokens               one all-to-all    backward: gradients <-

An expert's products have the operands, byte for byte, that they have in one process with the tokens
of all ranks, in the order of the ranks. For that, rows are sorted by their pair ids among all
ranks. Random bits come from these ids, and from the random state of the group's first rank.

All ranks must have the same layer. Each describes its configuration in a text, and ranks compare
the texts or their 64-bit hashes:

    first forward     ranks wait for each other, and compare the texts
    later             each rank sends its hash with its counts of rows
        exact sizes   every rank reads all hashes with the counts. Where they differ, ranks compare
                      the texts as in the first forward, and each raises an error
        otherwise     only a rank whose own configuration has changed reads the hashes. No other
                      rank waits for the device

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
from ...nn.cache.operand_cache import compute_dtype
from ...nn.grouped_product import ProductCall, product_of
from ...nn.registry import CODES, COMPUTE_DTYPE
from ...nn.state.recipe_state import ExpertRange
from ...private_torch import all_gather_with_gradient
from ...recipe import Recipe
from ...tensor.quantized import Operand
from ..feed_forward import (
    Order,
    Products,
    input_names,
    order_rows,
    uncompiled,
    weighted_biases,
)
from ..router import is_recomputed
from .dispatch import CapacityPlan, Dispatcher, DispatcherPlan, ExactPlan, ExchangePlan
from .exchange import run_on_ranks
from .operand_cast import G, OperandCast, X, operand_spec, why_not_codes

Prepare = Callable[[Tensor, bool], Products]  # begins a forward, as Experts.prepare

ALL = "all"  # the capacity that drops no row
DIVIDE = "expert_parallel: expected all {} ranks to divide {}"
EQUAL = "expert_parallel: expected all ranks to have the same layer"


def to_host(numbers: Tensor) -> list[int]:
    """Copies numbers to the host. No other function of a forward waits for the device."""
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
        # The configuration that all ranks had when they last compared; None: before the first.
        self.agreed_config: str | None = None
        # int64 (1), rows that this rank dropped since the last mf.step; None: it has no counter.
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
        """Computes each token's weighted sum of experts, on whatever ranks they are.

        Args:
            prepare: begins the forward of this rank's experts.
            x_TD: (T, D), float32 or bfloat16.
            indices_Tk: (T, k) integers, the expert of each slot among all ranks.
            weights_Tk: (T, k), routing weights.
            cast: returns x as codes where the layer has them already, or None.

        Returns:
            (T, D), in the compute dtype.
        """
        x = x_TD.to(compute_dtype(x_TD))
        order = order_rows(indices_Tk, self.experts)
        # Rows that arrive require a gradient where the weights of their slots do.
        products = prepare(x, x.requires_grad or weights_Tk.requires_grad)
        config = self._config(products, x, indices_Tk)
        plan, rng = self._plan(order, products.calls, config)
        calls = [  # with the group's random state
            replace(call, rng=None if call.rng is None else state, first_expert=self.first_expert)
            for call, state in zip(products.calls, rng)
        ]
        products = replace(products, calls=calls)
        casts = self._operand_cast(X, calls[:-1]), self._operand_cast(G, calls[-1:])
        tokens = None if cast is None or casts[0] is None else cast(x_TD)

        def biases_of_tokens() -> Tensor | None:
            bias, weights = products.output_bias, weights_Tk
            if bias is None:
                return None
            if isinstance(plan, CapacityPlan):  # a row that was dropped has no bias either
                weights = weights.masked_fill(plan.slot_positions() < 0, 0)
            bias = all_gather_with_gradient(bias.float().contiguous(), 0, self.group)
            return weighted_biases(indices_Tk, weights, bias)

        return run_on_ranks(plan, casts, products, x, weights_Tk, tokens, biases_of_tokens)

    def _operand_cast(self, name: str, calls: Sequence[ProductCall]) -> OperandCast | None:
        """Returns the cast of X or G, which `calls` read; None where it travels as values."""
        if self.dispatch != CODES or why_not_codes(name, calls) is not None:
            return None
        return OperandCast(name, calls[0], self.expert_range)

    # ---- the plan of a forward -------------------------------------------------------------------

    def _config(self, products: Products, x: Tensor, indices_Tk: Tensor) -> str:
        """Describes what must be equal on all ranks, as one text."""
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

    def _plan(
        self, order: Order, calls: Sequence[ProductCall], config: str
    ) -> tuple[ExchangePlan, Tensor]:
        """Plans the exchange of this forward's rows, from counts that ranks send each other.

        Returns:
            The plan; and int64 (calls, 2), the first rank's random states.

        Raises:
            ValueError: the ranks' layers differ, or a rank is missing.
        """
        if self.agreed_config is None:
            self._compare_on_all(config)
        offs, rows = order.offs.long(), order.pairs.shape[0]
        send_counts = offs.diff(prepend=offs.new_zeros(1)).view(self.ranks, self.local)
        tokens = offs.new_full((1,), order.places.shape[0])
        states = [offs.new_zeros(2) if call.rng is None else call.rng[:2] for call in calls]
        own = torch.cat([tokens, offs.new_full((1,), ops.stream(config)), *states])
        message = torch.cat([send_counts, own.expand(self.ranks, -1)], dim=1)
        received = torch.empty_like(message)
        dist.all_to_all_single(received, message, group=self.group)
        receive_counts = received[:, : self.local].sum(1)
        tokens_R, hashes_R, *_ = received[:, self.local :].unbind(1)
        first_pair = tokens_R[: self.rank].sum() * order.slots
        row_M = torch.arange(rows, dtype=torch.int32, device=offs.device)
        expert_M = torch.searchsorted(order.offs, row_M, right=True)  # E where there is no expert
        plan = self._plan_of_counts(
            config,
            (send_counts.sum(1), receive_counts, hashes_R),
            expert_M.int(),
            order=order,
            pair_ids=order.pairs + first_pair.int(),
            local_experts=torch.where(expert_M < self.experts, expert_M % self.local + 1, 0).int(),
        )
        return plan, received[0, self.local + 2 :].reshape(-1, 2)

    def _plan_of_counts(
        self, config: str, of_ranks: tuple[Tensor, Tensor, Tensor], expert_M: Tensor, **rows: Any
    ) -> ExchangePlan:
        """Returns the plan for a dispatcher, for exact sizes or for a capacity.

        A rank whose configuration has changed compares the ranks' hashes here. With exact sizes the
        others do where the plan waits.

        Args:
            config: of this rank.
            of_ranks: int64 (R) each: counts of rows to send and to receive, and the hashes.
            expert_M: int32 (M), the rows' experts among all ranks.
            rows: the arguments of ExchangePlan.
        """
        send_R, _, hashes_R = of_ranks
        has_changed = config != self.agreed_config
        if has_changed and not (self.dispatcher is None and self.capacity is None):
            self._compare_hashes(config, to_host(hashes_R), is_on_all=False)
        if self.dispatcher is not None:
            return DispatcherPlan(dispatcher=self.dispatcher, experts=expert_M, **rows)
        if self.capacity is None:
            on_device = torch.cat(of_ranks)

            def read_counts() -> tuple[list[int], list[int]]:
                numbers, ranks = to_host(on_device), self.ranks
                self._compare_hashes(config, numbers[2 * ranks :], is_on_all=True)
                return numbers[:ranks], numbers[ranks : 2 * ranks]

            exact = ExactPlan(group=self.group, read_counts=read_counts, **rows)
            if has_changed:
                exact.wait()  # before a cast that this rank alone may refuse
            return exact
        slots = rows["order"].slots
        most = expert_M.shape[0] // slots * min(slots, self.local)  # a token has an expert once
        capacity = most if self.capacity == ALL else int(self.capacity)
        plan = CapacityPlan(
            group=self.group,
            send_counts=send_R,
            capacity=capacity,
            may_drop=capacity < most,
            **rows,
        )
        if self.capacity != ALL:
            self._count(plan.dropped)
        return plan

    def _compare_on_all(self, config: str) -> None:
        """Waits for all ranks, and raises ValueError on each where their configurations differ."""
        require_same(
            "the forward of",
            config,
            self.group,
            expected=DIVIDE,
            absent="their layer is not divided",
            differs=EQUAL,
        )
        self.agreed_config = config

    def _compare_hashes(self, config: str, hashes: list[int], is_on_all: bool) -> None:
        """Compares the hashes of all ranks' configurations.

        Args:
            config: of this rank.
            hashes: of all ranks.
            is_on_all: whether all ranks call this; else this one alone, whose own has changed.

        Raises:
            ValueError: ranks differ: on every rank, with the texts of all, or on this rank.
        """
        if is_on_all and len(set(hashes)) > 1:
            self._compare_on_all(config)
        others = [i for i, other in enumerate(hashes) if other != hashes[self.rank]]
        if others:
            raise ValueError(
                f"{EQUAL}, but rank {self.rank} has {config} now, and ranks {others} have not; "
                f"before, all had {self.agreed_config}"
            )
        self.agreed_config = config

    # ---- capacity --------------------------------------------------------------------------------

    def _count(self, dropped: Tensor) -> None:
        """Adds dropped rows to the counter, once a forward."""
        if self.dropped is None or self.dropped.device != dropped.device:
            self.dropped = torch.zeros(1, dtype=torch.int64, device=dropped.device)
        if not is_recomputed():
            self.dropped.add_(dropped)

    def describe(self, module: Any) -> str:
        """Returns what this rank has, and how the operands of the experts `module` travel."""
        if self.dispatch == COMPUTE_DTYPE:
            return f"{self}, sends values"
        product, texts = product_of(module, "w2"), []
        recipe = Recipe("bf16") if product is None else product.recipe
        for name, readers in ((X, len(module.input_names)), (G, 1)):
            why, operand = why_not_codes(name, [ProductCall(recipe.text)] * readers), name[0]
            spec = operand_spec(name, recipe).text
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
    require_one_of(f"{function}: dispatch", dispatch, (CODES, COMPUTE_DTYPE))
    if capacity is None or capacity == ALL:
        return
    if isinstance(capacity, str):
        raise ValueError(
            f"{function}: capacity: expected a number of rows, {ALL!r} or None, got {capacity!r}"
        )
    require_int(f"{function}: capacity", capacity, 1, unit="row")
