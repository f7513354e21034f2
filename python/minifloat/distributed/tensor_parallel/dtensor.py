"""QuantizedColwiseParallel, and the sharding rules by which DTensor runs the pure ops.

    mf.quantize_(model, "nvfp4", data_parallel_rank=0)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

A layer whose weight is a DTensor computes on local tensors (linear.py). torch's styles work without
change; QuantizedColwiseParallel gathers its input's codes instead of its values.

Importing this module registers sharding rules of the pure ops: amax, hadamard, dequantize, and
quantize to nearest. An op runs on each rank's shard where that gives the bytes of the op on the
gathered tensor. Elsewhere DTensor gathers the tensor first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel

from ..._native import ops
from ...nn.linear import Linear
from ...private_torch import schema_info
from ...spec import Spec
from ...tensor.quantized_tensor import Op

if TYPE_CHECKING:
    from ...private_torch import DTensorSpec

Layouts = tuple[Placement, ...]
REPLICATED = Replicate()


class QuantizedColwiseParallel(ColwiseParallel):
    """A ColwiseParallel for mf.Linear that gathers the codes of an input that is cut by tokens.

    Where codes cannot be gathered (an input in bf16; a run of tokens that ends inside a block; a
    layer that mf.quantize_ left out), the input's values are gathered in its dtype, as
    ColwiseParallel does.

    Args:
        layouts: the keyword arguments of ColwiseParallel: input_layouts, the placement of the input
            (…, K), float32 or bfloat16; output_layouts, of the output (…, N); use_local_output.

    Raises:
        TypeError: a keyword is none of these.
    """

    def __init__(self, **layouts: Any) -> None:
        super().__init__(**layouts)
        self.desired_input_layouts = self.input_layouts  # type: ignore[assignment]

    @staticmethod
    def _prepare_input_fn(  # torch's name; the module is known here, before each forward
        input_layouts: Layouts,
        desired_input_layouts: Layouts,
        module: nn.Module,
        inputs: tuple[Any, ...],
        mesh: DeviceMesh,
    ) -> Tensor:
        """Places the input: for mf.Linear as it is, for any other layer gathered by its values."""
        wanted = desired_input_layouts if isinstance(module, Linear) else (REPLICATED,)
        return ColwiseParallel._prepare_input_fn(input_layouts, wanted, module, inputs, mesh)


# ---- sharding rules of the pure ops --------------------------------------------------------------
# A rule lists the placements of outputs and of inputs. x is (…, rows, cols); a columnwise operand,
# as read, is (…, cols, rows). DTensor chooses the rule of least cost.

ShardingRule = tuple[Sequence[Placement], Sequence[Placement | None]]
RulesOf = Callable[..., list[ShardingRule]]


def sharding_rule(op: Op) -> Callable[[RulesOf], RulesOf]:
    """Registers a rule whose result DTensor caches by all arguments that change it.

    By default DTensor's key holds integers alone, so two specs would share placements and shapes.
    An origin is left out: a list cannot be in a key, and a stochastic cast is never sharded.
    """

    def register(rule: RulesOf) -> RulesOf:
        register_sharding(op)(rule)
        arguments = op._schema.arguments
        first = next(i for i, a in enumerate(arguments) if not isinstance(a.type, torch.TensorType))
        named = [a.name for a in arguments if a.kwarg_only and a.name != "origin"]
        schemas = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
        schemas[op] = schema_info(first, named or None)
        return rule

    return register


def cuts_evenly(x: DTensorSpec, dim: int, multiple: int) -> bool:
    """Tells whether the ranks' equal shards along `dim` have a length that `multiple` divides."""
    return x.shape[dim] % (x.mesh.size() * multiple) == 0


def rules_of_rows(
    op: str,
    options: dict[str, object],
    outputs: Sequence[Placement],
    inputs: Sequence[Placement],
    others: int,
    is_sharded: bool = True,
) -> list[ShardingRule]:
    """Lists the rule for replicated tensors and, without groups, the one for shards of rows.

    outputs, inputs: placements in shards of rows; others: the number of arguments behind the
    inputs; is_sharded: whether an op on a shard has the bytes of the op on the unsharded
    tensor. The table of groups counts the rows of the unsharded matrix, so groups are never
    sharded.
    """
    named = {name: t.placements for name, t in options.items() if hasattr(t, "placements")}
    for name, placements in named.items():
        if any(at != REPLICATED for at in placements):
            raise ValueError(f"{op}: expected {name} as Replicate(), got {placements}")
    none, rest = [None] * others, [REPLICATED] * len(named)
    whole = [REPLICATED] * len(outputs), [*[REPLICATED] * len(inputs), *none, *rest]
    return [whole, (outputs, [*inputs, *none])] if is_sharded and not rest else [whole]


