"""Quantized weights whose high-precision masters are sharded over ranks, as ZeRO and FSDP do.

    mf.quantize_master_weights(weights, masters, start_offsets, group)    on every rank
    layout.gather(shard_codes, weights, group)                            or the caller's gather
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

import torch
import torch.distributed as dist
from torch import Tensor

from ...spec import Spec
from ...tensor.quantized import require_memory, require_tensor
from ...tensor.quantized_tensor import QuantizedTensor
from .weight_plan import WeightPlan, fragments_of_matrices, plan_of, shards_of_matrices

Run = Callable[..., None]
Fragments = Tensor | tuple[Tensor, ...] | None


# ---- flat codes ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CachedList:
    """A call of a native list of some weights, with the plans and names that it was made of."""

    made_of: tuple[object, ...]
    run: Run

    def __deepcopy__(self, memo: object) -> None:
        """Returns None: a copied weight has other memory, and gets a new list."""


def _cached(
    name: str,
    weights: Sequence[QuantizedTensor],
    made_of: tuple[object, ...],
    make: Callable[[], Run],
) -> Run:
    """Returns the native list cached on the first weight; makes it anew where plans changed."""
    cached = weights[0].__dict__.get(name)
    if cached is None or cached.made_of != made_of:
        cached = weights[0].__dict__[name] = CachedList(made_of, make())
    return cached.run


def wires(weight: QuantizedTensor) -> tuple[Tensor, ...]:
    """Returns the flat codes that a gather fills, one tensor for each direction with flat codes.

    Args:
        weight: a QuantizedTensor (rows, cols) or (experts, rows, cols).

    Returns:
        Contiguous uint8 (…, rows, bytes a row) for each such direction. Rowwise flat codes are the
        weight's codes. Columnwise ones are separate memory, allocated at the first call and stored
        with the weight.

    Raises:
        TypeError: the weight is no QuantizedTensor.
    """
    return plan_of(weight).flat_codes


def attach_wires(weight: QuantizedTensor, memory: Sequence[Tensor]) -> None:
    """Moves the weight's flat codes, with their values, into `memory`.

    Args:
        weight: a QuantizedTensor.
        memory: contiguous uint8 tensors of the shapes of mf.wires(weight), on the same device, such
            as views of one flat buffer.

    Raises:
        TypeError, ValueError: the weight is no QuantizedTensor, or the memory does not fit.
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


def _group_name(group: dist.ProcessGroup | str | None) -> str:
    """Returns the group's name in torch.distributed; "" for one process alone."""
    if isinstance(group, str):
        return group
    if group is None:
        if not dist.is_initialized():
            return ""
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group: expected a process group, its name or None, got {type(group).__name__}"
        )
    return group.group_name


def _require_lists(
    weights: Sequence[object],
    masters: Sequence[object],
    starts: Sequence[object],
    fragments: Sequence[object] | None,
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
    group: dist.ProcessGroup | str | None,
    fsdp_shard_model_weights: Sequence[Fragments] | None = None,
    manual_post_all_gather_processing: bool = True,
    *,
    names: Sequence[str] | None = None,
) -> None:
    """Casts shards of masters to codes in place, and writes the scales of the whole weights.

    Masters are rounded to the weight's dtype first. Under +delayed a direction's amax is the active
    amax before the call and the current amax after it. The scales are those of
    QuantizedTensor.from_tensor on the whole master (docs/numerics.md, section 1).

    Args:
        model_weights: QuantizedTensors (rows, cols), or (experts, rows, cols) whose matrices have
            an amax each, in one order on every rank.
        master_weights: (elements) float32 or bfloat16, flat shards; None or empty: no shard here.
        start_offsets: each shard's first flat element in its weight; any cut is allowed.
        group: the ranks that hold the shards: a process group, its name, or None for the default
            group. One all-reduce exchanges the amaxes of all weights. Where specs are +4over6, one
            more exchanges the choices of scales, and one the masters of blocks that cuts split.
        fsdp_shard_model_weights: for each weight uint8 fragments, its shard's bytes of each
            direction's flat codes (WireLayout.fragments). A byte that a cut on an odd element
            divides has zero in the nibble of the neighbouring shard. None: codes are written into
            the weights.
        manual_post_all_gather_processing: False is refused where a direction is transposed after
            the gather.
        names: the weights' names, for error messages; None: their indices.

    Raises:
        TypeError: a weight is no QuantizedTensor, or the group no process group.
        ValueError: arguments do not fit, or ranks differ. Nothing is written then.
    """
    fragments = fsdp_shard_model_weights
    _require_lists(model_weights, master_weights, start_offsets, fragments)
    if not manual_post_all_gather_processing:
        _refuse_processing(model_weights)
    if not model_weights:
        agreement = torch.classes.minifloat.Agreement()
        _native_casts([], None, agreement)([], [], [], _group_name(group))
        return
    plans = [plan_of(weight) for weight in model_weights]
    shards: list[tuple[Tensor, int]] = []  # of each matrix
    codes: list[Tensor] = []
    for i, (plan, master, start) in enumerate(zip(plans, master_weights, start_offsets)):
        if master is None:
            master, start = plan.flat_codes[0].new_empty(0, dtype=torch.float32), 0
        require_tensor(f"quantize_master_weights: master {i}", master)
        start, held = start or 0, master.numel()
        shards += shards_of_matrices(plan, master, start)
        if fragments is None:
            continue
        for spec, fragment in zip(plan.specs, _fragments(plan, fragments[i], held == 0)):
            codes += fragments_of_matrices(plan, spec, fragment, start, held)
    labels = None if names is None else list(names)
    agreement = _agreement(model_weights[0])
    quantize = _cached(
        "master_casts",
        model_weights,
        (plans, labels),
        lambda: _native_casts(plans, labels, agreement),
    )
    quantize([master for master, _ in shards], [at for _, at in shards], codes, _group_name(group))


