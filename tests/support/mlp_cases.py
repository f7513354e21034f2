"""An MLP of drawn weights: as the op mlp, and as `linear`, `activation` and `linear`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import minifloat as mf
import torch
from torch import Tensor

ops = torch.ops.minifloat


class Activation(torch.autograd.Function):
    """The op activation with its derivative, as an autograd function of its own."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return ops.activation(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor | None, None]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = ops.activation_backward(dh, gate, up, ctx.activation)
        return d_gate, None if up is None else d_up, None


@dataclass
class Case:
    """Weights, biases and states of an MLP, drawn from one seed."""

    recipe: str
    is_gated: bool = True
    has_bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    tokens: tuple[int, ...] = (3, 40)
    activation: str = "silu"
    sizes: tuple[int, int, int] = (96, 160, 64)  # K, hidden, N
    device: str = "cpu"
    weights: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        k, hidden, n = self.sizes
        shapes = [(hidden, k)] * (2 if self.is_gated else 1) + [(n, hidden)]
        like: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        self.x = torch.randn(*self.tokens, k).to(**like).requires_grad_()
        self.weights = [(torch.randn(s) / 8).to(**like).requires_grad_() for s in shapes]
        biases = [torch.randn(s[0]).to(**like).requires_grad_() for s in shapes]
        self.biases = biases if self.has_bias else [None] * len(shapes)
        self.dy = torch.randn(*self.tokens, n).to(**like)
        recipe = mf.Recipe(self.recipe)
        self.rng = None
        if recipe.is_stochastic:
            self.rng = [torch.tensor([5, 7, i], device=self.device) for i in range(3)]
        self.histories = None
        if recipe.is_delayed:
            self.histories = [(torch.rand(6, 5) + 0.5).to(self.device) for _ in shapes]
            for place in (0, 5):  # x of fprop and of wgrad, which gate and up read alike
                self.histories[-2][place] = self.histories[0][place]

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.weights, *(b for b in self.biases if b is not None)]

    def state(self, i: int) -> dict[str, Any]:
        return {
            "rng": None if self.rng is None else self.rng[i],
            "amax_history": None if self.histories is None else self.histories[i],
        }

    def composed(self) -> Tensor:
        products = [
            ops.linear(self.x, w, b, self.recipe, **self.state(i))
            for i, (w, b) in enumerate(zip(self.weights[:-1], self.biases))
        ]
        h = Activation.apply(products[0], products[1] if self.is_gated else None, self.activation)
        last = len(self.weights) - 1
        return ops.linear(h, self.weights[-1], self.biases[-1], self.recipe, **self.state(last))

    def fused(self, **options: Any) -> Tensor:
        count = len(self.weights)
        return ops.mlp(
            self.x,
            self.weights,
            self.biases,
            self.recipe,
            self.activation,
            rng=None if self.rng is None else self.rng[:count],
            amax_history=self.histories,
            **options,
        )

    def results(self, run: Any) -> list[Tensor]:
        """y, the gradients, and the histories, which are restored."""
        before = None if self.histories is None else [h.clone() for h in self.histories]
        y = run()
        gradients = torch.autograd.grad(y, self.leaves, self.dy)
        out = [y.detach(), *gradients]
        if self.histories is not None and before is not None:
            out += [h.clone() for h in self.histories]
            for history, old in zip(self.histories, before):
                history.copy_(old)
        return out
