"""The op mlp: every byte as `linear`, `activation` and `linear` make it, gradients too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import minifloat as mf
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ops = torch.ops.minifloat
PRESETS = ops.preset_names()
K, HIDDEN, N = 96, 160, 64


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
    weights: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(3)
        shapes = [(HIDDEN, K)] * (2 if self.is_gated else 1) + [(N, HIDDEN)]
        self.x = torch.randn(*self.tokens, K, dtype=self.dtype).requires_grad_()
        self.weights = [(torch.randn(s) / 8).to(self.dtype).requires_grad_() for s in shapes]
        biases = [torch.randn(s[0], dtype=self.dtype).requires_grad_() for s in shapes]
        self.biases = biases if self.has_bias else [None] * len(shapes)
        self.dy = torch.randn(*self.tokens, N, dtype=self.dtype)
        recipe = mf.Recipe(self.recipe)
        self.rng = [torch.tensor([5, 7, i]) for i in range(3)] if recipe.is_stochastic else None
        self.histories = None
        if recipe.is_delayed:
            self.histories = [torch.rand(6, 5) + 0.5 for _ in shapes]
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


def require_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected)):
        assert a.dtype == b.dtype
        assert torch.equal(a, b), i


@pytest.mark.parametrize("recipe", PRESETS)
def test_bytes_equal_the_composition(recipe: str) -> None:
    case = Case(recipe)
    expected = case.results(case.composed)
    require_equal(case.results(case.fused), expected)
    require_equal(case.results(lambda: case.fused(recompute="weight")), expected)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_activations_and_biases(activation: str, is_gated: bool, has_bias: bool) -> None:
    for recipe, dtype in (("mxfp8", torch.bfloat16), ("nvfp4", torch.float32)):
        case = Case(recipe, is_gated, has_bias, dtype, (37,), activation)
        require_equal(case.results(case.fused), case.results(case.composed))


@pytest.mark.parametrize(
    "recipe",
    [
        "fprop=mxfp8*mxfp8+sr dgrad=mxfp8*mxfp8+sr wgrad=mxfp8+sr+rht*nvfp4+rht",
        "fprop=e4m3/tensor+delayed*e4m3/tensor dgrad=mxfp8*mxfp8 "
        "wgrad=mxfp8+rht*e4m3/tensor+delayed+rht",
        "fprop=bf16*bf16 dgrad=mxfp8*mxfp8 wgrad=mxfp8*mxfp8",
        "fprop=mxfp8*mxfp8 dgrad=bf16*bf16 wgrad=mxfp8*mxfp8",
    ],
)
def test_mixed_recipes(recipe: str) -> None:
    case = Case(recipe)
    expected = case.results(case.composed)
    require_equal(case.results(case.fused), expected)
    require_equal(case.results(lambda: case.fused(recompute="weight")), expected)


@pytest.mark.parametrize("missing", ["x", "inputs", "down", "all but x", "all but down"])
def test_gradients_that_are_not_needed(missing: str) -> None:
    case = Case("mxfp8")
    first, last = case.weights[:-1], case.weights[-1:]
    frozen = {
        "x": [case.x],
        "inputs": first,
        "down": last,
        "all but x": case.weights,
        "all but down": [case.x, *first],
    }[missing]
    for tensor in frozen:
        tensor.requires_grad_(False)
    needed = [t for t in case.leaves if t.requires_grad]
    expected = torch.autograd.grad(case.composed(), needed, case.dy)
    require_equal(list(torch.autograd.grad(case.fused(), needed, case.dy)), list(expected))


def test_without_gradients_and_in_inference_mode() -> None:
    case = Case("nvfp4")
    expected = case.composed()
    with torch.no_grad():
        assert torch.equal(case.fused(), expected)
    with torch.inference_mode():
        assert torch.equal(case.fused(), expected)


@pytest.mark.parametrize("recipe", ["fp8_tensorwise", "fp8_delayed", "nvfp4", "mxfp4"])
def test_compiled_and_checkpointed(recipe: str) -> None:
    case = Case(recipe)
    expected = case.results(case.composed)
    compiled = torch.compile(case.fused, fullgraph=True, backend="aot_eager")
    require_equal(case.results(compiled), expected)
    again = lambda: checkpoint(lambda _: case.fused(), case.x, use_reentrant=False)  # noqa: E731
    require_equal(case.results(again), expected)


def saved_bytes(run: Any, leaves: list[Tensor]) -> int:
    """Bytes that a graph saves besides its leaves."""
    known = {t.untyped_storage().data_ptr() for t in leaves}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = run()
    assert y.requires_grad
    return sum(saved.values())


def test_saves_no_h_and_no_codes_of_weights_that_it_recomputes() -> None:
    case = Case("fp8_tensorwise", tokens=(128,))
    composed = saved_bytes(case.composed, case.leaves)
    fused = saved_bytes(case.fused, case.leaves)
    recomputed = saved_bytes(lambda: case.fused(recompute="weight"), case.leaves)
    weights = sum(w.numel() for w in case.weights)
    assert composed - fused >= 128 * HIDDEN
    assert (
        weights - 8 * len(case.weights) <= fused - recomputed <= weights + 512 * len(case.weights)
    )


def test_recompute_of_linear() -> None:
    for recipe in PRESETS:
        torch.manual_seed(0)
        x, w = torch.randn(40, K, requires_grad=True), torch.randn(N, K, requires_grad=True)
        state: dict[str, Any] = {"rng": torch.tensor([1, 2, 3])}
        found = []
        for recompute in ("", "weight"):
            history = torch.ones(6, 4) if mf.Recipe(recipe).is_delayed else None
            y = ops.linear(x, w, None, recipe, amax_history=history, recompute=recompute, **state)
            grads = torch.autograd.grad(y.square().sum(), (x, w))
            found.append([y, *grads, *([] if history is None else [history])])
        require_equal(found[1], found[0])


def test_a_weight_that_changed_before_backward_raises() -> None:
    layer = nn.Linear(K, N, bias=False)
    x = torch.randn(8, K, requires_grad=True)
    y = ops.linear(x, layer.weight, None, "mxfp8", recompute="weight")
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation": "relu"}, "expected activation 'silu', 'gelu' or 'gelu_tanh', got 'relu'"),
        ({"weights": [torch.randn(HIDDEN, K)]}, r"expected 2 weights .* got 1"),
        (
            {
                "weights": [
                    torch.randn(HIDDEN, K),
                    torch.randn(HIDDEN + 1, K),
                    torch.randn(N, HIDDEN),
                ]
            },
            "one shape",
        ),
        (
            {
                "weights": [torch.randn(HIDDEN, K), torch.randn(N, HIDDEN + 1)],
                "biases": [None, None],
            },
            "weight",
        ),
        ({"biases": [None]}, "expected 3 biases, got 1"),
        ({"streams": [1]}, "expected 3 streams for 3 weights, got 1"),
        ({"recompute": "x"}, "expected recompute as '' or 'weight', got 'x'"),
        ({"weight_operands": [torch.zeros(1)] * 8}, "weight_operands"),
    ],
)
def test_bad_input(change: dict[str, Any], message: str) -> None:
    weights = [torch.randn(HIDDEN, K), torch.randn(HIDDEN, K), torch.randn(N, HIDDEN)]
    arguments: dict[str, Any] = {
        "x": torch.randn(4, K),
        "weights": weights,
        "biases": [None, None, None],
        "recipe": "mxfp8",
        "activation": "silu",
    } | change
    with pytest.raises(ValueError, match=message):
        ops.mlp(**arguments)
