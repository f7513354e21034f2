"""Compares a foreign module with its replacement on small inputs, before it is converted.

So experts and Conv1D are proven; a feed-forward's source is matched, and not run (fuse/match.py).

    Trial       calls both once, and compares results, gradients, and the state that they leave
    isolated    a context for such calls: it hides the caller's contexts, such as autocast, and
                raises an error where the code draws random numbers

Both run on a copy of the module (replica.py) on the CPU, with parameters that are seeded anew. The
module itself is neither called nor changed. So its parameters may have any device, meta included,
and any dtype, and may be fake tensors, codes or shards.

Inputs are integers from -3 to 3 times a power of two. A sum of fewer than 2^24 of their products is
exact in float32, in any order. Later sums add activations, which are no such integers. Within
`isolated`, products of float32 matrices are therefore computed in float64 and rounded once. Their
results depend neither on the order of the sum nor on the precision that the caller allows oneDNN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...private_torch import TorchDispatchMode, disable_current_modes
from .replica import changed_part, seeded, state_of

# Of a row's largest result. A result is a product of seeded values, through an activation, times a
# routing weight, summed over slots and biases. torch's activations are within 8 units in the last
# place. With the other steps that is below 16 roundings of 2^-24 on each side, of terms of which
# none exceeds the largest result of its row twice: 2 * 16 * 2 * 2^-24 = 2^-18.
BOUND = 2.0**-18
# Of the largest element of a gradient's row. An element is a sum of n terms, n at most 2^12: rows
# of tokens, slots or hidden elements. Each term has at most 16 roundings of 2^-24 on each side. The
# sum of n magnitudes is below sqrt(n) = 2^6 times the norm of sums of random signs. An activation's
# derivative is within a few units of 2^-24 of 1 and not of itself, which near a zero of it is 2^3
# times more: 2 * 16 * 2^6 * 2^3 * 2^-24 = 2^-10.
GRADIENT_BOUND = 2.0**-10
# Of a row's largest result, where the replica computes in bfloat16. Its products of x are exact:
# integers of at most 8 bits times powers of two. Then follow at most 8 roundings of 2^-8: of a
# bias, in the activation, of two products and of sums over slots. No term exceeds the largest
# result of its row twice: 8 * 2 * 2^-8 = 2^-4.
ROUNDED = 2.0**-4
# Of the norm of a gradient there. Its terms have at most 16 roundings of 2^-8. In a sum, terms and
# errors of random signs grow by the same factor. Elements that rounding moves across the limit of a
# clamp, whose derivative is another one there, are fewer than one of 2^7 and lose all of
# themselves: 16 * 2^-8 + 2^-3.5 < 2^-2.
ROUNDED_GRADIENT = 2.0**-2


class DrawsError(RuntimeError):
    """Code within `isolated` draws random numbers."""


# ---- isolation -----------------------------------------------------------------------------------

MATRIX_PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
}


class Isolation(TorchDispatchMode):
    """Refuses random numbers, and computes products of float32 matrices in float64."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it imports torch's compiler, which takes seconds

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # else torch tells other threads' compilers that they are within a mode

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise DrawsError(f"draws random numbers, by {func.overloadpacket.__name__}")
        if func in MATRIX_PRODUCTS:
            operands = [a for a in args if isinstance(a, Tensor)]
            if all(a.dtype == torch.float32 for a in operands):
                exact = [a.double() if isinstance(a, Tensor) else a for a in args]
                return func(*exact, **kwargs).to(torch.float32)
        return func(*args, **kwargs)


@contextmanager
def isolated() -> Iterator[None]:
    """Runs code on the CPU as outside any context of the caller's, without random numbers.

    All of it is this thread's own: no setting of the process changes.

    Raises:
        DrawsError: the code draws random numbers of torch.
    """
    with (
        disable_current_modes(),  # fake tensors, selective checkpointing
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        Isolation(),
    ):
        yield


