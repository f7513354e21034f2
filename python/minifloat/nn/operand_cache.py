"""What a layer has quantized and may read again: its weight's codes, an input that siblings share.

    WeightCodes    a weight is quantized once while it stays as it is: micro-batches, evaluation,
                   recomputation, frozen weights
    SharedInput    q, k and v, or gate and up, read one input: it is quantized once

Only eager mode reuses codes (a compiler sees for itself what is computed twice), and only codes
that are a function of the values: not under `+sr`, whose bits are each forward's and layer's own,
nor an input under `+delayed`, whose scales are. So results are the same bytes with and without.

Codes are reused where they are shown to be current. Any write that torch counts (the tensor's
`_version`), other memory, another recipe, a step of any torch optimizer and mf.step make them
stale. Writes through `.data`, by NumPy or by other libraries are not counted. Against those:

    CPU     a fingerprint of the weight's or input's bytes is compared at each use, which costs a
            sixth to a third of the cast; tensor-parallel ranks add theirs up, so that all decide
            alike
    CUDA    within the micro-batches of a training step alone: in training mode, with gradients
            enabled, where exactly one backward pass has added to the weight's `.grad` since the
            weight was met last, or where that forward is recomputed. An input: while it is the same
            tensor. A write through `.data` between two micro-batches of one step, or between the
            readers of an input, needs mf.step(model), or an operation that torch counts

A layer that was captured in a CUDA graph reuses nothing any more: replays write uncounted. Neither
does a layer whose parameter FSDP gathers. On CUDA tensor-parallel ranks, whose casts wait for each
other, must change their shards together.

Memory: a layer holds its weight's codes from the second forward of one weight on, as long as every
weight is met twice: up to 1.13 bytes a parameter under FP4 recipes, 2.07 under FP8 and MXFP8, both
directions together. Training without accumulation meets each weight once and holds nothing, nor
does anything stay of an evaluation once the model is back in training mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from .._native import ops
from ..recipe import Recipe
from ..spec import Spec
from .random_state import is_in_backward

# Projections of one input: their names within one parent, as Llama checkpoints, torchtitan and
# Hugging Face's models have them.
SIBLINGS = (
    ("wq", "wk", "wv"),
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("w1", "w3"),
    ("gate_proj", "up_proj"),
)

Conditions = tuple[Any, ...]
Cast = Callable[..., list[Tensor]]  # (rowwise=, columnwise=): as many tensors of each


class OptimizerSteps:
    """How many steps optimizers of this process took, compiled ones apart."""

    def __init__(self) -> None:
        self.taken = 0

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.taken += 1


STEPS = OptimizerSteps()
register_optimizer_step_post_hook(STEPS)


def conditions_of(x: Tensor) -> Conditions:
    """What operands depend on besides values and recipe: compute dtype, mode, stream, capture."""
    kind = "cpu" if x.is_cpu else x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if kind != "cuda":
        return dtype, torch.is_inference_mode_enabled(), None, False
    stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    capturing = torch.cuda.is_current_stream_capturing()
    return dtype, torch.is_inference_mode_enabled(), stream, capturing


def is_capturing(conditions: Conditions) -> bool:
    return conditions[-1]


def can_reuse(*texts: str, allows_delayed: bool) -> bool:
    """Whether operands in these specs have codes, none of which a forward makes for itself."""
    specs = [Spec.parse(text) for text in texts]
    is_of_values = not any(
        spec.is_stochastic or (spec.is_delayed and not allows_delayed) for spec in specs
    )
    return is_of_values and not all(spec.is_bf16 for spec in specs)


def version_of(t: Tensor) -> Any:
    """What changes with a counted write and with other memory. Holds no memory.

    A storage that is gone cannot be taken for a later one at its address while this lives.
    """
    local = getattr(t, "_local_tensor", t)  # of a DTensor
    memory = StorageWeakRef(local.untyped_storage())
    return t._version, local._version, memory, local.storage_offset(), local.shape, local.stride()


def has_fingerprint(t: Tensor) -> bool:
    return t.is_cpu and not hasattr(t, "_local_tensor") and t.is_contiguous()


def fingerprint_of(t: Tensor) -> Any:
    """The fingerprint of a contiguous CPU tensor's bytes: an object with matches(tensor)."""
    return torch.classes.minifloat.Fingerprint(t.detach())


def gradient_of(weight: Tensor) -> tuple[int, int] | None:
    """What changes with each backward pass that adds to the weight's gradient."""
    grad = weight.grad
    return None if grad is None else (id(grad), grad._version)


def is_next_micro_batch(before: tuple[int, int] | None, now: tuple[int, int] | None) -> bool:
    """Whether gradients show the next micro-batch of one step, or a forward that is recomputed.

    Between two micro-batches exactly one backward pass adds to the weight's gradient, in place.
    """
    if is_in_backward() and before == now:
        return True
    if before is None:
        return now is not None
    return now == (before[0], before[1] + 1)


class Kept(NamedTuple):
    """Codes of a weight. Threads see all of it or none: it is replaced, never changed."""

    key: Any
    fingerprint: Any | None  # of the weight; None: an equal key, or its gradient, shows enough
    codes: list[Tensor]
    has_columnwise: bool


