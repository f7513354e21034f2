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
            with gradients enabled, where exactly one write has added to the weight's gradient since
            the weight was last read, or where that forward is recomputed. The gradient is `.grad`,
            or main_grad where backward adds to it; one that is a view shares its count of writes
            with the whole buffer, so its weight is not reused. An input is reused while it is the
            same tensor. After a write through `.data` between two micro-batches of one step, or
            between the readers of an input, call mf.step(model)

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
from ...private_torch import raw_stream
from ...recipe import Recipe
from ...spec import Spec

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


class Fingerprint(Protocol):
    """The native fingerprint of a contiguous CPU tensor's bytes."""

    def matches(self, t: Tensor) -> bool: ...

    def value(self) -> int: ...


COMPARES_BYTES = True  # whether weights on a CPU have fingerprints; tests decide as on CUDA


def count_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if not torch.compiler.is_compiling():
        ops.count_step()


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


def fingerprint_of(t: Tensor) -> Fingerprint | None:
    """Returns a fingerprint of a contiguous CPU tensor's bytes; None of another tensor."""
    has_bytes = t.is_cpu and not hasattr(t, "_local_tensor") and t.is_contiguous()
    return torch.classes.minifloat.Fingerprint(t.detach()) if has_bytes else None


def compute_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype of products with x: autocast's, or its own."""
    kind = "cpu" if x.is_cpu else x.device.type  # a property takes less time than a device
    is_cast = not x.is_meta and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if is_cast else x.dtype


def conditions_of(x: Tensor) -> Conditions:
    """Returns what operands depend on: compute dtype, inference mode, CUDA stream and capture."""
    dtype = compute_dtype(x)
    if not x.is_cuda:
        return dtype, torch.is_inference_mode_enabled(), None, False
    stream = raw_stream(x.device.index)
    capturing = torch.cuda.is_current_stream_capturing()
    return dtype, torch.is_inference_mode_enabled(), stream, capturing


def fingerprint_of_ranks(shard: Tensor, group: dist.ProcessGroup) -> int | None:
    """Returns the sum of the fingerprints of all ranks' shards; None of those without one.

    Casts exchange amaxes, so all ranks must decide the same.
    """
    fingerprint = fingerprint_of(shard) if COMPARES_BYTES else None
    if fingerprint is None:
        return None
    total = torch.tensor(fingerprint.value())
    dist.all_reduce(total, group=group)
    return int(total)


class Snapshot(NamedTuple):
    """A state of a tensor, by which a later read is shown to find the same values."""

    key: Key
    storage: StorageWeakRef  # keeps the storage's address, which the key has, from being reused
    fingerprint: Fingerprint | None = None  # None: an equal key, or the gradient, suffices

    def is_of(self, t: Tensor, key: Key) -> bool:
        """Tells whether this is the state of `t` as it is now, which has this key."""
        known = self.fingerprint
        return self.key == key and (known is None or known.matches(t.detach()))


class WeightCodes:
    """The cached codes of one layer's weight, which ops read (torch/layers/weight_codes.h)."""

    def __init__(self) -> None:
        self.native = torch.classes.minifloat.WeightCodes(COMPARES_BYTES)
        self.id = self.native.id()  # by which ops are told of the cache

    def __reduce__(self) -> tuple[object, ...]:
        return WeightCodes, ()  # a copied layer has no cached codes

    @property
    def cached(self) -> list[Tensor] | None:
        """The operands that are held, of both directions or of the rowwise one; None: none."""
        return self.native.held()

    def forget(self) -> None:
        """Drops the codes: the weight may have changed."""
        self.native.forget()

    def start_over(self) -> None:
        """Drops the codes and expects no reuse: training, evaluation or tracing has begun."""
        self.native.start_over()

    def notice_capture(self, x: Tensor) -> None:
        """Reuses nothing from now on where a CUDA graph captures a forward of x."""
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            self.native.capture()


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
        parts = dict(parent._modules.items())  # which is no dict in a module of torch.jit
        for names in SIBLINGS:
            groups: dict[tuple[Recipe, object], list[nn.Module]] = {}
            children = [parts[name] for name in names if name in parts]
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