# ---- comparison ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One call of a replica, and of what would replace it.

    Args:
        theirs: the replica, whose code runs.
        ours: a second one, for what is expected.
        run: (theirs, *arguments) -> a tensor, by the module's own code.
        expect: (ours, *arguments) -> the same, of float32 or of float64, differentiable.
        arguments: tensors, of which each call has copies.
        bound: of the result; 0: equal bits.
        is_rounded: whether the replica computes in bfloat16, where other bounds hold.
        needs_gradients: whether gradients are compared; else the call has none.
    """

    theirs: nn.Module
    ours: nn.Module
    run: Callable[..., object]
    expect: Callable[..., Tensor]
    arguments: Sequence[Tensor]
    bound: float = BOUND
    is_rounded: bool = False
    needs_gradients: bool = True

    def difference(self) -> str | None:
        """Runs both, and compares results, gradients, and the replica before and after.

        Returns:
            None where they are the same; else a clause about the module's own computation.
        """
        leaves, own_leaves = self.leaves_of(self.theirs), self.leaves_of(self.ours)
        before, passed = state_of(self.theirs), self.passed(leaves)
        try:
            with torch.set_grad_enabled(self.needs_gradients):
                want = self.run(self.theirs, *passed)
        except DrawsError as error:
            return str(error)
        except Exception as error:  # whatever foreign code raises
            return f"cannot run on a small input: {type(error).__name__}: {first_line(error)}"
        if (name := changed_part(before, state_of(self.theirs))) is not None:
            return f"changes its attribute {name}"
        if not all(map(torch.equal, leaves, passed)):
            return "changes its arguments"
        if not isinstance(want, Tensor):
            return f"returns a {type(want).__name__}, not a tensor"
        try:
            with torch.set_grad_enabled(self.needs_gradients):
                got = self.expect(self.ours, *self.passed(own_leaves))
        except (RuntimeError, TypeError, ValueError) as error:
            return f"takes what minifloat's does not: {first_line(error)}"
        dtype = self.arguments[0].dtype
        if want.shape != got.shape or want.dtype != dtype:
            return (
                f"returns {want.dtype} {tuple(want.shape)} where minifloat's returns {dtype} "
                f"{tuple(got.shape)}"
            )
        why = distance(want, got, ROUNDED if self.is_rounded else self.bound)
        if why is None and self.needs_gradients:
            why = self.gradient_difference(want, got, leaves, own_leaves)
        return why

    def leaves_of(self, model: nn.Module) -> list[Tensor]:
        """Returns copies of the arguments. They and the parameters require gradients now."""
        copies = [argument.detach().clone() for argument in self.arguments]
        for leaf in [*copies, *model.parameters()]:
            if leaf.is_floating_point():
                leaf.requires_grad_(self.needs_gradients)
        return copies

    def passed(self, leaves: list[Tensor]) -> list[Tensor]:
        """Returns copies of leaves, which code may write to as it may to activations."""
        with torch.set_grad_enabled(self.needs_gradients):
            return [leaf.clone() for leaf in leaves]

    def gradient_difference(
        self, want: Tensor, got: Tensor, leaves: list[Tensor], own_leaves: list[Tensor]
    ) -> str | None:
        """Compares gradients of all arguments and parameters, for one gradient of the result."""
        theirs, ours = named_leaves(self.theirs, leaves), named_leaves(self.ours, own_leaves)
        if not want.requires_grad:
            return "returns a result without a gradient"
        grad = seeded(tuple(want.shape), 5)
        try:
            found = gradients_of(want, theirs, grad)
        except DrawsError as error:
            return str(error)
        except Exception as error:  # whatever foreign code raises
            return f"has no backward: {type(error).__name__}: {first_line(error)}"
        expected = gradients_of(got, ours, grad)
        bound = GRADIENT_BOUND if self.bound else 0.0
        for name in theirs:
            if self.is_rounded:
                why = distance_of_norms(found[name], expected[name])
            else:
                is_routing = name.startswith("its argument") and name != "its argument 0"
                why = distance(found[name], expected[name], bound, is_whole=is_routing)
            if why is not None:
                return f"has a gradient of {name} that {why}"
        return None


def named_leaves(model: nn.Module, leaves: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns what has a gradient, by the name that reasons give it."""
    named = {f"its argument {i}": leaf for i, leaf in enumerate(leaves)}
    return {k: v for k, v in (named | dict(model.named_parameters())).items() if v.requires_grad}


def gradients_of(y: Tensor, leaves: dict[str, Tensor], grad: Tensor) -> dict[str, Tensor]:
    """Returns the gradients of leaves, zeros where y does not depend on them."""
    with torch.enable_grad():
        found = torch.autograd.grad(y, [*leaves.values()], grad.to(y.dtype), allow_unused=True)
    pairs = zip(leaves.items(), found)
    return {name: torch.zeros_like(v) if g is None else g for (name, v), g in pairs}


def distance(want: Tensor, got: Tensor, bound: float, *, is_whole: bool = False) -> str | None:
    """Returns how far two tensors are apart, where that is above a bound.

    Args:
        want, got: of one shape.
        bound: relative to the largest magnitude of a row; 0: equal bits.
        is_whole: whether the whole tensor counts as one row.
    """
    if bound == 0:
        return None if torch.equal(want, got) else "returns other bits than minifloat's"
    want, got = want.detach().double(), got.detach().double()
    if not torch.equal(want.isfinite(), got.isfinite()):
        return "is finite at other places than minifloat's"
    if is_whole:
        want, got = want.reshape(1, -1), got.reshape(1, -1)
    if want.numel() == 0:
        return None
    largest = torch.maximum(want.abs(), got.abs()).amax(-1, keepdim=True)
    floor = torch.finfo(torch.float32).tiny
    relative = float(((want - got).abs() / largest.clamp(min=floor)).max())
    if relative <= bound:
        return None
    return f"differs from minifloat's by {relative:.2g} of the largest value"


def distance_of_norms(want: Tensor, got: Tensor) -> str | None:
    """Returns how far two gradients are apart, where that is above ROUNDED_GRADIENT."""
    want, got = want.detach().double(), got.detach().double()
    largest = max(float(want.norm()), float(got.norm()), torch.finfo(torch.float32).tiny)
    relative = float((want - got).norm()) / largest
    if relative <= ROUNDED_GRADIENT:
        return None
    return f"differs from minifloat's by {relative:.2g} of its norm"


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