class WeightCodes:
    """The codes of one layer's weight, both directions or the rowwise one."""

    def __init__(self) -> None:
        self.is_captured = False  # in a CUDA graph
        self.met: Any = None  # the key under which the weight was met last
        self.gradient: tuple[int, int] | None = None  # gradient_of the weight then
        self.is_reused = False  # since the key is that
        self.kept: Kept | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # Of a copied layer nothing is kept. A copied reference to memory would release it twice.
        return WeightCodes, ()

    @property
    def codes(self) -> list[Tensor] | None:
        kept = self.kept
        return None if kept is None else kept.codes

    def forget(self) -> None:
        """The weight may have changed."""
        self.met, self.kept = None, None

    def start_over(self) -> None:
        """What the weight was used for has changed."""
        self.forget()
        self.is_reused = False

    def operands(
        self,
        weight: Tensor,
        recipe: str,
        columnwise: bool,
        conditions: Conditions,
        amax_history: Tensor | None,
        is_in_step: bool,
        cast: Cast | None = None,
        is_shown: bool = False,
    ) -> list[Tensor] | None:
        """The weight for `linear`, or what `cast` makes of it; None: its reader quantizes it.

        is_shown: equal `conditions` show that the codes are current.
        """
        if is_capturing(conditions):
            self.is_captured, self.kept = True, None
        if self.is_captured or weight.is_inference():
            return None
        is_hashed = not is_shown and has_fingerprint(weight)
        if not (is_in_step or is_shown or is_hashed):
            self.start_over()
            return None
        key = (id(weight), version_of(weight), STEPS.taken, recipe, conditions)
        kept, is_met_again = self.kept, key == self.met
        if not (is_shown or is_hashed):
            gradient = gradient_of(weight)
            is_met_again = is_met_again and is_next_micro_batch(self.gradient, gradient)
            self.gradient = gradient
        if is_met_again:
            self.is_reused = True
        else:
            is_worth_it, kept = self.is_reused, None
            self.met, self.is_reused, self.kept = key, False, None
            if not is_worth_it:
                return None
        if cast is None:
            cast = partial(
                ops.layer_operands.default, weight, recipe, "w", amax_history=amax_history
            )
        if kept is not None and kept.key != key:  # another thread's
            kept = None
        if kept is not None and kept.fingerprint is not None:
            kept = kept if kept.fingerprint.matches(weight.detach()) else None
        if kept is None:
            fingerprint = fingerprint_of(weight) if is_hashed else None
            kept = Kept(key, fingerprint, cast(rowwise=True, columnwise=columnwise), columnwise)
        elif columnwise and not kept.has_columnwise:
            half = len(kept.codes) // 2
            other = cast(rowwise=False, columnwise=True)[half:]
            kept = Kept(key, kept.fingerprint, [*kept.codes[:half], *other], True)
        self.kept = kept
        return kept.codes


class SharedInput:
    """The operands of the input that `readers` layers read, until all have or the input is gone."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self.slot: tuple[Any, ...] | None = None  # reference to x, key, fingerprint, operands
        self.left = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return SharedInput, (self.readers,)

    def forget(self, reference: Any = None) -> None:
        slot = self.slot
        if reference is None or (slot is not None and slot[0] is reference):
            self.slot = None

    def operands(
        self,
        x: Tensor,
        recipe: str,
        columnwise: bool,
        conditions: Conditions,
        cast: Callable[[], Any] | None = None,
    ) -> Any:
        """x for `linear`, None: it quantizes x itself; or what `cast` made of x for all readers."""
        if x.is_inference():  # has no version
            return None if cast is None else cast()
        key, slot = (version_of(x), recipe, columnwise, conditions), self.slot
        is_same = slot is not None and slot[0]() is x and slot[1] == key
        if slot is not None and is_same and (slot[2] is None or slot[2].matches(x.detach())):
            self.left -= 1
            if self.left == 0:
                self.slot = None
            return slot[3]
        fingerprint = fingerprint_of(x) if has_fingerprint(x) else None
        if cast is None and fingerprint is None and x.device.type == "cpu":
            return None
        if cast is None:
            operands = ops.layer_operands.default(x, recipe, "x", columnwise=columnwise)
        else:
            operands = cast()
        self.left = self.readers - 1
        self.slot = (weakref.ref(x, self.forget), key, fingerprint, operands)
        return operands


def share_inputs(model: nn.Module, layers: dict[nn.Module, Recipe]) -> None:
    """One SharedInput for the projections of one input that are converted alike."""
    for parent in model.modules():
        for names in SIBLINGS:
            children = [parent._modules.get(name) for name in names]
            alike: dict[Any, list[nn.Module]] = {}
            for child in children:
                recipe = layers.get(child) if child is not None else None
                if child is None or recipe is None:
                    continue
                if can_reuse(recipe.fprop.a, recipe.wgrad.b, allows_delayed=False):
                    alike.setdefault((recipe, child.in_features), []).append(child)
            for group in alike.values():
                shared = SharedInput(len(group)) if len(group) > 1 else None
                for child in group:
                    child.shared_input = shared  # type: ignore[assignment]


def weight_codes(weight: Tensor, recipe: Recipe) -> WeightCodes | None:
    """None where the weight must be quantized each time, or is codes already."""
    shard = getattr(weight, "_local_tensor", None)  # of a DTensor
    if type(weight) is not nn.Parameter and type(shard) is not Tensor:
        return None
    if weight.is_inference():  # torch counts no writes to it
        return None
    if not can_reuse(recipe.fprop.b, recipe.dgrad.b, allows_delayed=True):
        return None
    return WeightCodes()
