"""What a layer has quantized and may read again: its weight's codes, an input that siblings share.

    WeightCodes    a weight is quantized once while it stays as it is: micro-batches, evaluation,
                   recomputation, frozen weights
    SharedInput    q, k and v, or gate and up, read one input: it is quantized once

Only eager mode asks them (a compiler sees for itself what is computed twice), and only for what is
a function of the values: not under `+sr`, whose bits are each forward's and layer's own, nor an
input under `+delayed`, whose scales are. So results are the same bytes with and without.

A weight counts as changed when torch counted a write to it (its `_version`), when its memory is
another, after any torch optimizer's step (fused ones write uncounted), and after mf.step. Other
uncounted writes (through `.data`, raw pointers, collectives; a compiled fused optimizer) need an
mf.step(model), which training calls anyway. A parameter that is not the one that the layer was
converted with, such as the one that FSDP gathers, is never reused, unless it is the DTensor that
torch's parallel styles made of that one; nor is the weight of a layer that was captured in a CUDA
graph, whose replays write uncounted. Tensor-parallel ranks, whose casts wait for each other, must
change their shards together.

Memory: a layer holds its weight's codes from the second forward of one weight on, as long as every
weight is met twice: up to 1.13 bytes a parameter under FP4 recipes, 2.07 under FP8 and MXFP8, both
directions together. Training without accumulation meets each weight once and holds nothing, nor
does anything stay of an evaluation once the model is back in training mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ._native import ops
from .quantized import has_flag
from .recipe import Recipe

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
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if kind != "cuda":
        return dtype, torch.is_inference_mode_enabled(), None, False
    stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    capturing = torch.cuda.is_current_stream_capturing()
    return dtype, torch.is_inference_mode_enabled(), stream, capturing


def is_capturing(conditions: Conditions) -> bool:
    return conditions[-1]


def have_no_flag(specs: tuple[str, str], *flags: str) -> bool:
    """Whether there are codes at all, and none under such a flag."""
    is_flagged = any(has_flag(spec, flag) for spec in specs for flag in flags)
    return not is_flagged and specs != ("bf16", "bf16")


class WeightCodes:
    """The codes of one layer's weight, both directions or the rowwise one."""

    def __init__(self, weight: Tensor) -> None:
        # The parameter that may be reused.
        self.home: weakref.ref[Tensor] | None = weakref.ref(weight)  # None: captured in a graph
        self.key: Any = None  # of the weight as it was last met
        self.reused = False  # since the key is that
        self.codes: list[Tensor] | None = None
        self.has_columnwise = False

    def forget(self) -> None:
        """The weight may have changed."""
        self.key, self.codes = None, None

    def start_over(self) -> None:
        """What the weight was used for has changed."""
        self.forget()
        self.reused = False

    def follow(self, weight: Tensor) -> None:
        """The layer's parameter has been replaced by one that may be reused as well."""
        if self.home is not None and weight is not self.home():
            self.home = weakref.ref(weight)
            self.start_over()

    def operands(
        self,
        weight: Tensor,
        recipe: str,
        columnwise: bool,
        conditions: Conditions,
        amax_history: Tensor | None,
        cast: Cast | None = None,
    ) -> list[Tensor] | None:
        """The weight for `linear`, or what `cast` makes of it; None: its reader quantizes it."""
        if self.home is None or weight is not self.home():
            return None
        if is_capturing(conditions):
            self.home, self.codes = None, None
            return None
        key = (weight._version, weight.data_ptr(), STEPS.taken, conditions)
        if key != self.key:
            is_worth_it = self.reused
            self.key, self.reused, self.codes = key, False, None
            if not is_worth_it:
                return None
        else:
            self.reused = True
        if cast is None:
            cast = partial(
                ops.layer_operands.default, weight, recipe, "w", amax_history=amax_history
            )
        if self.codes is None:
            self.codes = cast(rowwise=True, columnwise=columnwise)
            self.has_columnwise = columnwise
        elif columnwise and not self.has_columnwise:
            half = len(self.codes) // 2
            self.codes = [*self.codes[:half], *cast(rowwise=False, columnwise=True)[half:]]
            self.has_columnwise = True
        return self.codes


class SharedInput:
    """The operands of the input that `readers` layers read, until all have or the input is gone."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self.slot: tuple[Any, Any, Any] | None = None  # reference to x, key, operands
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
        key, slot = (x._version, recipe, columnwise, conditions), self.slot
        if slot is not None and slot[0]() is x and slot[1] == key:
            self.left -= 1
            if self.left == 0:
                self.slot = None
            return slot[2]
        if cast is None:
            operands = ops.layer_operands.default(x, recipe, "x", columnwise=columnwise)
        else:
            operands = cast()
        self.slot = (weakref.ref(x, self.forget), key, operands)
        self.left = self.readers - 1
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
                if have_no_flag((recipe.fprop.a, recipe.wgrad.b), "sr", "delayed"):
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
    if not have_no_flag((recipe.fprop.b, recipe.dgrad.b), "sr"):
        return None
    return WeightCodes(weight)
