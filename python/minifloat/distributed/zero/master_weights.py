"""Quantized weights whose high-precision masters are sharded over ranks, as ZeRO and FSDP do.

    mf.quantize_master_weights(weights, masters, start_offsets, group)    every rank, its shards
    ... gather the codes: mf.WireLayout does, or the caller's own gather of bytes
    mf.post_all_gather_processing(weights)

The bytes are those of QuantizedTensor.from_tensor on the whole master. A direction's codes are
gathered in the weight's own flat order, as its **flat codes** (public name: wires). A rowwise
direction's flat codes are its codes. A columnwise direction that holds the rowwise codes,
transposed, has no flat codes; any other columnwise direction is transposed from its flat codes
after the gather.
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


# ---- flat codes ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class WeightPlan:
    """The tensors and native casts of one weight, made once for all steps."""

    rowwise: Quantized | None
    columnwise: Quantized | None
    parts: tuple[Quantized, ...]  # those that are cast from the master, each with flat codes
    flat_codes: tuple[Tensor, ...]
    specs: tuple[str, ...]
    casts: tuple[Any, ...]  # torch.classes.minifloat.ShardCast of each part
    # After the gather: matrices, their transposes, and (rows, cols, bits) of each.
    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    sizes: tuple[int, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied weight has other memory, and makes its own."""


def plan_of(weight: QuantizedTensor) -> WeightPlan:
    if not isinstance(weight, QuantizedTensor):
        raise TypeError(f"expected a QuantizedTensor weight, got {type(weight).__name__}")
    plan = weight.__dict__.get("master_plan")
    if (
        plan is None
        or plan.rowwise is not weight.rowwise
        or plan.columnwise is not weight.columnwise
    ):
        plan = _new_plan(weight, weight.__dict__.get("columnwise_flat_codes"))
        weight.__dict__["master_plan"] = plan
    return plan


def _new_plan(weight: QuantizedTensor, columnwise_codes: Tensor | None) -> WeightPlan:
    row, col = weight.rowwise, weight.columnwise
    rows, cols = weight.shape
    is_derived = False
    if row is not None and col is not None and row.spec == col.spec:
        is_derived = Spec.parse(row.spec).transposes_exactly
    parts = tuple(p for p in (row, None if is_derived else col) if p is not None)
    flat_codes = []
    for part in parts:
        codes = part.codes
        if part.columnwise:
            shape = (rows, Spec.parse(part.spec).sizes(rows, cols).code_cols)
            codes = codes.new_zeros(shape) if columnwise_codes is None else columnwise_codes
            weight.__dict__["columnwise_flat_codes"] = codes
        flat_codes.append(codes)
    jobs = []
    if col is not None:
        jobs.append((flat_codes[-1], col.codes, rows, cols, Spec.parse(col.spec).code_bits))
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
        tuple(flat_codes),
        tuple(p.spec for p in parts),
        tuple(
            torch.classes.minifloat.ShardCast(p.spec, p.columnwise, rows, cols, rounds)
            for p in parts
        ),
        tuple(job[0] for job in jobs),
        tuple(job[1] for job in jobs),
        tuple(n for job in jobs for n in job[2:]),
    )


