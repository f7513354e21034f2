"""Operands that a layer reads again: its weight's codes, and an input that siblings share.

    WeightCodes    a weight is quantized once while it does not change: in micro-batches,
                   evaluation, recomputation, and for as long as it is frozen
    SharedInput    q, k and v, or gate and up, read one input: it is quantized once

Only eager mode reuses codes: a compiler removes repeated casts itself. Only codes that are a
function of the values are reused. Codes under `+sr` are not, because each forward of each layer has
random bits of its own. An input under `+delayed` is not, because each layer has its own scale. So
the results have the same bytes with reuse and without.

Codes are reused while they are shown to be current. They are stale after any write that torch
counts (in the tensor's `_version`), in other memory, under another recipe, after a step of any
torch optimizer and after mf.step. Writes through `.data`, by NumPy or by other libraries are not
counted. Further conditions detect most of those:

    CPU     a fingerprint of the weight's or input's bytes is compared at each use, which costs a
            sixth to a third of the cast. Tensor-parallel ranks add their fingerprints, so that all
            take the same decision
    CUDA    a weight is reused within the micro-batches of one training step only: in training mode,
            with gradients enabled, where exactly one write has added to the weight's `main_grad`
            or `.grad` since the weight was last read, or where that forward is recomputed. A
            main_grad that is a view shares its count of writes with the whole buffer, so its weight
            is not reused. An input is reused while it is the same tensor. After a write through
            `.data` between two micro-batches of one step, or between the readers of an input, call
            mf.step(model)

A layer that was captured in a CUDA graph reuses nothing afterwards: writes of a replay are not
counted. A layer whose parameter FSDP gathers reuses nothing either. The casts of tensor-parallel
ranks wait for each other, so on CUDA all ranks must change their shards together.

Memory: a layer holds the codes of a weight from its second forward on: up to 1.13 bytes a parameter
under FP4 recipes, 2.07 under FP8 and MXFP8, for both directions together. Codes of the next weight
are held at its first forward if those of the weight before it were reused. Training without
accumulation reads each weight once and holds nothing. Codes of an evaluation are freed when the
model returns to training mode.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..._native import ops
from ...recipe import Recipe
from ...spec import Spec
from ...tensor.quantized import Operands
from ..state.random_state import is_in_backward

# Names, within one parent, of projections that read one input: those of Llama checkpoints,
# torchtitan and Hugging Face's models.
SIBLINGS = (
    ("wq", "wk", "wv"),
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("w1", "w3"),
    ("gate_proj", "up_proj"),
)

Conditions = tuple[object, ...]
Key = tuple[object, ...]  # of a state; equal keys show the same state
Cast = Callable[..., list[Tensor]]  # (rowwise=, columnwise=) -> as the op layer_operands


class Fingerprint(Protocol):
    """The native fingerprint of a contiguous CPU tensor's bytes."""

    def matches(self, t: Tensor) -> bool: ...

    def value(self) -> int: ...


steps_taken = 0  # by this process's optimizers, except compiled steps


def count_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    global steps_taken
    if not torch.compiler.is_compiling():
        steps_taken += 1


register_optimizer_step_post_hook(count_step)


def write_version(t: Tensor) -> tuple[object, ...]:
    """Returns a value that differs after a counted write and in other memory.

    It has the address of the storage. Equal values show the same storage only while a weak
    reference to that storage (weak_storage) keeps its address from being reused.
    """
    local = getattr(t, "_local_tensor", t)  # of a DTensor
    address = local.untyped_storage()._cdata
    return t._version, local._version, address, local.storage_offset(), local.shape, local.stride()


def weak_storage(t: Tensor) -> StorageWeakRef:
    """Returns a reference that holds the address of the tensor's storage, but not its memory."""
    return StorageWeakRef(getattr(t, "_local_tensor", t).untyped_storage())


def has_fingerprint(t: Tensor) -> bool:
    """Tells whether fingerprint_of can read the tensor."""
    return t.is_cpu and not hasattr(t, "_local_tensor") and t.is_contiguous()


def fingerprint_of(t: Tensor) -> Fingerprint | None:
    """Returns a fingerprint of a contiguous CPU tensor's bytes; None of another tensor."""
    return torch.classes.minifloat.Fingerprint(t.detach()) if has_fingerprint(t) else None


def conditions_of(x: Tensor) -> Conditions:
    """Returns what operands depend on: compute dtype, inference mode, CUDA stream and capture."""
    kind = "cpu" if x.is_cpu else x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if kind != "cuda":
        return dtype, torch.is_inference_mode_enabled(), None, False
    stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    capturing = torch.cuda.is_current_stream_capturing()
    return dtype, torch.is_inference_mode_enabled(), stream, capturing


def conditions_of_ranks(
    shard: Tensor, x: Tensor, group: dist.ProcessGroup
) -> tuple[Conditions, bool]:
    """Returns conditions_of x, and whether they show that no rank's shard has changed.

    Casts exchange amaxes, so all ranks must decide the same: by the sum of their fingerprints.
    """
    conditions, fingerprint = conditions_of(x), fingerprint_of(shard)
    if fingerprint is None:
        return conditions, False
    total = torch.tensor(fingerprint.value())
    dist.all_reduce(total, group=group)
    return (*conditions[:-1], total.item(), conditions[-1]), True


