"""The ops of layers under the transforms of torch.func: grad, vjp, jacrev, vmap.

torch runs no C++ autograd function under a transform. While one is active, its dispatcher calls
`transformed` instead of these ops, which differentiates them by functions in Python:

    Forward        the op, on tensors without that transform
    Gradients      the op again with a graph, and torch.autograd.grad of it
    under vmap     one call of either for each sample, stacked

So a batch has the bits of calls one by one. They share the random state that the layer passes, as
under vmap's randomness="same". A second derivative and a tangent raise, as they do elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from ._native import ops
from .private_torch import TreeSpec, has_transform, tree_flatten, tree_unflatten

OPS = (
    *("linear", "linear_group", "mlp", "scaled_grouped_mm", "grouped_mlp"),
    *("take_rows", "add_slots", "swiglu"),  # of experts, between their products
)
SHARDED = ("linear_sharded", "scaled_grouped_mm_sharded")
CACHES = ("weight_cache", "x_operands")  # what saves casts: a transformed call casts itself
LIBRARY = torch.library.Library("minifloat", "IMPL")
KEY = "FuncTorchDynamicLayerFrontMode"  # the one that a call meets first under a transform


@dataclass(frozen=True)
class Plan:
    """A call without its tensors.

    Args:
        op: its name.
        spec, leaves: of the arguments. A leaf that is a tensor is its number among them.
        is_tensor: which leaves are.
        needed: of each tensor, whether Gradients returns its gradient.
    """

    op: str
    spec: TreeSpec
    leaves: Sequence[Any]
    is_tensor: Sequence[bool]
    needed: Sequence[bool] = ()

    @property
    def recipe(self) -> str:
        """The recipe, or that of the first of several products: the first text in each schema."""
        texts = (leaf for leaf in self.leaves if isinstance(leaf, str))
        return next(texts, "of the products around it")  # of an op between products

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Calls the op, whose results are one tensor or a list."""
        pairs = zip(self.leaves, self.is_tensor)
        leaves = [tensors[leaf] if is_tensor else leaf for leaf, is_tensor in pairs]
        args, kwargs = tree_unflatten(leaves, self.spec)
        results = getattr(ops, self.op)(*args, **kwargs)
        return (results,) if isinstance(results, Tensor) else tuple(results)


class OfPlan(torch.autograd.Function):
    """The rules that Forward and Gradients share: both take a plan and its tensors."""

    @classmethod
    def vmap(
        cls, info: Any, in_dims: Sequence[int | None], plan: Plan, *tensors: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """Stacks the results of one call for each sample of a batch, along dimension 0."""
        if info.batch_size == 0:
            raise ValueError(
                f"{plan.op}: expected a batch of one sample or more under vmap, got none"
            )
        results = []
        for i in range(info.batch_size):
            sample = [t if d is None else t.select(d, i) for t, d in zip(tensors, in_dims[1:])]
            results.append(cls.apply(plan, *sample))
        stacked = tuple(torch.stack(each) for each in zip(*results))
        return stacked, (0,) * len(stacked)

    @staticmethod
    def jvp(ctx: Any, *tangents: object) -> NoReturn:
        raise NotImplementedError(
            f"{ctx.plan.op}: expected tensors without a tangent, got one: forward-mode "
            "differentiation does not pass through a quantized product; use reverse mode, or leave "
            "the layer in high precision"
        )


class Forward(OfPlan):
    @staticmethod
    def forward(plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        return plan.run(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.plan, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan = replace(ctx.plan, needed=tuple(ctx.needs_input_grad[1:]))
        found = iter(Gradients.apply(plan, *ctx.saved_tensors, *grads))
        return (None, *(next(found) if needed else None for needed in plan.needed))


class Gradients(OfPlan):
    """The gradients of the tensors that the plan names, from all tensors and those of results."""

    @staticmethod
    def forward(plan: Plan, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(plan.needed)
        inputs = [
            t.detach().requires_grad_() if needed else t.detach()
            for t, needed in zip(tensors[:count], plan.needed)
        ]
        with torch.enable_grad():
            results = plan.run(inputs)
        leaves = [t for t, needed in zip(inputs, plan.needed) if needed]
        found = torch.autograd.grad(results, leaves, tensors[count:], allow_unused=True)
        return tuple(torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.plan = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            f"{ctx.plan.op}: expected no second derivative through a quantized product (recipe "
            f"{ctx.plan.recipe}), got one: the backward pass of minifloat's layers is not "
            "differentiable. Leave the layers that a double backward passes through in high "
            "precision, by filter_fqns or a recipe map"
        )


def transformed(op: str, *args: Any, **kwargs: Any) -> Tensor | list[Tensor]:
    """Calls an op of layers within a transform of torch.func."""
    for name in CACHES:
        kwargs.pop(name, None)
    leaves, spec = tree_flatten((args, kwargs))
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    numbers = iter(range(len(tensors)))
    leaves = [next(numbers) if known else leaf for leaf, known in zip(leaves, is_tensor)]
    results: tuple[Tensor, ...] = Forward.apply(Plan(op, spec, leaves, is_tensor), *tensors)
    return list(results) if op == "linear_group" else results[0]


def require_no_transform(name: str, why: str) -> None:
    """Raises NotImplementedError, with the name and the reason, within a transform."""
    if not torch.compiler.is_compiling() and has_transform():
        raise NotImplementedError(
            f"{name}: expected evaluation mode within the transforms of torch.func, got training "
            f"mode: {why}; call .eval() on it first, or use torch.autograd.grad"
        )


def refuse(op: str, *args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedError(
        f"{op}: expected a call outside the transforms of torch.func, which do not pass through "
        "weights that ranks cut; use torch.autograd.grad, or torch.autograd.functional.vjp"
    )


def register(names: Sequence[str], function: Callable[..., object]) -> None:
    for name in names:
        LIBRARY.impl(name, partial(function, name), KEY)


register(OPS, transformed)
register(SHARDED, refuse)
