"""Chooses the experts of each token, and the weights of their results.

    logits = x · Wᵀ                     fp32, also under autocast
    scores = sigmoid or softmax(logits)
    choice = scores + expert_bias       the k largest, in the best groups of experts alone
    weights = scores of the chosen      normalised, scaled; the bias is no part of them

Experts are balanced in one of two ways:

    "bias"    mf.step adds or subtracts balance_speed from each expert's bias, by the sign of the
              difference of the expert's load from the mean (arXiv 2408.15664)
    "loss"    the caller adds mf.moe.balance_loss, an auxiliary loss, to the task's loss (Switch
              Transformer, arXiv 2101.03961)

Shape suffixes: T tokens, k slots, E experts, G groups of experts, D model width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from ..checks import require_bool, require_int, require_number, require_one_of
from ..function_transforms import require_no_transform
from ..nn.state.random_state import as_normal
from ..nn.state.recomputation import repeats_counted_forward

MOST_EXPERTS = 1023  # groups of one operand (docs/numerics.md, section 10)
SCORES = ("sigmoid", "softmax")
BALANCES = ("bias", "loss", None)
COUNTS = ("counts", "step_counts")
RANKED = 2  # the experts whose scores rank a group
LEAST_SUM = 1e-20  # of scores that are normalised


def is_recomputed() -> bool:
    """Tells whether a forward now repeats one that was counted: one without gradients was not."""
    return not torch.compiler.is_compiling() and repeats_counted_forward()


class Fp32Linear(torch.autograd.Function):
    """Computes x · Wᵀ in fp32, and saves x for backward in x's own dtype."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.float(), weight.float())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (g_TE,), (x, weight) = grads, ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        dx = (g_TE @ weight.float()).to(x.dtype) if needs_x else None
        dw = (g_TE.t() @ x.float()).to(weight.dtype) if needs_weight else None
        return dx, dw


