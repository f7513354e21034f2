"""Quantized weights whose high-precision masters are sharded over ranks, as ZeRO and FSDP do.

    mf.quantize_master_weights(weights, masters, start_offsets, group)    every rank, its shards
    ... gather the codes: mf.WireLayout does, or the caller's own gather of bytes
    mf.post_all_gather_processing(weights)

The bytes are those of QuantizedTensor.from_tensor on the whole master. A direction's codes travel
in the weight's own flat order: its **wire**. A rowwise wire is the codes themselves. A direction
that holds the other's codes, transposed, has no wire of its own; a columnwise one of its own has,
and is transposed from it once it is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._native import ops
from ...spec import Spec
from ...tensor.quantized import Quantized, require_memory, require_tensor
from ...tensor.quantized_tensor import QuantizedTensor

Fragments = Tensor | tuple[Tensor, ...] | None


# ---- wires ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WeightPlan:
    """What casts and transposes ask of a weight at every step; made once, for asking costs more."""

    rowwise: Quantized | None
    columnwise: Quantized | None
    parts: tuple[Quantized, ...]  # those that are cast from the master, each with a wire
    wires: tuple[Tensor, ...]
    specs: tuple[str, ...]
    numbers: tuple[tuple[int, int, int, int], ...]  # columnwise, rows, cols, rounds to bfloat16
    # After the gather: matrices, their transposes, and (rows, cols, bits) of each.
    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    sizes: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied weight has other memory, and makes its own."""


def plan_of(weight: QuantizedTensor) -> WeightPlan:
    if not isinstance(weight, QuantizedTensor):
        raise TypeError(f"expected a QuantizedTensor weight, got {type(weight).__name__}")
    plan = weight.__dict__.get("wire_plan")
    if (
        plan is None
        or plan.rowwise is not weight.rowwise
        or plan.columnwise is not weight.columnwise
    ):
        plan = _new_plan(weight, weight.__dict__.get("columnwise_wire"))
        weight.__dict__["wire_plan"] = plan
    return plan


def _new_plan(weight: QuantizedTensor, columnwise_wire: Tensor | None) -> WeightPlan:
    row, col = weight.rowwise, weight.columnwise
    rows, cols = weight.shape
    is_derived = False
    if row is not None and col is not None and row.spec == col.spec:
        is_derived = Spec.parse(row.spec).transposes_exactly
    parts = tuple(p for p in (row, None if is_derived else col) if p is not None)
    wires = []
    for part in parts:
        wire = part.codes
        if part.columnwise:
            shape = (rows, Spec.parse(part.spec).sizes(rows, cols).code_cols)
            wire = wire.new_zeros(shape) if columnwise_wire is None else columnwise_wire
            weight.__dict__["columnwise_wire"] = wire
        wires.append(wire)
    jobs = []
    if col is not None:
        jobs.append((wires[-1], col.codes, rows, cols, Spec.parse(col.spec).code_bits))
    if row is not None and col is not None and is_derived:
        for mine, other in ((row.scale, col.scale), (row.amax, col.amax)):
            if mine.numel() > 0:
                height, width = mine.shape if mine.dim() == 2 else (1, 1)
                jobs.append((mine, other, height, width, 8 * mine.element_size()))
    rounds = weight.dtype == torch.bfloat16
    return WeightPlan(
        row,
        col,
        parts,
        tuple(wires),
        tuple(p.spec for p in parts),
        tuple((p.columnwise, rows, cols, rounds) for p in parts),
        tuple(job[0] for job in jobs),
        tuple(job[1] for job in jobs),
        tuple(n for job in jobs for n in job[2:]),
    )