@dataclass(frozen=True, eq=False)
class CachedList:
    """The native list of some weights, and the plans and names that it was made of."""

    made_of: tuple[Any, ...]
    native: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied weight has other memory, and makes its own."""


def _cached(
    name: str, weights: Sequence[QuantizedTensor], made_of: tuple[Any, ...], make: Callable[[], Any]
) -> Any:
    """Returns the native list cached on the first weight; makes it anew where plans changed."""
    cached = weights[0].__dict__.get(name)
    if cached is None or cached.made_of != made_of:
        cached = weights[0].__dict__[name] = CachedList(made_of, make())
    return cached.native


def wires(weight: QuantizedTensor) -> tuple[Tensor, ...]:
    """Returns the flat codes that a gather fills, one tensor for each direction that has them.

    Args:
        weight: a QuantizedTensor (rows, cols).

    Returns:
        Contiguous uint8 (rows, bytes a row) of each such direction. Columnwise flat codes are
        separate memory, allocated at the first call and stored with the weight.

    Raises:
        TypeError: where the weight is no QuantizedTensor.
    """
    return plan_of(weight).flat_codes


def attach_wires(weight: QuantizedTensor, memory: Sequence[Tensor]) -> None:
    """Moves the weight's flat codes, with their values, into `memory`.

    Args:
        weight: a QuantizedTensor.
        memory: contiguous uint8 tensors of the shapes of mf.wires(weight), on the same device, such
            as views of one flat buffer.

    Raises:
        TypeError, ValueError: where the weight or the memory does not fit.
    """
    plan = plan_of(weight)
    if len(memory) != len(plan.flat_codes):
        raise ValueError(
            f"attach_wires: expected {len(plan.flat_codes)} buffers, got {len(memory)}"
        )
    for new, old in zip(memory, plan.flat_codes):
        require_tensor("attach_wires: memory", new)
        if new.shape != old.shape or new.dtype != torch.uint8 or not new.is_contiguous():
            raise ValueError(
                f"attach_wires: expected contiguous uint8 {tuple(old.shape)}, got {new.dtype} "
                f"{tuple(new.shape)}"
            )
        if new.device != old.device:
            raise ValueError(f"attach_wires: expected memory on {old.device}, got {new.device}")
        require_memory("attach_wires: memory", new)
    for part, new, old in zip(plan.parts, memory, plan.flat_codes):
        new.copy_(old)
        if part.columnwise:
            weight.__dict__["columnwise_flat_codes"] = new
        else:
            weight.rowwise = replace(part, codes=new)
    del weight.__dict__["master_plan"]


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


def _fragments(plan: WeightPlan, fragments: Fragments, is_empty: bool) -> Sequence[Tensor]:
    """Returns the memory of each part's codes; empty memory for an empty shard without any."""
    if fragments is None and is_empty:
        fragments = tuple(part.codes.new_empty(0) for part in plan.parts)
    if isinstance(fragments, Tensor):
        fragments = (fragments,)
    if fragments is None or len(fragments) != len(plan.parts):
        raise ValueError(
            f"quantize_master_weights: expected {len(plan.parts)} fragments for a shard in "
            f"{', '.join(plan.specs)}, got {'none' if fragments is None else len(fragments)}"
        )
    return fragments


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
    """Casts shards of masters to codes, and writes the scales of the whole weights.

    Masters are rounded to a weight's dtype first. Under +delayed a direction's amax is the active
    one before the call, and the current values' amax, for the history, after it.

    Args:
        model_weights: the same list of QuantizedTensors on every rank.
        master_weights: flat float32 or bfloat16 shards; None or empty: this rank has no shard.
        start_offsets: a shard's first element in the flattened weight; any cut is allowed.
        group: the ranks that hold the shards: one all-reduce of amaxes, for all weights.
        fsdp_shard_model_weights: for each weight uint8 memory of its shard's bytes in each
            direction's flat codes (WireLayout.fragments). A byte that a cut on an odd element
            divides has zero in the nibble of the neighbouring shard. None: codes are written into
            the weights.
        manual_post_all_gather_processing: False is refused where a direction is made after the
            gather.
        names: of the weights, for errors.

    Raises:
        ValueError, TypeError: before anything is written, where arguments do not fit or ranks
            differ.
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
            master, start = plan.flat_codes[0].new_empty(0, dtype=torch.float32), 0
        masters.append(master)
        starts.append(start or 0)
    codes: list[Tensor] = []
    if fragments is not None:
        for plan, of_weight, master in zip(plans, fragments, masters):
            codes += _fragments(plan, of_weight, master.numel() == 0)
    labels = None if names is None else list(names)
    agreement = _agreement(model_weights[0])
    casts = _cached(
        "master_casts",
        model_weights,
        (plans, labels),
        lambda: _native_casts(plans, labels, agreement),
    )
    casts.quantize(masters, starts, codes, _group_name(group))


@dataclass(frozen=True, eq=False)
class AgreedLists:
    """The lists that begin with one weight and that ranks have agreed on."""

    native: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> AgreedLists:
        return AgreedLists(torch.classes.minifloat.Agreement())


def _agreement(weight: QuantizedTensor) -> Any:
    """Returns the native record of what ranks agreed on; it outlives the weight's plans."""
    agreed = weight.__dict__.get("agreed_lists")
    if agreed is None:
        agreed = AgreedLists(torch.classes.minifloat.Agreement())
        weight.__dict__["agreed_lists"] = agreed
    return agreed.native


def _native_casts(plans: list[WeightPlan], names: list[str] | None, agreement: Any) -> Any:
    """Lists the directions of all weights: cast, weight, name and memory of each."""
    entries = [(i, plan, k) for i, plan in enumerate(plans) for k in range(len(plan.parts))]
    return torch.classes.minifloat.MasterCasts(
        [plan.casts[k] for _, plan, k in entries],
        [i for i, _, _ in entries],
        [str(i) if names is None else names[i] for i, _, _ in entries],
        [plan.flat_codes[k] for _, plan, k in entries],
        [plan.parts[k].scale for _, plan, k in entries],
        [plan.parts[k].amax for _, plan, k in entries],
        agreement,
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
    """Makes columnwise codes and scales from gathered flat codes; a second call changes nothing.

    Args:
        model_weights: QuantizedTensors whose flat codes (mf.wires) are whole.

    Raises:
        TypeError: where one is no QuantizedTensor.
    """
    if not model_weights:
        return
    plans = [plan_of(weight) for weight in model_weights]
    _cached("transposes", model_weights, (plans,), lambda: _native_transposes(plans)).run()


def _native_transposes(plans: list[WeightPlan]) -> Any:
    return torch.classes.minifloat.MatrixTransposes(
        [t for plan in plans for t in plan.sources],
        [t for plan in plans for t in plan.targets],
        [n for plan in plans for n in plan.sizes],
    )