@sharding_rule(ops.amax.default)
def shard_amax(
    x: DTensorSpec, spec: str, columnwise: bool = False, **options: object
) -> list[ShardingRule]:
    """Lists rules of amax: shards of rows for amaxes of rows without groups, else replicated.

    The amax of a tensor is no Partial("max"), whose reduction may lose a NaN.
    """
    rows, has_rows = x.ndim - (1 if columnwise else 2), Spec.parse(spec).amax_of == "row"
    return rules_of_rows("amax", options, [Shard(x.ndim - 2)], [Shard(rows)], 2, has_rows)


@sharding_rule(ops.hadamard.default)
def shard_hadamard(
    x: DTensorSpec, points: int = 16, columnwise: bool = False, signs: int = 0, **options: object
) -> list[ShardingRule]:
    """Lists rules of hadamard: replicated, or shards of rows without groups."""
    rows = x.ndim - (1 if columnwise else 2)
    return rules_of_rows("hadamard", options, [Shard(x.ndim - 2)], [Shard(rows)], 3)


@sharding_rule(ops.dequantize.default)
def shard_dequantize(
    codes: DTensorSpec, scale: object, amax: object, spec: str, cols: int, **options: object
) -> list[ShardingRule]:
    """Lists rules of dequantize: replicated, or shards of rows in whole blocks without groups."""
    rows, parsed = codes.ndim - 2, Spec.parse(spec)
    of_rows = Shard(rows) if parsed.amax_of == "row" else REPLICATED
    each = Shard(rows) if parsed.has_blocks else of_rows
    is_even = cuts_evenly(codes, rows, ops.shard_multiple(spec, False, 0))
    inputs = [Shard(rows), each, of_rows]
    return rules_of_rows("dequantize", options, [Shard(rows)], inputs, 2, is_even)


def direction_placements(
    x: DTensorSpec, spec: str, columnwise: bool, has_amax: bool, dim: int | None
) -> list[Placement] | None:
    """Returns the placements of codes, scale and amax; None where a shard lacks the bytes.

    x is cut along `dim`, or replicated for None. Decoded values lie as codes do, an amax that is
    passed as the one that is returned.
    """
    if not spec or dim is None:
        return [REPLICATED] * 3
    parsed, to = Spec.parse(spec), Shard(2 * x.ndim - 3 - dim if columnwise else dim)  # as read
    has_rows = parsed.amax_of == "row" and to.dim != x.ndim - 1
    is_alone = parsed.amax_of == "" or has_amax or has_rows
    is_pure = is_alone and not parsed.is_stochastic and not parsed.is_delayed
    multiple = ops.shard_multiple(spec, columnwise, dim - x.ndim + 2)
    if not is_pure or not cuts_evenly(x, dim, multiple):
        return None
    of_rows: Placement = to if has_rows else REPLICATED
    return [to, to if parsed.has_blocks else of_rows, of_rows]


@sharding_rule(ops.quantize.default)
def shard_quantize(x: DTensorSpec, row: str, col: str, **options: object) -> list[ShardingRule]:
    """Lists rules of quantize: replicated, or shards under nearest rounding with every amax.

    Operands with groups, FP4 written as FP8, swizzled scales and amaxes of columns are replicated.
    DTensor redistributes no keyword arguments, so the placement of a passed amax selects the rule.
    """
    passed = {
        name: spec.placements for name, spec in options.items() if hasattr(spec, "placements")
    }
    rules: list[ShardingRule] = []
    whole_forms = ("fp8_row", "fp8_col", "swizzled_row", "swizzled_col", "amaxes_of_columns")
    is_whole = "rng" in passed or "groups" in passed or any(map(options.get, whole_forms))
    for dim in (None,) if is_whole else (None, x.ndim - 2, x.ndim - 1):
        by_row = direction_placements(x, row, False, "amax_row" in passed, dim)
        by_col = direction_placements(x, col, True, "amax_col" in passed, dim)
        if by_row is None or by_col is None:
            continue
        wanted = {"amax_row": by_row[2], "amax_col": by_col[2]}
        inputs = {name: wanted.get(name, REPLICATED) for name in passed}
        if any(at != inputs[name] for name, placements in passed.items() for at in placements):
            continue
        outputs: list[Placement] = []
        for name, placements in (("row", by_row), ("col", by_col)):
            decoded = placements[0] if options.get(f"decoded_{name}") else REPLICATED
            outputs += [*placements, decoded]
        x_placement = REPLICATED if dim is None else Shard(dim)
        rules.append((outputs, [x_placement, None, None, *inputs.values()]))
    if not rules:
        raise ValueError(
            "quantize: expected amaxes and rng as Replicate(), or the amax of rows placed as x's "
            f"rows, got {passed}"
        )
    return rules
