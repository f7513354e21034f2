"""WeightPlan: the tensors and native casts of one weight whose master is sharded.

A weight of experts (E, N, K) is cast as E matrices. Its flat codes and shards are those of all its
rows in order, so a shard may begin and end within any expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...spec import Spec
from ...tensor.quantized import Quantized
from ...tensor.quantized_tensor import QuantizedTensor

Transpose = tuple[Tensor, Tensor, int, int, int]  # matrix, its transpose, rows, cols, bits


@dataclass(frozen=True, eq=False)
class WeightPlan:
    """The tensors and native casts of one weight, made once for all steps."""

    rowwise: Quantized | None
    columnwise: Quantized | None
    parts: tuple[Quantized, ...]  # directions cast from the master, each with flat codes
    flat_codes: tuple[Tensor, ...]
    specs: tuple[str, ...]
    casts: tuple[object, ...]  # torch.classes.minifloat.ShardCast of each part, of one matrix
    matrices: int  # E; 1 of a weight (rows, cols)
    rows: int  # of a matrix
    cols: int
    # After the gather: matrices, their transposes, and (rows, cols, bits) of each.
    sources: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]
    sizes: tuple[int, ...]

    def __deepcopy__(self, memo: object) -> None:
        """Returns None: a copied weight has other memory, and gets a new plan."""


def plan_of(weight: QuantizedTensor) -> WeightPlan:
    """Returns the weight's cached plan; a new one where its directions were replaced."""
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
    *experts, rows, cols = weight.shape
    is_derived = False
    if row is not None and col is not None and row.spec == col.spec:
        is_derived = Spec.parse(row.spec).transposes_exactly
    parts = tuple(p for p in (row, None if is_derived else col) if p is not None)
    flat_codes = []
    for part in parts:
        codes = part.codes
        if part.columnwise:
            shape = (*experts, rows, Spec.parse(part.spec).sizes(rows, cols).code_cols)
            codes = codes.new_zeros(shape) if columnwise_codes is None else columnwise_codes
            weight.__dict__["columnwise_flat_codes"] = codes
        flat_codes.append(codes)
    jobs: list[Transpose] = []
    if col is not None:
        bits = Spec.parse(col.spec).code_bits
        jobs += transposes(bool(experts), flat_codes[-1], col.codes, (rows, cols, bits))
    if row is not None and col is not None and is_derived:
        for source, target in ((row.scale, col.scale), (row.amax, col.amax)):
            is_grid = source.dim() == 2 + len(experts)
            height, width = source.shape[-2:] if is_grid else (1, source.numel())
            sizes = height, width, 8 * source.element_size()
            if source.numel() > 0:
                jobs += transposes(bool(experts) and is_grid, source, target, sizes)
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
        experts[0] if experts else 1,
        rows,
        cols,
        tuple(job[0] for job in jobs),
        tuple(job[1] for job in jobs),
        tuple(n for job in jobs for n in job[2:]),
    )


def transposes(
    is_batch: bool, source: Tensor, target: Tensor, sizes: tuple[int, int, int]
) -> list[Transpose]:
    """Lists (matrix, transpose, rows, cols, bits): one, or one for each expert."""
    if not is_batch:
        return [(source, target, *sizes)]
    return [(a, b, *sizes) for a, b in zip(source.unbind(), target.unbind())]


# ---- shards of experts ---------------------------------------------------------------------------


def shards_of_matrices(plan: WeightPlan, master: Tensor, start: int) -> list[tuple[Tensor, int]]:
    """Cuts a flat shard of a master at the ends of matrices.

    Args:
        plan: of the weight.
        master: (elements), the shard.
        start: its first flat element in the weight.

    Returns:
        For each matrix this rank's elements, and the first one's flat number within the matrix.

    Raises:
        ValueError: the shard is not contiguous, or reaches over the weight's end.
    """
    if plan.matrices == 1:
        return [(master, start)]
    size, held = plan.rows * plan.cols, master.numel()
    if held > 0 and not 0 <= start <= plan.matrices * size - held:
        raise ValueError(
            "quantize_master_weights: expected a shard within the "
            f"{plan.matrices * size} elements of the weight, got {held} from {start} on"
        )
    if not master.is_contiguous():
        raise ValueError(
            "quantize_master_weights: expected flat, contiguous shards of masters, got strides "
            f"{master.stride()}"
        )
    flat = master.view(-1)
    found = [(flat[:0], 0)] * plan.matrices
    for e, begin, end in spans(plan, start, held):
        first = e * size + begin - start
        found[e] = flat[first : first + end - begin], begin
    return found


def spans(plan: WeightPlan, start: int, held: int) -> Iterator[tuple[int, int, int]]:
    """Yields (matrix, begin, end) of each matrix that a shard of `held` elements has part of."""
    size, end = plan.rows * plan.cols, start + held
    if held == 0:
        return
    for e in range(start // size, (end - 1) // size + 1):
        yield e, max(start - e * size, 0), min(end - e * size, size)


def fragments_of_matrices(
    plan: WeightPlan, spec: str, fragment: Tensor, start: int, held: int
) -> list[Tensor]:
    """Cuts a fragment of flat codes at the ends of matrices; the native cast checks its parts."""
    if plan.matrices == 1:
        return [fragment]
    found, at = [fragment[:0]] * plan.matrices, 0
    for e, begin, end in spans(plan, start, held):
        count = bytes_to(plan, spec, end, is_end=True) - bytes_to(plan, spec, begin, is_end=False)
        found[e] = fragment[at : at + count]
        at += count
    if at != fragment.numel():
        raise ValueError(
            f"quantize_master_weights: expected {at} contiguous bytes for the fragment of {spec} "
            f"elements [{start}, {start + held}) of {plan.matrices} x {plan.rows} x {plan.cols}, "
            f"got {fragment.numel()}"
        )
    return found


def bytes_to(plan: WeightPlan, spec: str, element: int, is_end: bool) -> int:
    """Returns the bytes of a matrix's codes before an element; with its own byte for an end."""
    parsed = Spec.parse(spec)
    row, col = divmod(element, plan.cols)
    bits = col * parsed.code_bits
    return row * parsed.sizes(plan.rows, plan.cols).code_cols + (
        -(-bits // 8) if is_end else bits // 8
    )
