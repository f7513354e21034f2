"""Quantizes weights from high-precision masters that are sharded over ranks, as by ZeRO.

    mf.distributed.quantize_master_weights(weights, masters, start_offsets, group)    on every rank
    layout.gather(shard_codes, weights, group)                            or the caller's gather
    mf.distributed.post_all_gather_processing(weights)

The bytes are those of QuantizedTensor.from_tensor on the unsharded master. Ranks gather flat codes
of the weights (flat_codes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ...checks import require_int, require_text
from ...spec import Spec
from ...tensor.quantized import require_tensor
from ...tensor.quantized_tensor import QuantizedTensor
from ..handshake import meet, raise_on_all
from .flat_codes import Uncopied, WeightPlan, plan_of

Run = Callable[..., None]
Fragments = Tensor | tuple[Tensor, ...] | None
Shards = list[tuple[int, int]]  # of each weight: its first flat element, and how many
Value = TypeVar("Value")
ALL_CAST = "quantize_master_weights: expected all {} ranks to call it for {}"


@dataclass(frozen=True, eq=False)
class Cached(Uncopied):
    """A native object for a list of weights, and the plans and names from which it was made."""

    made_of: tuple[object, ...]
    value: object


def _cached(
    name: str,
    weights: Sequence[QuantizedTensor],
    made_of: tuple[object, ...],
    make: Callable[[], Value],
) -> Value:
    """Returns the native object cached on the first weight; makes it anew where plans changed."""
    if not weights:
        return make()
    cached: Cached | None = weights[0].__dict__.get(name)
    if cached is None or cached.made_of != made_of:
        cached = weights[0].__dict__[name] = Cached(made_of, make())
    return cast(Value, cached.value)


class Agreement:
    """The lists of weights that all ranks have, and the native object that compares lists.

    The object compares each list and its shards once, by collectives. So either all ranks compare,
    or none does: a handshake before each call ensures it.
    """

    def __init__(self) -> None:
        self._renew()

    def _renew(self) -> None:
        self.native: object = torch.classes.minifloat.Agreement()
        # (name of a group, title of a list) -> this rank's shards, which were compared
        self.shards: dict[tuple[str, str], Shards] = {}

    def meet(self, title: str, shards: Shards, ranks: dist.ProcessGroup | None) -> None:
        """Waits for all ranks; forgets what was agreed where one has another list, or new shards.

        Args:
            title: of the list.
            shards: this rank's.
            ranks: the group; None: this process alone.

        Raises:
            ValueError: a rank is missing, or its arguments do not fit.
        """
        if ranks is None:
            return
        compared = self.shards.get((ranks.group_name, title))
        are_new = compared is not None and compared != shards
        known = "new" if compared is None else "new shards" if are_new else "compared before"
        texts = meet(
            "mf.distributed.quantize_master_weights of",
            f"{title}; {known}",
            ranks,
            expected=ALL_CAST,
        )
        if texts is not None or are_new:
            self._renew()


@contextmanager
def _errors_on_all(group: object) -> Iterator[dist.ProcessGroup | None]:
    """Yields the ranks of a group, which all raise what is raised within; None: one process."""
    ranks: dist.ProcessGroup | None = None
    try:
        ranks = _ranks_of(group)
        yield ranks
    except Exception as error:
        raise_on_all(error, group if ranks is None else ranks)


def _ranks_of(group: object) -> dist.ProcessGroup | None:
    """Returns a group, or that of a name; the default one of None, where there is one."""
    if group is None:
        return dist.group.WORLD if dist.is_initialized() else None
    if isinstance(group, dist.ProcessGroup):
        return group
    try:
        if isinstance(group, str):
            return dist.distributed_c10d._resolve_process_group(cast(Any, group))
    except RuntimeError:
        pass
    raise TypeError(
        "quantize_master_weights: group: expected a process group that this rank is in, its name "
        f"or None, got {group!r} ({type(group).__name__})"
    )


# ---- the cast ------------------------------------------------------------------------------------


def _list_of(name: str, values: object) -> list[Any]:
    """Returns the values of an argument; TypeError where it is no list."""
    if isinstance(values, str | Tensor) or not isinstance(values, Iterable):
        raise TypeError(
            f"quantize_master_weights: {name}: expected a list, got {type(values).__name__}"
        )
    return list(values)


def _require_count(name: str, values: list[Any], weights: list[Any]) -> None:
    """Raises ValueError where there is not one value for each weight."""
    if len(values) != len(weights):
        raise ValueError(
            f"quantize_master_weights: expected {name} for each of {len(weights)} weights, got "
            f"{len(values)}"
        )


def _labels(names: object, weights: list[QuantizedTensor]) -> list[str]:
    """Returns the weights' names, or their indices.

    Raises:
        TypeError, ValueError: the names are not one text a weight, or a weight is listed twice.
    """
    labels = [str(i) for i in range(len(weights))]
    if names is not None:
        given = _list_of("names", names)
        _require_count("a name", given, weights)
        labels = [require_text("quantize_master_weights: names", name) for name in given]
    first: dict[int, str] = {}
    for label, weight in zip(labels, weights):
        if id(weight) in first:
            raise ValueError(
                f"quantize_master_weights: expected each weight once, got weight "
                f"{first[id(weight)]} again as {label}"
            )
        first[id(weight)] = label
    return labels


def _fragments(i: int, plan: WeightPlan, fragments: Fragments, is_empty: bool) -> Sequence[Tensor]:
    """Returns the memory of each part's codes; empty memory for an empty shard without any."""
    if fragments is None and is_empty:
        return tuple(part.codes.new_empty(0) for part in plan.parts)
    name, listed = f"fragments of weight {i}", list[Any]()
    if fragments is not None:
        listed = [fragments] if isinstance(fragments, Tensor) else _list_of(name, fragments)
    if len(listed) != len(plan.parts):
        raise ValueError(
            f"quantize_master_weights: expected {len(plan.parts)} fragments for a shard in "
            f"{[p.spec for p in plan.parts]}, got {len(listed) or 'none'}"
        )
    return [require_tensor(f"quantize_master_weights: {name}", each) for each in listed]


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
    """Casts shards of masters to codes in place, and writes the weights' scales.

    Masters are rounded to the weight's dtype first. Under +delayed a direction's amax is the active
    amax before the call and the current amax after it. The scales are those of
    QuantizedTensor.from_tensor on the unsharded master (docs/numerics.md, section 1).

    Args:
        model_weights: QuantizedTensors (rows, cols), or (experts, rows, cols) whose matrices have
            an amax each, in one order on every rank.
        master_weights: (elements) float32 or bfloat16, flat shards; None or empty: no shard here.
        start_offsets: each shard's first flat element in its weight. Any cut is allowed; shards of
            two ranks are equal, or have no element in common.
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
        TypeError: an argument is of another type. Where there are other ranks it is a ValueError.
        ValueError: arguments do not fit, a weight is listed twice, or memory that is written is no
            weight's alone, on one rank or more; ranks differ, or one is missing; on every rank.
            Nothing is written then.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> weight = mf.QuantizedTensor.from_tensor(torch.zeros(32, 64), "mxfp8/32x32")
        >>> mf.distributed.quantize_master_weights([weight], [torch.ones(32 * 64)], [0], None)
        >>> weight.dequantize()[0, :4]
        tensor([1., 1., 1., 1.])
        >>> mf.distributed.destroy_process_group()
    """
    with _errors_on_all(group) as ranks:
        weights = _list_of("model_weights", model_weights)
        plans = [plan_of(weight) for weight in weights]
        labels = _labels(names, weights)
        title = _cached("title", weights, (plans, labels), lambda: _title(weights, labels))
        masters = _masters(plans, master_weights)
        starts = _starts(plans, start_offsets)
        codes = _codes(plans, masters, fsdp_shard_model_weights)
        if not manual_post_all_gather_processing:
            _require_no_transposes(weights, plans)
        casts = _cached(
            "master_casts", weights, (plans, labels), lambda: _native_casts(plans, labels)
        )
        ready = casts.check(masters, starts, codes)
    # Ranks compare their lists once, also where a rank makes new plans of the same weights later.
    agreement = _cached("agreement", weights, (), Agreement)
    shards = [(start, master.numel()) for start, master in zip(starts, masters)]
    agreement.meet(title, shards, ranks)
    name = "" if ranks is None else ranks.group_name
    ready.run(name, agreement.native)
    for weight in weights if fsdp_shard_model_weights is None else ():
        weight.count_write()
    agreement.shards[name, title] = shards