def gradient_of(weight: Tensor) -> tuple[int, int] | None:
    """Returns a value that differs after each backward pass that adds to the weight's gradient.

    The gradient is main_grad where the weight has it (accumulation.py), else .grad.
    """
    grad: Tensor | None = getattr(weight, "main_grad", None)
    grad = weight.grad if grad is None else grad
    return None if grad is None or grad.is_inference() else (id(grad), grad._version)


def is_next_micro_batch(before: tuple[int, int] | None, now: tuple[int, int] | None) -> bool:
    """Tells whether gradients show the next micro-batch of one step, or a recomputed forward.

    Between two micro-batches exactly one backward pass adds to the weight's gradient, in place.
    """
    if is_in_backward() and before == now:
        return True
    if before is None:
        return now is not None
    return now == (before[0], before[1] + 1)


class Snapshot(NamedTuple):
    """A state of a tensor, by which a later read is shown to find the same values."""

    key: Key
    storage: StorageWeakRef  # keeps the storage's address, which the key has, from being reused
    fingerprint: Fingerprint | None = None  # None: an equal key, or the gradient, suffices

    def is_of(self, t: Tensor, key: Key) -> bool:
        """Tells whether this is the state of `t` as it is now, which has this key."""
        known = self.fingerprint
        return self.key == key and (known is None or known.matches(t.detach()))


class CachedCodes(NamedTuple):
    """Codes of a weight. Threads share them, so they are replaced as a whole and never changed."""

    weight: Snapshot
    codes: list[Tensor]
    has_columnwise: bool


class WeightCodes:
    """The cached codes of one layer's weight: of both directions, or of the rowwise one."""

    def __init__(self) -> None:
        self.is_captured = False  # in a CUDA graph
        self.last: Snapshot | None = None  # in which the weight was read last
        self.gradient: tuple[int, int] | None = None  # gradient_of the weight at its last use
        self.is_reused = False  # whether the weight was read twice in the state of `last`
        self.cached: CachedCodes | None = None
        self.form: tuple[Key, bool] | None = None  # a state of the weight, and whether it has codes

    def __reduce__(self) -> tuple[object, ...]:
        # A copied layer has no cached codes. A copied StorageWeakRef would be released twice.
        return WeightCodes, ()

    def forget(self) -> None:
        """Drops the codes: the weight may have changed."""
        self.last, self.cached = None, None

    def start_over(self) -> None:
        """Drops the codes and expects no reuse: training, evaluation or tracing has begun."""
        self.forget()
        self.is_reused = False

    def operands(
        self,
        weight: Tensor,
        recipe: str,
        columnwise: bool,
        conditions: Conditions,
        is_in_step: bool,
        cast: Cast,
        conditions_suffice: bool = False,
        saves_weight: bool = False,
    ) -> list[Tensor] | None:
        """Returns a weight's operands, cached or cast now; None: the layer is to quantize it.

        Args:
            weight: (N, K), float32 or bfloat16.
            recipe: its text.
            columnwise: whether the reader needs Wᵀ too.
            conditions: those of conditions_of, and more that the caller adds.
            is_in_step: whether the forward is part of a training step.
            cast: makes the tensors of either direction.
            conditions_suffice: whether equal `conditions` show that the codes are current.
            saves_weight: whether the layer saves a weight without codes. A checkpointed forward
                must save the same again, so all forwards with one state of the weight have codes,
                or none has.
        """
        if conditions[-1]:  # a CUDA graph captures the forward
            self.is_captured, self.cached = True, None
        if weight.is_inference():
            return None
        is_hashed = not conditions_suffice and has_fingerprint(weight)
        key = (id(weight), write_version(weight), steps_taken, recipe, conditions)
        last = self._second_use(weight, key, is_in_step, conditions_suffice or is_hashed)
        if saves_weight and columnwise:
            state, form = key[:-1], self.form
            if form is None or form[0] != state:
                self.form = form = (state, last is not None)
            if not form[1]:
                self.cached = None
                return None
            if last is None:
                return cast(rowwise=True, columnwise=True)
        if last is None:
            return None
        cached = self.cached
        if cached is None or not cached.weight.is_of(weight, key):
            fingerprint = fingerprint_of(weight) if is_hashed else None
            codes = cast(rowwise=True, columnwise=columnwise)
            cached = CachedCodes(last._replace(fingerprint=fingerprint), codes, columnwise)
        elif columnwise and not cached.has_columnwise:
            added = Operands.of(cast(rowwise=False, columnwise=True)).columnwise
            codes = Operands(Operands.of(cached.codes).rowwise, added).tensors()
            cached = CachedCodes(cached.weight, codes, True)
        self.cached = cached
        return cached.codes

    def _second_use(
        self, weight: Tensor, key: Key, is_in_step: bool, is_shown: bool
    ) -> Snapshot | None:
        """Records a use; returns it where the codes will be read again, else None.

        Args:
            key: of the weight's state, the recipe and the conditions.
            is_shown: whether the key or a fingerprint shows that codes are current.
        """
        if self.is_captured:
            return None
        if not (is_in_step or is_shown):
            self.start_over()
            return None
        last = self.last
        is_same_use = last is not None and key == last.key
        if not is_shown:
            gradient = gradient_of(weight)
            is_same_use = is_same_use and is_next_micro_batch(self.gradient, gradient)
            self.gradient = gradient
        if last is not None and is_same_use:
            self.is_reused = True
            return last
        was_reused, use = self.is_reused, Snapshot(key, weak_storage(weight))
        self.last, self.is_reused, self.cached = use, False, None
        return use if was_reused else None  # self.last may be another thread's by now


