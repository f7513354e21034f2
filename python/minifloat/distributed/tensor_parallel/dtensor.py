"""DTensor: linear layers under tensor and sequence parallelism, and the pure ops' sharding rules.

    mf.quantize_(model, "nvfp4", data_parallel_rank=0)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

A layer whose weight is a DTensor comes here, and computes on local tensors (linear.py):
DTensor itself would hand every shard the same origin, and reduce no amax. torch's styles work as
they are; QuantizedColwiseParallel gathers its input's codes instead of its values.

The pure ops (amax, hadamard, dequantize; quantize to nearest) have sharding rules from the import
of this module on: a shard is worked on where it lies if it gives the whole's bytes, else DTensor
gathers first.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ColwiseParallel

from ..._native import ops
from ...nn.operand_cache import (
    SharedInput,
    WeightCodes,
    conditions_of,
    fingerprint_of,
    has_fingerprint,
)
from ...nn.random_state import RngState
from ...recipe import Recipe
from ...spec import Spec
from .linear import Reuse, Share, sharded_linear
from .operands import ShardedLayer, Tokens, require_fit, shard_unit, tokens_fit

if TYPE_CHECKING:
    from ...nn.linear import Linear


class QuantizedColwiseParallel(ColwiseParallel):
    """ColwiseParallel for mf.Linear: where the input is cut by tokens, its codes are gathered.

    Formats that cannot travel so (an input in bf16; tokens that end inside a block) do as
    ColwiseParallel does.
    """

    def __init__(self, **layouts: Any) -> None:
        super().__init__(**layouts)
        self.desired_input_layouts = self.input_layouts  # type: ignore[assignment]


# ---- linear --------------------------------------------------------------------------------------


def linear(
    x: Tensor,
    weight: DTensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    rng: Tensor | None = None,
    amax_history: Tensor | None = None,
    stream: int = 0,
    shared_input: SharedInput | None = None,
    weight_codes: WeightCodes | None = None,
    is_in_step: bool = False,
) -> Tensor:
    """mf.linear of a weight cut along N or K over one mesh dimension; y cut along N, or Partial."""
    mesh, dim = weight.device_mesh, cut_of(weight)
    x = require_inputs(x, weight, recipe, rng, amax_history)
    if dim is None:
        return whole_linear(x, weight, bias, recipe, rng, amax_history, stream)
    grad = torch.is_grad_enabled()
    layer = ShardedLayer(
        recipe,
        mesh.get_group(),
        dim,
        rng=rng,
        history=amax_history,
        stream=stream,
        needs_dx=grad and x.requires_grad,
        needs_dw=grad and weight.requires_grad,
    )
    require_even(weight, dim)
    require_fit(layer, local(weight))
    share = None if shared_input is None else sharing(shared_input, x, recipe, weight)
    reuse = None if weight_codes is None else reusing(weight_codes, weight, x, layer, is_in_step)
    x, tokens = placed(x, recipe, dim)
    layer = replace(layer, tokens=tokens)
    is_whole = dim == 0 and tokens is None
    values = local(x, Partial()) if is_whole else local(x)
    y = sharded_linear(
        values, local(weight), None if bias is None else local(bias), layer, share, reuse
    )
    y = y.view(*x.shape[:-1], y.shape[-1])
    placement = Shard(y.dim() - 1) if dim == 0 else Partial()
    return DTensor.from_local(y, mesh, [placement], run_check=False)


def require_inputs(
    x: Tensor, weight: DTensor, recipe: Recipe, rng: Tensor | None, amax_history: Tensor | None
) -> DTensor:
    mesh = weight.device_mesh
    if not isinstance(x, DTensor) or x.device_mesh != mesh:
        got = f"one over {x.device_mesh}" if isinstance(x, DTensor) else type(x).__name__
        raise ValueError(f"linear: expected x as a DTensor over the weight's {mesh}, got {got}")
    if weight.dim() != 2 or x.dim() == 0 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"linear: expected weight (N, K) for x (…, K), got {tuple(weight.shape)} for "
            f"{tuple(x.shape)}"
        )
    for name, given, is_needed in (
        ("rng", rng, recipe.is_stochastic),
        ("amax_history", amax_history, recipe.is_delayed),
    ):
        if is_needed and given is None:
            raise ValueError(f"linear: recipe {recipe} needs {name}, got None")
    return x


def sharing(shared: SharedInput, x: DTensor, recipe: Recipe, weight: DTensor) -> Share:
    """x, quantized by the first of its readers whose weights lie and learn alike."""
    learns = torch.is_grad_enabled() and weight.requires_grad
    conditions = (*conditions_of(x), weight.placements)
    return lambda make: shared.operands(
        x, recipe.text, learns, conditions, lambda: make(shared.readers)
    )


def reusing(
    codes: WeightCodes, weight: DTensor, x: DTensor, layer: ShardedLayer, is_in_step: bool
) -> Reuse:
    """The shard's codes, while no rank's shard has changed."""
    conditions, recipe, history = conditions_of(x), layer.recipe.text, layer.history
    is_shown = has_fingerprint(weight._local_tensor)
    if is_shown:  # of all shards: ranks whose casts wait for each other must decide alike
        own = torch.tensor(fingerprint_of(weight._local_tensor).value())
        dist.all_reduce(own, group=layer.group)
        conditions = (*conditions[:-1], own.item(), conditions[-1])
    return lambda make: codes.operands(
        weight, recipe, layer.needs_dx, conditions, history, is_in_step, make, is_shown
    )


def cut_of(weight: DTensor) -> int | None:
    """The dimension of W that its mesh cuts; None: each rank has the whole."""
    (placement, *others) = weight.placements
    if not others and placement.is_replicate():
        return None
    if others or type(placement) is not Shard:
        raise ValueError(
            "linear: expected a weight that is Shard(0), Shard(1) or Replicate() over one mesh "
            f"dimension, got {weight.placements} over {weight.device_mesh}"
        )
    return placement.dim


def require_even(weight: DTensor, dim: int) -> None:
    length, world = weight.shape[dim], weight.device_mesh.size()
    if length % world:
        raise ValueError(
            f"linear: expected {'NK'[dim]} as a multiple of the ranks, got {'NK'[dim]} = {length} "
            f"over {world} ranks"
        )


def placed(x: DTensor, recipe: Recipe, dim: int) -> tuple[DTensor, Tokens | None]:
    """x as a weight cut along `dim` needs it; with its tokens where it stays cut by them."""
    (placement,) = x.placements
    last = x.dim() - 1
    if dim == 1:
        return x.redistribute(placements=[Shard(last)]), None
    if type(placement) is Shard and placement.dim < last:
        at, world = placement.dim, x.device_mesh.size()
        if x.shape[at] % world == 0:
            tokens = Tokens(math.prod(x.shape[:at]), math.prod(x.shape[at:last]) // world)
            if tokens_fit(recipe, tokens):
                return x, tokens
    return x.redistribute(placements=[Replicate()]), None


def local(t: Tensor, grad_placement: Placement | None = None) -> Tensor:
    if not isinstance(t, DTensor):
        return t
    return t.to_local(grad_placements=None if grad_placement is None else [grad_placement])


def whole_linear(
    x: DTensor,
    weight: DTensor,
    bias: Tensor | None,
    recipe: Recipe,
    rng: Tensor | None,
    amax_history: Tensor | None,
    stream: int,
) -> Tensor:
    """Where no rank's weight is cut: x of all tokens, the same on every rank."""
    y = ops.linear.default(
        local(x.redistribute(placements=[Replicate()])),
        local(weight),
        None if bias is None else local(bias),
        recipe.text,
        rng=rng,
        amax_history=amax_history,
        stream=stream,
    )
    return DTensor.from_local(y, x.device_mesh, [Replicate()], run_check=False)