@dataclass(frozen=True, eq=False)
class KeptList:
    """What a list of weights was handed over as, and what it was made of."""

    made_of: tuple[Any, ...]
    native: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied weight has other memory, and makes its own."""


def _kept(
    name: str, weights: Sequence[QuantizedTensor], made_of: tuple[Any, ...], make: Callable[[], Any]
) -> Any:
    """The native list that the first weight keeps, as long as it is made of the same."""
    known = weights[0].__dict__.get(name)
    if known is None or known.made_of != made_of:
        known = weights[0].__dict__[name] = KeptList(made_of, make())
    return known.native


def wires(weight: QuantizedTensor) -> tuple[Tensor, ...]:
    """What a gather fills: contiguous uint8 (rows, bytes a row) of each direction with a wire.

    A columnwise wire is memory of its own, made here once and kept with the weight.
    """
    return plan_of(weight).wires


def attach_wires(weight: QuantizedTensor, memory: Sequence[Tensor]) -> None:
    """Moves the weight's wires into `memory`, such as views of one flat buffer; values are kept."""
    plan = plan_of(weight)
    if len(memory) != len(plan.wires):
        raise ValueError(f"attach_wires: expected {len(plan.wires)} buffers, got {len(memory)}")
    for new, old in zip(memory, plan.wires):
        require_tensor("attach_wires: memory", new)
        if new.shape != old.shape or new.dtype != torch.uint8 or not new.is_contiguous():
            raise ValueError(
                f"attach_wires: expected contiguous uint8 {tuple(old.shape)}, got {new.dtype} "
                f"{tuple(new.shape)}"
            )
        if new.device != old.device:
            raise ValueError(f"attach_wires: expected memory on {old.device}, got {new.device}")
        require_memory("attach_wires: memory", new)
    for part, new, old in zip(plan.parts, memory, plan.wires):
        new.copy_(old)
        if part.columnwise:
            weight.__dict__["columnwise_wire"] = new
        else:
            weight.rowwise = replace(part, codes=new)
    del weight.__dict__["wire_plan"]


# ---- the cast ------------------------------------------------------------------------------------


def _group_name(group: Any) -> str:
    """The name that the native library knows a group by; "": one process alone."""
    if isinstance(group, str):
        return group
    if group is None:
        if not dist.is_initialized():
            return ""
        group = dist.group.WORLD
    if not hasattr(group, "group_name"):
        raise TypeError(
            f"group: expected a process group, its name or None, got {type(group).__name__}"
        )
    return group.group_name


def _require_lists(
    weights: Sequence[Any], masters: Sequence[Any], starts: Sequence[Any], fragments: Any
) -> None:
    lengths = [len(masters), len(starts)] + ([] if fragments is None else [len(fragments)])
    if any(length != len(weights) for length in lengths):
        raise ValueError(
            f"quantize_master_weights: expected a master, a start offset (and a fragment) for each "
            f"of {len(weights)} weights, got {', '.join(map(str, lengths))}"
        )
    for weight in weights:
        if not isinstance(weight, QuantizedTensor):
            raise TypeError(
                "quantize_master_weights: expected QuantizedTensor weights, got "
                f"{type(weight).__name__}"
            )


def _fragments(plan: WeightPlan, given: Fragments, is_empty: bool) -> Sequence[Tensor]:
    """Where each part's codes go, of a shard that has fragments."""
    if given is None and is_empty:
        given = tuple(part.codes.new_empty(0) for part in plan.parts)
    if isinstance(given, Tensor):
        given = (given,)
    if given is None or len(given) != len(plan.parts):
        raise ValueError(
            f"quantize_master_weights: expected {len(plan.parts)} fragments for a shard in "
            f"{', '.join(plan.specs)}, got {'none' if given is None else len(given)}"
        )
    return given


