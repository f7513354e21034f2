"""DTensor: linear layers under tensor and sequence parallelism, and the pure ops' sharding rules.

    mf.quantize_(model, "nvfp4", data_parallel_rank=0)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

A layer whose weight is a DTensor computes on local tensors (linear.py). torch's styles work as they
are; QuantizedColwiseParallel gathers its input's codes instead of its values.

The pure ops (amax, hadamard, dequantize; quantize to nearest) have sharding rules from the import
of this module on: a shard is worked on where it lies if it gives the whole's bytes, else DTensor
gathers first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel

from ..._native import ops
from ...spec import Spec
from .linear import linear, module_linear

__all__ = ["QuantizedColwiseParallel", "linear", "module_linear"]


class QuantizedColwiseParallel(ColwiseParallel):
    """ColwiseParallel for mf.Linear: where the input is cut by tokens, its codes are gathered.

    Formats whose codes cannot be gathered (an input in bf16; tokens that end inside a block) do as
    ColwiseParallel does.
    """

    def __init__(self, **layouts: Any) -> None:
        super().__init__(**layouts)
        self.desired_input_layouts = self.input_layouts  # type: ignore[assignment]


# ---- sharding rules of the pure ops --------------------------------------------------------------
# A rule lists (outputs, inputs) placements. x (…, rows, cols); the operand as read swaps them where
# columnwise. DTensor takes the rule that costs it least.

Rule = tuple[list[Any], list[Any]]
REPLICATED = Replicate()
RANDOM_UNIT = 16  # elements that share their random words


@lru_cache(maxsize=1024)
def shard_unit(spec: str, columnwise: bool, dim: int) -> int:
    """What a shard's length along a matrix's own dimension must be a multiple of."""
    if spec == "bf16":
        return 1
    along = dim != columnwise  # the contraction dimension is the last one as read
    parsed = Spec.parse(spec)
    random = RANDOM_UNIT if along and parsed.is_stochastic else 1
    return max(parsed.alignment[int(along)], random)


def sharding_rule(op: Any) -> Callable[[Callable[..., list[Rule]]], Any]:
    """register_sharding, of whose rules DTensor caches what they gave.

    It would key that by integers alone, and give one spec's placements and shapes to another. An
    origin, a list, cannot be in a key, nor need it be: it says where random bits are, and those
    are of the whole.
    """

    def register(rule: Callable[..., list[Rule]]) -> Any:
        register_sharding(op)(rule)
        arguments = op._schema.arguments
        first = next(i for i, a in enumerate(arguments) if not isinstance(a.type, torch.TensorType))
        named = [a.name for a in arguments if a.kwarg_only and a.name != "origin"]
        known = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
        known[op] = RuntimeSchemaInfo(first, named or None, needs_pytree=True)
        return rule

    return register


def read_dim(ndim: int, dim: int, columnwise: bool) -> int:
    """Where x's dimension `dim`, one of its last two, is in the operand as read."""
    return 2 * ndim - 3 - dim if columnwise else dim


def cuts_evenly(x: Any, dim: int, unit: int) -> bool:
    return x.shape[dim] % (x.mesh.size() * unit) == 0


@sharding_rule(ops.amax.default)
def shard_amax(x: Any, spec: str, columnwise: bool = False) -> list[Rule]:
    """Of rows, where the rows lie. That of a tensor is no Partial("max"): a NaN might get lost."""
    rules: list[Rule] = [([REPLICATED], [REPLICATED, None, None])]
    rows = x.ndim - (1 if columnwise else 2)
    if Spec.parse(spec).amax_of == "row":
        rules.append(([Shard(x.ndim - 2)], [Shard(rows), None, None]))
    return rules


@sharding_rule(ops.hadamard.default)
def shard_hadamard(
    x: Any, points: int = 16, columnwise: bool = False, signs: int = 0
) -> list[Rule]:
    rows = x.ndim - (1 if columnwise else 2)
    none = [None] * 3
    return [
        ([REPLICATED], [REPLICATED, *none]),
        ([Shard(x.ndim - 2)], [Shard(rows), *none]),
    ]


@sharding_rule(ops.dequantize.default)
def shard_dequantize(
    codes: Any, scale: Any, amax: Any, spec: str, cols: int, **options: Any
) -> list[Rule]:
    rows = codes.ndim - 2
    rules: list[Rule] = [([REPLICATED], [REPLICATED] * 3 + [None] * 2)]
    if cuts_evenly(codes, rows, shard_unit(spec, False, 0)):
        of_rows = Shard(rows) if Spec.parse(spec).amax_of == "row" else REPLICATED
        each = Shard(rows) if Spec.parse(spec).has_blocks else of_rows
        rules.append(([Shard(rows)], [Shard(rows), each, of_rows, None, None]))
    return rules


def direction_placements(
    x: Any, spec: str, columnwise: bool, has_amax: bool, dim: int | None
) -> tuple[list[Placement], Placement] | None:
    """Of codes, scale, amax, decoded and of the given amax, for x cut along `dim`; None: not so."""
    replicated: list[Placement] = [REPLICATED] * 4
    if not spec or dim is None:
        return replicated, REPLICATED
    kind, to = Spec.parse(spec).amax_of, Shard(read_dim(x.ndim, dim, columnwise))
    along = to.dim == x.ndim - 1
    is_alone = kind == "" or has_amax or (kind == "row" and not along)
    is_pure = is_alone and not Spec.parse(spec).is_stochastic and not Spec.parse(spec).is_delayed
    if not is_pure or not cuts_evenly(x, dim, shard_unit(spec, columnwise, dim - x.ndim + 2)):
        return None
    of_rows: Placement = to if kind == "row" and not along else REPLICATED
    return [to, to if Spec.parse(spec).has_blocks else of_rows, of_rows, to], of_rows


@sharding_rule(ops.quantize.default)
def shard_quantize(x: Any, row: str, col: str, **options: Any) -> list[Rule]:
    """To nearest, with the amax given where a shard cannot know it. Whatever else: whole.

    DTensor moves no keyword arguments, so an amax decides by where it lies.
    """
    given = {name: spec.placements for name, spec in options.items() if hasattr(spec, "placements")}
    rules: list[Rule] = []
    for dim in (None,) if "rng" in given else (None, x.ndim - 2, x.ndim - 1):
        by_row = direction_placements(x, row, False, "amax_row" in given, dim)
        by_col = direction_placements(x, col, True, "amax_col" in given, dim)
        if by_row is None or by_col is None:
            continue
        wanted = {"amax_row": by_row[1], "amax_col": by_col[1]}
        inputs = {name: wanted.get(name, REPLICATED) for name in given}
        if any(at != inputs[name] for name, placements in given.items() for at in placements):
            continue
        outputs: list[Any] = []
        for name, (placements, _) in (("row", by_row), ("col", by_col)):
            decoded = placements[3] if options.get(f"decoded_{name}") else REPLICATED
            outputs += [*placements[:3], decoded]
        x_placement = REPLICATED if dim is None else Shard(dim)
        rules.append((outputs, [x_placement, None, None, *inputs.values()]))
    if not rules:
        raise ValueError(
            "quantize: expected given tensors as Replicate(), or the amax of rows as x's rows lie, "
            f"got {given}"
        )
    return rules