# ---- the module ----------------------------------------------------------------------------------

AGREED: weakref.WeakKeyDictionary[RngState, set[str]] = weakref.WeakKeyDictionary()


def require_shared_seed(state: RngState, group: dist.ProcessGroup) -> None:
    """At the first forward: ranks that share a weight draw the bits of one process."""
    groups = AGREED.setdefault(state, set())
    if group.group_name in groups:
        return
    both = torch.cat([state.tensor, -state.tensor])
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    if not torch.equal(both[:2], -both[2:]):
        raise ValueError(
            "linear: expected tensor-parallel ranks to share the seed and count of stochastic "
            f"rounding, got {state.get().tolist()} mixed with rank {state.rank} here; give "
            "mf.quantize_ the data_parallel_rank that they share"
        )
    groups.add(group.group_name)


@torch.compiler.disable(reason="minifloat: tensor parallel layers run eagerly")
def module_linear(layer: Linear, x: Tensor) -> Tensor:
    """The forward of an mf.Linear whose weight is a DTensor."""
    weight = cast(DTensor, layer.weight)
    layer.unwrap_buffers()
    rng = layer.draw_rng(weight.device)
    if layer.rng_state is not None and cut_of(weight) is not None:
        require_shared_seed(layer.rng_state, weight.device_mesh.get_group())
    return linear(
        x,
        weight,
        layer.bias,
        layer.recipe,
        rng=rng,
        amax_history=layer.step_history(),
        stream=layer.stream_id,
        shared_input=layer.shared_input,
        weight_codes=layer.weight_codes,
        is_in_step=layer.is_in_step(),
    )


# ---- sharding rules of the pure ops --------------------------------------------------------------
# A rule lists (outputs, inputs) placements. x (…, rows, cols); the operand as read swaps them where
# columnwise. DTensor takes the rule that costs it least.

Rule = tuple[list[Any], list[Any]]
REPLICATED = Replicate()


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