def quantize_master_weights(
    model_weights: Sequence[QuantizedTensor],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[Fragments] | None = None,
    manual_post_all_gather_processing: bool = True,
    *,
    names: Sequence[str] | None = None,
) -> None:
    """Codes of the shards, and scales of the whole weights, from masters that ranks hold parts of.

    model_weights   the same list on every rank
    master_weights  flat float32 or bfloat16 shards; None or empty: nothing of it is held here
    start_offsets   of a shard's first element in the flattened weight; any cut does
    group           the ranks that hold the shards: one all-reduce of amaxes, for all weights
    fsdp_shard_model_weights    where codes go that have no place in the model weight: for each, the
                    bytes of its shard of each wire (WireLayout.fragments). A byte that a cut on an
                    odd element divides has the other shard's nibble zero. None: into the weight
    manual_post_all_gather_processing    False: refused where a direction is made after the gather
    names           of the weights, for errors

    Masters are rounded to a weight's dtype first. Under +delayed the part's amax is the one in
    force, and afterwards the values' own, for the history.
    """
    fragments = fsdp_shard_model_weights
    _require_lists(model_weights, master_weights, start_offsets, fragments)
    if not manual_post_all_gather_processing:
        _refuse_processing(model_weights)
    if not model_weights:
        ops.quantize_master_weights([], [], [], [], [], [], [], _group_name(group))
        return
    plans = [plan_of(weight) for weight in model_weights]
    masters: list[Tensor] = []
    starts: list[int] = []
    for plan, master, start in zip(plans, master_weights, start_offsets):
        if master is None:
            master, start = plan.wires[0].new_empty(0, dtype=torch.float32), 0
        masters.append(master)
        starts.append(start or 0)
    codes: list[Tensor] = []
    if fragments is not None:
        for plan, given, master in zip(plans, fragments, masters):
            codes += _fragments(plan, given, master.numel() == 0)
    labels = None if names is None else list(names)
    casts = _kept(
        "kept_casts", model_weights, (plans, labels), lambda: _native_casts(plans, labels)
    )
    casts.quantize(masters, starts, codes, _group_name(group))


def _native_casts(plans: list[WeightPlan], names: list[str] | None) -> Any:
    """Their directions in one list: spec, numbers, weight, name and memory of each."""
    entries = [(i, plan, k) for i, plan in enumerate(plans) for k in range(len(plan.parts))]
    return torch.classes.minifloat.KeptCasts(
        [plan.specs[k] for _, plan, k in entries],
        [int(number) for _, plan, k in entries for number in plan.numbers[k]],
        [i for i, _, _ in entries],
        [str(i) if names is None else names[i] for i, _, _ in entries],
        [plan.wires[k] for _, plan, k in entries],
        [plan.parts[k].scale for _, plan, k in entries],
        [plan.parts[k].amax for _, plan, k in entries],
    )


def cast_master_weights_to_nvfp4(
    model_weights: Sequence[QuantizedTensor],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: Any,
    fsdp_shard_model_weights: Sequence[Fragments] | None = None,
    manual_post_all_gather_processing: bool = True,
    *,
    names: Sequence[str] | None = None,
) -> None:
    """quantize_master_weights, for weights that are NVFP4 in every direction they hold."""
    for i, weight in enumerate(model_weights):
        for spec in weight.specs if isinstance(weight, QuantizedTensor) else ():
            if spec is not None and Spec.parse(spec).rule != "nvfp4":
                raise ValueError(
                    f"cast_master_weights_to_nvfp4: expected nvfp4 in every direction, got {spec} "
                    f"in weight {i if names is None else names[i]}"
                )
    quantize_master_weights(
        model_weights,
        master_weights,
        start_offsets,
        group,
        fsdp_shard_model_weights,
        manual_post_all_gather_processing,
        names=names,
    )


# ---- after the gather ----------------------------------------------------------------------------


def _refuse_processing(weights: Sequence[QuantizedTensor]) -> None:
    for weight in weights:
        if plan_of(weight).sources:
            raise ValueError(
                "quantize_master_weights: expected manual_post_all_gather_processing=True, got "
                f"False: the columnwise codes of {weight!r} are transposed from gathered bytes; "
                "call mf.post_all_gather_processing(model_weights) after the gather"
            )


def post_all_gather_processing(model_weights: Sequence[QuantizedTensor]) -> None:
    """Columnwise codes from gathered wires, scales included; once more changes nothing."""
    if not model_weights:
        return
    plans = [plan_of(weight) for weight in model_weights]
    _kept("kept_transposes", model_weights, (plans,), lambda: _native_transposes(plans)).run()


def _native_transposes(plans: list[WeightPlan]) -> Any:
    return torch.classes.minifloat.KeptTransposes(
        [t for plan in plans for t in plan.sources],
        [t for plan in plans for t in plan.targets],
        [n for plan in plans for n in plan.sizes],
    )