@dataclass(frozen=True, eq=False)
class AgreedLists:
    """A native record of the lists of weights that ranks agreed on, kept on the first weight."""

    native: object

    def __deepcopy__(self, memo: object) -> AgreedLists:
        return AgreedLists(torch.classes.minifloat.Agreement())


def _agreement(weight: QuantizedTensor) -> object:
    """Returns the native record of agreed lists, which outlives the weight's plans."""
    agreed = weight.__dict__.get("agreed_lists")
    if agreed is None:
        agreed = AgreedLists(torch.classes.minifloat.Agreement())
        weight.__dict__["agreed_lists"] = agreed
    return agreed.native


def _native_casts(plans: list[WeightPlan], names: list[str] | None, agreement: object) -> Run:
    """Lists the directions of all matrices: cast, matrix, name and memory of each."""
    casts: list[object] = []
    owners: list[int] = []
    titles: list[str] = []
    codes: list[Tensor] = []
    scales: list[Tensor] = []
    amaxes: list[Tensor] = []
    first = 0  # matrix of the weight
    for i, plan in enumerate(plans):
        name, is_one = str(i) if names is None else names[i], plan.matrices == 1
        for k, part in enumerate(plan.parts):
            casts += [plan.casts[k]] * plan.matrices
            owners += range(first, first + plan.matrices)
            titles += [name] if is_one else [f"{name}[{e}]" for e in range(plan.matrices)]
            codes += matrices_of(plan, plan.flat_codes[k])
            scales += matrices_of(plan, part.scale)
            amaxes += matrices_of(plan, part.amax)
        first += plan.matrices
    return torch.classes.minifloat.MasterCasts(
        casts, owners, titles, codes, scales, amaxes, agreement
    ).quantize


def matrices_of(plan: WeightPlan, t: Tensor) -> Sequence[Tensor]:
    """Returns the part of a tensor for each matrix; the tensor itself where it is empty."""
    is_whole = plan.matrices == 1 or t.numel() == 0
    return [t] * plan.matrices if is_whole else t.unbind()


def cast_master_weights_to_nvfp4(
    model_weights: Sequence[QuantizedTensor],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: dist.ProcessGroup | str | None,
    fsdp_shard_model_weights: Sequence[Fragments] | None = None,
    manual_post_all_gather_processing: bool = True,
    *,
    names: Sequence[str] | None = None,
) -> None:
    """Casts shards of masters as quantize_master_weights does, for weights in NVFP4 alone.

    Args:
        model_weights: QuantizedTensors whose every direction is NVFP4.
        master_weights, start_offsets, group, fsdp_shard_model_weights: see quantize_master_weights.
        manual_post_all_gather_processing, names: see quantize_master_weights.

    Raises:
        TypeError, ValueError: a direction is not NVFP4, or as quantize_master_weights.
    """
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
    """Raises ValueError where a weight needs post_all_gather_processing."""
    for weight in weights:
        if plan_of(weight).sources:
            raise ValueError(
                "quantize_master_weights: expected manual_post_all_gather_processing=True, got "
                f"False: the columnwise codes of {weight!r} are transposed from gathered bytes; "
                "call mf.post_all_gather_processing(model_weights) after the gather"
            )


def post_all_gather_processing(model_weights: Sequence[QuantizedTensor]) -> None:
    """Transposes gathered flat codes, and scales, into columnwise ones; may be called again.

    Args:
        model_weights: QuantizedTensors whose uint8 flat codes (mf.wires) are whole.

    Raises:
        TypeError: one is no QuantizedTensor.
    """
    if not model_weights:
        return
    plans = [plan_of(weight) for weight in model_weights]
    _cached("transposes", model_weights, (plans,), lambda: _native_transposes(plans))()


def _native_transposes(plans: list[WeightPlan]) -> Run:
    return torch.classes.minifloat.MatrixTransposes(
        [t for plan in plans for t in plan.sources],
        [t for plan in plans for t in plan.targets],
        [n for plan in plans for n in plan.sizes],
    ).run
