"""Calls of each differentiable op of layers, with every tensor by a name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import minifloat as mf
import torch
from minifloat._native import ops
from minifloat.moe.feed_forward import order_rows
from torch import Tensor

from tests.support.experts import routing

TOKENS, K, N, E = 64, 128, 256, 2
ONE_RANK = {"group": "", "rank": 0, "ranks": 1}

Values = dict[str, Tensor]


@dataclass(frozen=True)
class Options:
    """What a call is given.

    Args:
        tokens: M.
        recompute, accumulate: of the op.
        has_codes: whether the weights' codes are given.
        is_fused: whether gate and up of experts are one weight.
        where: group, rank and ranks of an op of weights that ranks cut; None: the other op.
        weight_dim: of W, along which ranks cut it.
    """

    tokens: int = TOKENS
    recompute: str = ""
    accumulate: str = ""
    has_codes: bool = False
    is_fused: bool = False
    where: dict[str, Any] | None = None
    weight_dim: int = 0


@dataclass
class Case:
    """A call of an op: all tensors that it reads, by name, and what returns its results."""

    values: Values
    call: Callable[[Values], Any]

    def forward(self) -> list[Tensor]:
        out = self.call(self.values)
        return list(out) if isinstance(out, (list, tuple)) else [out]

    def leaves(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, t) for name, t in self.values.items() if t.requires_grad)

    def backward(self, results: list[Tensor]) -> Values:
        """Returns the gradients of the leaves, and the sums of gradients."""
        generator = torch.Generator().manual_seed(9)
        grads = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in results]
        torch.autograd.backward(results, grads)
        found = {name: t.grad for name, t in self.leaves() if t.grad is not None}
        return found | {k: t for k, t in self.values.items() if k.startswith("main_grad")}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return draw(*shape, seed=seed).requires_grad_()


def state_of(recipe: str, experts: int | None = None, name: str = "") -> Values:
    """Returns the random state and the amax history that a recipe reads."""
    parsed = mf.Recipe(recipe)
    state: Values = {}
    if parsed.is_stochastic:
        state["rng" + name] = torch.tensor([7, 1])
    if parsed.is_delayed:
        shape = (6, 4) if experts is None else (6, experts, 4)
        state["amax_history" + name] = 1 + draw(*shape).abs()
    return state


def numbered(name: str, tensors: list[Tensor]) -> Values:
    return {f"{name}{i}": t for i, t in enumerate(tensors)}


def listed(values: Values, name: str) -> list[Tensor] | None:
    """Returns the tensors of a name and a number, in their order."""
    return [t for k, t in values.items() if k.rstrip("0123456789") == name] or None


def codes_of(recipe: str, weights: list[Tensor]) -> Values:
    """Returns the eight tensors of each weight, as the op layer_operands makes them."""
    found: list[Tensor] = []
    for w in weights:
        state = state_of(recipe, w.shape[0] if w.dim() == 3 else None)
        history = state.get("amax_history")
        found += ops.layer_operands(w.detach(), recipe, "w", amax_history=history)
    return numbered("codes", found)


# ---- dense layers --------------------------------------------------------------------------------
def linear_case(recipe: str, o: Options) -> Case:
    values = {"x": leaf(o.tokens, K), "w": leaf(N, K, seed=1), "b": leaf(N, seed=2)}
    values |= state_of(recipe)
    if o.accumulate == "main_grad":
        values["main_grad"] = torch.ones(N, K)
    if o.accumulate == "grad":
        values["w"].grad = torch.ones(N, K)
        values["grad"] = values["w"].grad
    if o.has_codes:
        values |= codes_of(recipe, [values["w"]])

    def call(v: Values) -> Tensor:
        arguments = v["x"], v["w"], v["b"], recipe
        options: dict[str, Any] = {"rng": v.get("rng"), "amax_history": v.get("amax_history")}
        options |= {"recompute": o.recompute, "weight_operands": listed(v, "codes")}
        if o.where is not None:
            return ops.linear_sharded(*arguments, **options, **o.where, weight_dim=o.weight_dim)
        options |= {"accumulate": o.accumulate, "main_grad": v.get("main_grad")}
        return ops.linear(*arguments, **options)

    return Case(values, call)


def group_case(recipe: str, o: Options) -> Case:
    values = {"x": leaf(o.tokens, K), "w0": leaf(N, K, seed=1), "w1": leaf(32, K, seed=2)}
    for name in "01":
        values |= state_of(recipe, name=name)

    def call(v: Values) -> list[Tensor]:
        state = {"rng": listed(v, "rng"), "amax_history": listed(v, "amax_history")}
        return ops.linear_group(v["x"], listed(v, "w"), [None, None], recipe, **state)

    return Case(values, call)


def mlp_case(recipe: str, o: Options) -> Case:
    shapes = [(N, K), (N, K), (64, N)]
    values = {"x": leaf(o.tokens, K)}
    for i, shape in enumerate(shapes):
        values |= {f"w{i}": leaf(*shape, seed=i + 1), f"b{i}": leaf(shape[0], seed=i)}
        values |= state_of(recipe, name=str(i))
    if o.accumulate:
        values |= numbered("main_grad", [torch.ones(shape) for shape in shapes])
    if o.has_codes:
        values |= codes_of(recipe, listed(values, "w") or [])

    def call(v: Values) -> Tensor:
        return ops.mlp(
            v["x"],
            listed(v, "w"),
            listed(v, "b"),
            recipe,
            "silu",
            rng=listed(v, "rng"),
            amax_history=listed(v, "amax_history"),
            recompute=o.recompute,
            weight_operands=listed(v, "codes"),
            accumulate=o.accumulate,
            main_grads=listed(v, "main_grad"),
        )

    return Case(values, call)


# ---- experts -------------------------------------------------------------------------------------
def grouped_case(recipe: str, o: Options) -> Case:
    rows = o.tokens
    values = {"a": leaf(rows, K), "w": leaf(E, N, K, seed=1), "b": leaf(E, N, seed=2)}
    values |= {"offs": torch.tensor([rows // 2, rows]).int(), "row_ids": torch.arange(rows).int()}
    values |= state_of(recipe, E)
    if o.has_codes:
        values |= codes_of(recipe, [values["w"]])

    def call(v: Values) -> Tensor:
        options: dict[str, Any] = {"rng": v.get("rng"), "amax_history": v.get("amax_history")}
        options |= {"recompute": o.recompute, "weight_operands": listed(v, "codes")}
        options |= {"bias": v["b"], "row_ids": v["row_ids"], "out_dtype": torch.float32}
        if o.where is not None:
            options |= {"weight_dim": o.weight_dim, "weight_parts": 1 + o.is_fused, **o.where}
        op = ops.scaled_grouped_mm if o.where is None else ops.scaled_grouped_mm_sharded
        return op(v["a"], v["w"].mT, v["offs"], recipe, **options)

    return Case(values, call)


def experts_case(recipe: str, o: Options) -> Case:
    indices, weights = routing(o.tokens, 2, E)
    inputs = [(E, 2 * N, K)] if o.is_fused else [(E, N, K), (E, N, K)]
    values: Values = {"x": leaf(o.tokens, K), "weights": weights.requires_grad_()}
    values |= {"base": leaf(o.tokens, K), **order_rows(indices, E)._asdict()}
    for i, shape in enumerate([*inputs, (E, K, N)]):
        values |= {f"w{i}": leaf(*shape, seed=i + 1), **state_of(recipe, E, str(i))}
    if o.has_codes:
        values |= codes_of(recipe, listed(values, "w") or [])
    count = len(inputs) + 1

    def call(v: Values) -> Tensor:
        return ops.grouped_mlp(
            v["x"],
            v["weights"],
            [v["pairs"], v["places"], v["offs"], v["row_ids"]],
            [w.mT for w in listed(v, "w") or []],
            [None] * (count - 1),
            [recipe] * count,
            base=v["base"],
            rng=listed(v, "rng"),
            amax_history=listed(v, "amax_history"),
            streams=list(range(count)),
            weight_operands=listed(v, "codes"),
            recompute=[o.recompute] * count,
            **(o.where or {}),
        )

    return Case(values, call)


def swiglu_case(recipe: str, o: Options) -> Case:
    values = {"gate": leaf(o.tokens, N), "up": leaf(o.tokens, N, seed=1)}
    values |= {"weights": leaf(o.tokens, seed=2), "pairs": torch.arange(o.tokens).flip(0).int()}
    ends = torch.tensor([o.tokens // 2, o.tokens]).int()
    values["groups"] = ops.group_table(ends, o.tokens)

    def call(v: Values) -> Tensor:
        return ops.swiglu(v["gate"], v["up"], v["weights"], pairs=v["pairs"], groups=v["groups"])

    return Case(values, call)


def rows_case(recipe: str, o: Options) -> Case:
    values = {"x": leaf(o.tokens, K), "base": leaf(o.tokens, K, seed=1)}
    values |= order_rows(routing(o.tokens, 2, E)[0], E)._asdict()

    def call(v: Values) -> Tensor:
        rows = ops.take_rows(v["x"], v["pairs"], 2, places=v["places"])
        return ops.add_slots(rows, v["places"], v["base"], pairs=v["pairs"])

    return Case(values, call)