def _masters(plans: list[WeightPlan], master_weights: object) -> list[Tensor]:
    """Returns the shards of masters, an empty one for None."""
    listed = _list_of("master_weights", master_weights)
    _require_count("a master", listed, plans)
    masters = []
    for i, (plan, master) in enumerate(zip(plans, listed)):
        if master is None:
            master = plan.flat_codes[0].new_empty(0, dtype=torch.float32)
        masters.append(require_tensor(f"quantize_master_weights: master {i}", master))
    return masters


def _starts(plans: list[WeightPlan], start_offsets: object) -> list[int]:
    """Returns the first element of each shard, 0 for None."""
    listed = _list_of("start_offsets", start_offsets)
    _require_count("a start offset", listed, plans)
    return [
        0 if start is None else require_int(f"quantize_master_weights: offset {i}", start)
        for i, start in enumerate(listed)
    ]


def _codes(plans: list[WeightPlan], masters: list[Tensor], fragments: object) -> list[Tensor]:
    """Returns the fragments of all weights; none where codes are written into the weights."""
    if fragments is None:
        return []
    listed = _list_of("fsdp_shard_model_weights", fragments)
    _require_count("fragments", listed, plans)
    each = enumerate(zip(plans, masters, listed))
    return [part for i, (plan, m, of) in each for part in _fragments(i, plan, of, m.numel() == 0)]