class Router(nn.Module):
    """Chooses the experts of each token, in fp32.

    Args:
        dim: D.
        experts: E, at most 1,023.
        top_k: k, the experts of a token.
        score: "sigmoid" or "softmax" of the logits.
        route_norm: whether a token's weights are divided by their sum.
        route_scale: factor of the weights.
        expert_groups: G groups of E / G experts each; None: no groups.
        groups_chosen: groups that a token's experts are chosen from: those with the largest sums of
            their two best scores.
        balance: "bias", which mf.step moves by the load of all data-parallel ranks; "loss", which
            mf.moe.balance_loss returns after each training forward; or None.
        balance_speed: of the bias, added or subtracted by each mf.step.
        balance_loss: factor of the auxiliary loss.
        device: of the weight.
        dtype: of the weight; None: float32. The product is computed in float32 in any case.

    Raises:
        TypeError, ValueError: an argument is not as expected.

    Source: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) for groups and bias.
    """

    # What data-parallel ranks must have alike: mf.step moves the bias of each by the counts of all.
    SETTINGS = (
        "experts",
        "dim",
        "top_k",
        "score",
        "route_norm",
        "route_scale",
        "expert_groups",
        "groups_chosen",
        "balance",
        "balance_speed",
        "balance_loss",
    )
    weight: Tensor
    expert_bias: Tensor | None
    # int64 (E), tokens of each expert: since the last mf.step, and of all ranks in the step before.
    # They are no buffers, because DistributedDataParallel replaces those by rank 0's.
    counts: Tensor
    step_counts: Tensor
    # float32 scalar, the sum of the losses of forwards since balance_loss; None: there are none.
    loss: Tensor | None

    def __init__(
        self,
        dim: int,
        experts: int,
        top_k: int,
        *,
        score: str = "sigmoid",
        route_norm: bool = True,
        route_scale: float = 1.0,
        expert_groups: int | None = None,
        groups_chosen: int | None = None,
        balance: str | None = "bias",
        balance_speed: float = 1e-3,
        balance_loss: float = 1e-2,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.dim = require_int("dim", dim, 1)
        self.experts = require_int("experts", experts, 1, MOST_EXPERTS)
        self.top_k = require_int("top_k", top_k, 1, experts)
        require_one_of("score", score, SCORES)
        require_one_of("balance", balance, BALANCES)
        self.score, self.balance = score, balance
        self.route_norm = require_bool("route_norm", route_norm)
        self.route_scale = require_number("route_scale", route_scale)
        self.balance_speed = require_number("balance_speed", balance_speed)
        self.balance_loss = require_number("balance_loss", balance_loss)
        self._set_groups(expert_groups, groups_chosen)
        dtype = dtype or torch.float32
        self.weight = nn.Parameter(torch.empty(experts, dim, device=device, dtype=dtype))
        device = self.weight.device
        bias = torch.zeros(experts, dtype=torch.float32, device=device)
        self.register_buffer("expert_bias", bias if balance == "bias" else None)
        self.counts = torch.zeros(experts, dtype=torch.int64, device=device)
        self.step_counts = self.counts.clone()
        self.loss = None
        self.reset_parameters()

    def _set_groups(self, groups: int | None, chosen: int | None) -> None:
        if (groups is None) != (chosen is None):
            raise ValueError(
                "expert_groups, groups_chosen: expected both or neither, got "
                f"{groups!r} and {chosen!r}"
            )
        self.expert_groups = self.groups_chosen = None
        if groups is None:
            return
        self.expert_groups = require_int("expert_groups", groups, 1, self.experts)
        self.groups_chosen = require_int("groups_chosen", chosen, 1, groups)
        each = self.experts // groups
        if each * groups != self.experts or each * self.groups_chosen < self.top_k:
            raise ValueError(
                "expert_groups, groups_chosen: expected groups of one size, and top_k experts in "
                f"the chosen ones, got {self.experts} experts in {groups} groups, "
                f"{chosen} of them chosen, for top_k = {self.top_k}"
            )

    def reset_parameters(self) -> None:
        """Draws the weight uniformly within 1 / sqrt(D), as nn.Linear does."""
        bound = self.dim**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Chooses experts.

        Args:
            x_TD: (T, D).

        Returns:
            The experts of each token, int64 (T, k), and their weights, float32 (T, k).
        """
        kind = "cpu" if x_TD.is_meta else x_TD.device.type  # torch knows no autocast of meta
        with torch.autocast(kind, enabled=False):
            logits_TE = Fp32Linear.apply(x_TD, self.weight)
            is_sigmoid = self.score == "sigmoid"
            scores_TE = logits_TE.sigmoid() if is_sigmoid else logits_TE.softmax(-1)
            indices_Tk = self._choose(scores_TE.detach())
            weights_Tk = scores_TE.gather(1, indices_Tk)
            if self.route_norm:
                weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + LEAST_SUM)
            weights_Tk = weights_Tk * self.route_scale
            if self.training:
                self._record(scores_TE, indices_Tk)
        return indices_Tk, weights_Tk

    def _choose(self, scores_TE: Tensor) -> Tensor:
        """Returns the experts with the largest scores, in the best groups."""
        choice_TE = scores_TE if self.expert_bias is None else scores_TE + self.expert_bias
        if self.expert_groups is not None and self.groups_chosen is not None:
            grouped_TGe = choice_TE.unflatten(1, (self.expert_groups, -1))
            ranked = min(RANKED, grouped_TGe.shape[2])
            ranks_TG = grouped_TGe.topk(ranked, dim=-1).values.sum(-1)
            best = ranks_TG.topk(self.groups_chosen, dim=-1).indices
            is_left_out = torch.ones_like(ranks_TG, dtype=torch.bool).scatter(1, best, False)
            choice_TE = grouped_TGe.masked_fill(is_left_out[..., None], -torch.inf).flatten(1)
        return choice_TE.topk(self.top_k, dim=-1).indices

    def _record(self, scores_TE: Tensor, indices_Tk: Tensor) -> None:
        """Adds the tokens of each expert to the counts, and keeps the auxiliary loss.

        A forward without gradients counts nothing. Its loss is kept: it is the first forward of a
        checkpoint with use_reentrant=True.

        Raises:
            NotImplementedError: a transform of torch.func is active, whose function has no place
                for either.
        """
        is_counted = torch.is_grad_enabled()
        if not is_counted and self.balance != "loss":
            return
        require_no_transform("mf.MoE", "a forward in training counts the tokens of its experts")
        chosen = indices_Tk.reshape(-1)
        counts_E = torch.zeros_like(self.counts).scatter_add_(0, chosen, torch.ones_like(chosen))
        # A recomputation saves the tensors that the first forward saved, so it computes the loss.
        loss = self._loss(scores_TE, counts_E) if self.balance == "loss" else None
        if is_recomputed():
            return
        if is_counted:
            self.counts.add_(counts_E)
        if loss is not None:
            self._keep(loss)

    def _keep(self, loss: Tensor) -> None:
        """Adds a loss to those kept. One with a gradient replaces those without."""
        kept = self.loss
        if kept is None or (loss.requires_grad and not kept.requires_grad):
            self.loss = loss
        elif loss.requires_grad or not kept.requires_grad:
            self.loss = kept + loss

    def _loss(self, scores_TE: Tensor, counts_E: Tensor) -> Tensor:
        """Returns E · Σ (share of slots) · (mean share of scores), times its factor.

        The sum times E is 1 where experts are even.
        """
        tokens = scores_TE.shape[0]
        shares_TE = scores_TE / (scores_TE.sum(-1, keepdim=True) + LEAST_SUM)
        slots_E = counts_E / max(tokens * self.top_k, 1)
        factor = self.balance_loss * self.experts / max(tokens, 1)
        return (slots_E * shares_TE.sum(0)).sum() * factor

    @torch.no_grad()
    def end_step(self) -> None:
        """Moves the bias against the load error of this step's counts, and clears the counts."""
        counts = self.counts
        if self.expert_bias is not None:
            error = counts.sum() - counts * self.experts
            self.expert_bias.add_(error.sign(), alpha=self.balance_speed)
        self.step_counts.copy_(counts)
        counts.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Moves the router, as nn.Module does, except that bias and counts keep their dtypes."""
        bias = self._buffers.pop("expert_bias")
        super()._apply(fn, recurse)
        self._buffers["expert_bias"] = None if bias is None else self._moved(bias)
        for name in COUNTS:
            setattr(self, name, self._moved(getattr(self, name)))
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy has: all but the loss, whose graph ends at this router's weight."""
        return {**self.__dict__, "loss": None}

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        if self.counts.is_meta:  # and a loaded weight that was assigned is not
            for name in COUNTS:
                setattr(self, name, self._moved(getattr(self, name)))

    def _moved(self, state: Tensor) -> Tensor:
        """Returns the state on the weight's device; zeros where it had no values on meta."""
        device = self.weight.device
        if state.is_meta and device.type != "meta":
            return torch.zeros_like(state, device=device)
        return as_normal(state.to(device))

    def extra_repr(self) -> str:
        groups = f", groups={self.groups_chosen} of {self.expert_groups}"
        return (
            f"{self.dim}, experts={self.experts}, top_k={self.top_k}, score={self.score!r}, "
            f"balance={self.balance!r}{groups if self.expert_groups else ''}"
        )