class CachedInput(NamedTuple):
    """Operands of an input, and the state of the input that they were cast from."""

    reference: weakref.ref[Tensor]
    state: Snapshot
    operands: Any  # what the cast made


class SharedInput:
    """The operands of an input that several layers read, until all have or the input is freed."""

    def __init__(self, readers: int) -> None:
        self.readers = readers
        self.cached: CachedInput | None = None
        self.readers_left = 0

    def __reduce__(self) -> tuple[object, ...]:
        return SharedInput, (self.readers,)

    def forget(self, reference: weakref.ref[Tensor] | None = None) -> None:
        """Drops the operands; those of one input where its reference is given."""
        cached = self.cached
        if reference is None or (cached is not None and cached.reference is reference):
            self.cached = None

    def operands(
        self,
        x: Tensor,
        recipe: str,
        columnwise: bool,
        conditions: Conditions,
        cast: Callable[[], Any] | None = None,
    ) -> Any:
        """Returns the operands of x, cached or cast now; None: the layer is to quantize x itself.

        Args:
            x: (…, K), float32 or bfloat16.
            recipe: its text.
            columnwise: whether the readers need xᵀ too.
            conditions: those of conditions_of.
            cast: makes the operands; None: those of the op `linear`.

        Returns:
            The result of `cast`, which all readers share.
        """
        if x.is_inference():  # has no version
            return None if cast is None else cast()
        key, cached = (write_version(x), recipe, columnwise, conditions), self.cached
        if cached is not None and cached.reference() is x and cached.state.is_of(x, key):
            self.readers_left -= 1
            if self.readers_left == 0:
                self.cached = None
            return cached.operands
        fingerprint = fingerprint_of(x)
        if cast is None and fingerprint is None and x.device.type == "cpu":
            return None
        cast = cast or partial(ops.layer_operands.default, x, recipe, "x", columnwise=columnwise)
        operands, self.readers_left = cast(), self.readers - 1
        state = Snapshot(key, weak_storage(x), fingerprint)
        self.cached = CachedInput(weakref.ref(x, self.forget), state, operands)
        return operands

    def cast_first(
        self, x: Tensor, recipe: str, columnwise: bool, conditions: Conditions
    ) -> list[Tensor] | None:
        """Casts x before its readers do, and returns the operands; None: nothing is cast.

        Args: those of `operands`. The caller is no reader.
        """
        self.forget()
        operands = self.operands(x, recipe, columnwise, conditions)
        self.readers_left = self.readers
        return operands


def can_reuse(*texts: str, allows_delayed: bool) -> bool:
    """Tells whether operands in these specs have codes that several forwards can read."""
    specs = [Spec.parse(text) for text in texts]
    if any(spec.is_stochastic or (spec.is_delayed and not allows_delayed) for spec in specs):
        return False
    return not all(spec.is_bf16 for spec in specs)


def share_inputs(model: nn.Module, layers: dict[nn.Module, Recipe]) -> None:
    """Gives one SharedInput to the projections of one input that have the same recipe."""
    for parent in model.modules():
        for names in SIBLINGS:
            groups: dict[tuple[Recipe, object], list[nn.Module]] = {}
            children = [parent._modules.get(name) for name in names]
            for child in [child for child in children if child in layers]:
                recipe = layers[child]
                if can_reuse(recipe.fprop.a, recipe.wgrad.b, allows_delayed=False):
                    groups.setdefault((recipe, child.in_features), []).append(child)
            for group in groups.values():
                shared = SharedInput(len(group)) if len(group) > 1 else None
                for child in group:
                    child.__dict__["shared_input"] = shared


def weight_codes(weight: Tensor, recipe: Recipe) -> WeightCodes | None:
    """Returns an empty cache; None where the weight is codes, or is to be quantized each time."""
    shard = getattr(weight, "_local_tensor", None)  # of a DTensor
    is_of_values = type(weight) is nn.Parameter or type(shard) is Tensor
    if not is_of_values or weight.is_inference():  # torch counts no writes to the latter
        return None
    is_reusable = can_reuse(recipe.fprop.b, recipe.dgrad.b, allows_delayed=True)
    return WeightCodes() if is_reusable else None
