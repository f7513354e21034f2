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

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._native import ops
from .parts import code_bits, is_square
from .quantized import Quantized
from .tensor import QuantizedTensor

Fragments = Tensor | tuple[Tensor, ...] | None


# ---- wires ---------------------------------------------------------------------------------------


def _is_derived(weight: QuantizedTensor) -> bool:
    """Does the columnwise part hold the rowwise codes, transposed?"""
    row, col = weight.rowwise, weight.columnwise
    return row is not None and col is not None and row.spec == col.spec and is_square(row.spec)


def _cast_parts(weight: QuantizedTensor) -> list[Quantized]:
    """The parts that are cast from the master: those with a wire."""
    row, col = weight.rowwise, weight.columnwise
    parts = [] if row is None else [row]
    if col is not None and not _is_derived(weight):
        parts.append(col)
    return parts


def wires(weight: QuantizedTensor) -> tuple[Tensor, ...]:
    """What a gather fills: contiguous uint8 (rows, bytes a row) of each direction with a wire.

    A columnwise wire is memory of its own, made here once and kept with the weight.
    """
    return tuple(
        _columnwise_wire(weight) if part.columnwise else part.codes for part in _cast_parts(weight)
    )


def _columnwise_wire(weight: QuantizedTensor) -> Tensor:
    wire = getattr(weight, "columnwise_wire", None)
    if wire is None:
        part = weight.columnwise
        assert part is not None  # the caller has seen its part
        rows, cols = weight.shape
        shape = (rows, ops.spec_sizes(part.spec, rows, cols)[0])
        wire = torch.zeros(shape, dtype=torch.uint8, device=weight.device)
        weight.columnwise_wire = wire  # type: ignore[attr-defined]
    return wire


def attach_wires(weight: QuantizedTensor, memory: Sequence[Tensor]) -> None:
    """Moves the weight's wires into `memory`, such as views of one flat buffer; values are kept."""
    own = wires(weight)
    if len(memory) != len(own):
        raise ValueError(f"attach_wires: expected {len(own)} buffers, got {len(memory)}")
    for new, old in zip(memory, own):
        if new.shape != old.shape or new.dtype != torch.uint8 or not new.is_contiguous():
            raise ValueError(
                f"attach_wires: expected contiguous uint8 {tuple(old.shape)}, got {new.dtype} "
                f"{tuple(new.shape)}"
            )
    for part, new, old in zip(_cast_parts(weight), memory, own):
        new.copy_(old)
        if part.columnwise:
            weight.columnwise_wire = new  # type: ignore[attr-defined]
        else:
            weight.rowwise = replace(part, codes=new)


# ---- the cast ------------------------------------------------------------------------------------


def _group_name(group: Any) -> str:
    """The name that the native library knows a group by; "": one process alone."""
    if isinstance(group, str):
        return group
    if group is None:
        if not dist.is_initialized():
            return ""
        group = dist.group.WORLD
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


def _entry_codes(
    weight: QuantizedTensor, parts: list[Quantized], fragments: Fragments, is_empty: bool
) -> Sequence[Tensor]:
    """Where each part's codes go: the shard's fragments, where they are given."""
    if fragments is None and is_empty:
        fragments = tuple(weight.new_empty(0, dtype=torch.uint8) for _ in parts)
    if isinstance(fragments, Tensor):
        fragments = (fragments,)
    if fragments is None or len(fragments) != len(parts):
        got = "none" if fragments is None else len(fragments)
        raise ValueError(
            f"quantize_master_weights: expected {len(parts)} fragments for a shard of {weight!r}, "
            f"got {got}"
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
    masters, specs, scales, amaxes, labels = [], [], [], [], []
    geometry: list[int] = []
    codes: list[Tensor] = []
    nothing: Tensor | None = None
    for i, weight in enumerate(model_weights):
        master, start, shape = master_weights[i], start_offsets[i] or 0, weight.shape
        parts = _cast_parts(weight)
        if master is None:
            nothing = weight.new_empty(0, dtype=torch.float32) if nothing is None else nothing
            master, start = nothing, 0
        if fragments is None:
            codes += wires(weight)
        else:
            codes += _entry_codes(weight, parts, fragments[i], master.numel() == 0)
        rounds = weight.dtype == torch.bfloat16
        is_fragment = fragments is not None
        for part in parts:
            masters.append(master)
            specs.append(part.spec)
            geometry += (part.columnwise, *shape, rounds, start, is_fragment)
            scales.append(part.scale)
            amaxes.append(part.amax)
            labels.append(str(i) if names is None else names[i])
    ops.quantize_master_weights(
        masters, specs, geometry, codes, scales, amaxes, labels, _group_name(group)
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
            if spec is not None and not spec.startswith("nvfp4"):
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


def _needs_processing(weight: QuantizedTensor) -> bool:
    return weight.columnwise is not None


def _refuse_processing(weights: Sequence[QuantizedTensor]) -> None:
    for weight in weights:
        if _needs_processing(weight):
            raise ValueError(
                "quantize_master_weights: expected manual_post_all_gather_processing=True, got "
                f"False: the columnwise codes of {weight!r} are transposed from gathered bytes; "
                "call mf.post_all_gather_processing(model_weights) after the gather"
            )


def post_all_gather_processing(model_weights: Sequence[QuantizedTensor]) -> None:
    """Columnwise codes from gathered wires, scales included; once more changes nothing."""
    source: list[Tensor] = []
    target: list[Tensor] = []
    sizes: list[int] = []
    amaxes: tuple[list[Tensor], list[Tensor]] = ([], [])
    for weight in model_weights:
        row, col = weight.rowwise, weight.columnwise
        if col is None:
            continue
        derived = _is_derived(weight)
        source.append(row.codes if derived and row is not None else _columnwise_wire(weight))
        target.append(col.codes)
        sizes += (*weight.shape, code_bits(col.spec))
        if not derived or row is None:
            continue
        if row.scale.dim() == 2:
            source.append(row.scale)
            target.append(col.scale)
            sizes += (*row.scale.shape, 8 * row.scale.element_size())
        else:
            amaxes[0].append(col.scale)
            amaxes[1].append(row.scale)
        if row.amax.numel() > 0:
            amaxes[0].append(col.amax)
            amaxes[1].append(row.amax)
    if source:
        ops.transpose_many(source, target, sizes)
    if amaxes[0]:
        torch._foreach_copy_(*amaxes)