def _require_no_transposes(weights: Sequence[QuantizedTensor], plans: Sequence[WeightPlan]) -> None:
    """Raises ValueError where a direction is transposed from gathered bytes."""
    for weight, plan in zip(weights, plans):
        if plan.transposes:
            raise ValueError(
                "quantize_master_weights: expected manual_post_all_gather_processing=True, got "
                f"False: the columnwise codes of {weight!r} are transposed from gathered bytes; "
                "call mf.distributed.post_all_gather_processing(model_weights) after the gather"
            )


def _title(weights: Sequence[QuantizedTensor], labels: list[str]) -> str:
    """Returns what ranks compare of a list of weights."""
    return "; ".join(
        f"{label}: {tuple(weight.shape)}, {weight.dtype}, {weight.specs}"
        for label, weight in zip(labels, weights)
    )


def _native_casts(plans: list[WeightPlan], labels: list[str]) -> Any:
    """Lists the directions of all weights: cast, weight, name and memory of each.

    Raises:
        ValueError: a direction is transformed: its codes depend on more than their own elements.
            Or its blocks have scales of rows, which no weight has.
    """
    parts = [(i, part) for i, plan in enumerate(plans) for part in plan.parts]
    for i, part in parts:
        spec = Spec.parse(part.spec)
        if spec.transform or (spec.has_blocks and spec.amax_of == "row"):
            raise ValueError(
                f"quantize_master_weights: weight {labels[i]}: expected a spec of weights, "
                f"without a transform, got {part.spec}"
            )
    return torch.classes.minifloat.MasterCasts(
        [native for plan in plans for native in plan.casts],
        [i for i, _ in parts],
        [labels[i] for i, _ in parts],
        [codes for plan in plans for codes in plan.flat_codes],
        [part.scale for _, part in parts],
        [part.amax for _, part in parts],
    )


# ---- after the gather ----------------------------------------------------------------------------


def post_all_gather_processing(model_weights: Sequence[QuantizedTensor]) -> None:
    """Transposes gathered flat codes, and scales, into columnwise ones; may be called again.

    Args:
        model_weights: QuantizedTensors whose uint8 flat codes (wires) have been gathered.

    Raises:
        TypeError: one is no QuantizedTensor.

    Example:
        >>> x, spec = torch.zeros(32, 64), "nvfp4/16x16"
        >>> weight = mf.QuantizedTensor.from_tensor(x, spec, spec)
        >>> (codes, *_) = mf.distributed.wires(weight)
        >>> codes = codes.fill_(0x22)  # as a gather writes them: 1.0, twice a byte
        >>> mf.distributed.post_all_gather_processing([weight])
        >>> weight.columnwise.codes.eq(0x22).all()
        tensor(True)
    """
    plans = [plan_of(weight) for weight in model_weights]

    def new_run() -> Run:
        jobs = [job for plan in plans for job in plan.transposes]
        sizes = [size for job in jobs for size in job[2:]]
        matrices = [job[0] for job in jobs], [job[1] for job in jobs]
        return cast(Run, torch.classes.minifloat.MatrixTransposes(*matrices, sizes).run)

    _cached("transposes", model_weights, (plans,), new_run)()
