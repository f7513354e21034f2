"""FSDP2 with weights that travel quantized: WeightWithQuantizedGather, and the hooks it has.

    mf.quantize_(model, "nvfp4")          decides how each weight travels (plan.py)
    fully_shard(model)                    hands each layer its sharded parameter, a DTensor
    Linear.__setattr__ -> carry           wraps that DTensor's local tensor, nothing else
    gather                                shard -> codes and scales (cast.py)
                                          -> QuantizedTensor (gathered_weight.py)
    mf.precompute_scales(model)           casts all shards at once, with one all-reduce of amaxes

The parameter is wrapped when FSDP2 has sharded it, not before: FSDP2 assigns through __setattr__
where a module defines one. So without FSDP2 a layer, its parameter, its state dict and its
optimizer are what they were, and with it everything but the gather sees a plain tensor: each op
unwraps, and what it gives is plain.

FSDP2 frees what it gathered by its storage, so that codes saved for backward come back by
themselves: rowwise codes are views of the gathered bytes; columnwise ones and scales of blocks are
inner tensors, written in place under no_grad with their versions kept.

FSDP2 asks a full shard by the hook's five arguments, which say the compute dtype, and a short one
by the one-argument form, which alone may send packed codes; at the first gather the ranks of the
mesh agree on that dtype, and on recipe and shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .all_gather import Travel
from .cast import cast_shards
from .shard_layout import Rows

aten = torch.ops.aten


# ---- the wrapper ---------------------------------------------------------------------------------


class WeightWithQuantizedGather(Tensor):
    """The local shard of a layer's weight. FSDP2 gathers it by its hooks; all else sees `plain`."""

    plain: Tensor
    travel: Travel

    @staticmethod
    def __new__(cls, plain: Tensor, travel: Travel) -> WeightWithQuantizedGather:
        return Tensor._make_wrapper_subclass(
            cls,
            plain.shape,
            strides=plain.stride(),
            storage_offset=plain.storage_offset(),
            dtype=plain.dtype,
            device=plain.device,
        )

    def __init__(self, plain: Tensor, travel: Travel) -> None:
        self.plain, self.travel = plain, travel
        is_full = plain.shape[0] == travel.rows.chunk
        self.fsdp_pre_all_gather = (FullShard if is_full else ShortShard)(plain, travel)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self.plain!r}, {self.travel.plan})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """The shard's, by which FSDP2 knows its memory; a compiler asks for the wrapper's own."""
        is_traced = torch._guards.TracingContext.try_get() is not None
        return super().untyped_storage() if is_traced else self.plain.untyped_storage()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["plain"], self.travel

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], travel: Any, outer_size: Any, outer_stride: Any
    ) -> WeightWithQuantizedGather:
        return WeightWithQuantizedGather(inner["plain"], travel)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """func of the plain tensors. Their twins come back where func writes or FSDP2 re-lays."""
        wrapped = {id(t.plain): t for t in tree_leaves((args, kwargs)) if isinstance(t, cls)}

        if func._schema.is_mutable:
            for wrapper in wrapped.values():
                wrapper.travel.writes += 1

        def plain(leaf: Any) -> Any:
            return leaf.plain if isinstance(leaf, cls) else leaf

        out = func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))
        if func in RELAID:
            return cls(out, args[0].travel)
        return tree_map(lambda leaf: wrapped.get(id(leaf), leaf), out)

    # ---- FSDP2's hooks ---------------------------------------------------------------------------

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return self.travel.receive(outputs, metadata, out)


class BeforeGather:
    """FSDP2's hook before a gather of one shard. It asks for the signature each time."""

    def __init__(self, plain: Tensor, travel: Travel) -> None:
        self.plain, self.travel = plain, travel


class FullShard(BeforeGather):
    """Of five arguments."""

    def __call__(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return self.travel.send(self.plain, mp_policy.param_dtype or self.plain.dtype)

    __signature__ = signature(lambda mesh, outer_size, outer_stride, module, mp_policy: None)


class ShortShard(BeforeGather):
    """Of one, for a shard that is short or empty."""

    def __call__(self, mesh: Any) -> Any:
        return self.travel.send(self.plain, None)

    __signature__ = signature(lambda mesh: None)


# What FSDP2 makes of a shard to pad it again, and to bring it to its device.
RELAID = (
    aten.slice.Tensor,
    aten.new_zeros.default,
    aten._to_copy.default,
    aten._pin_memory.default,
)


def carry(layer: nn.Module, parameter: Any) -> None:
    """Wraps the local tensor of a parameter that FSDP2 has sharded by rows; leaves any other."""
    plan = layer.__dict__.get("gather_plan")
    if plan is None or not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.tensor import DTensor, Shard

    present = layer._parameters.get("weight")
    is_gathered = isinstance(present, DTensor) and present is not parameter
    if not isinstance(parameter, DTensor) or (is_gathered and layer.travel is None):
        return  # the latter of a weight that tensor parallelism cuts as well
    local, mesh = parameter._local_tensor, parameter.device_mesh
    cuts = [(dim, p) for dim, p in enumerate(parameter.placements) if not p.is_replicate()]
    is_by_rows = len(cuts) == 1 and cuts[0][1] == Shard(0) and type(cuts[0][1]) is Shard
    if type(local) is Tensor and is_by_rows:
        dim = cuts[0][0]
        rows = Rows(parameter.shape[0], mesh.size(dim), mesh.get_local_rank(dim))
        travel = Travel(layer, plan, rows, parameter.shape[1], mesh.get_group(dim))
        local = parameter._local_tensor = WeightWithQuantizedGather(local, travel)
    if isinstance(local, WeightWithQuantizedGather):  # of a tied weight, another layer's
        layer.__dict__["travel"] = local.travel


# ---- all weights at once -------------------------------------------------------------------------


def sharded_weights(model: nn.Module) -> Iterator[WeightWithQuantizedGather]:
    """Those that wait in shards where they are gathered, and have been before; each once."""
    for parameter in dict.fromkeys(model.parameters()):
        local = getattr(parameter, "_local_tensor", None)
        if not isinstance(local, WeightWithQuantizedGather) or not local.travel.is_quantized:
            continue
        mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
        if local.plain.device.type == mesh.device_type:  # else FSDP2 offloads it
            yield local


@torch.no_grad()
def precompute_scales(model: nn.Module) -> None:
    """After opt.step(): casts the shards of every weight that travels quantized, all at once.

    What ranks must know of each other, amaxes of tensors, columns and blocks that shards split, is
    one all-reduce. Without it each gather casts and reduces its own, to the same bytes. Amaxes hold
    until the next step of an optimizer, mf.step or load_state_dict; call it again where weights
    change otherwise. mf.step calls it.
    """
    by_group: dict[Any, list[WeightWithQuantizedGather]] = {}
    for weight in sharded_weights(model):
        by_group.setdefault(weight.travel.group, []).append(weight)
    for group, weights in by_group.items():
        jobs = [w.travel.jobs(w.plain, w.travel.all_parts) for w in weights]
        pieces = iter(cast_shards([job for of_weight in jobs for job in of_weight], group))
        to: list[Tensor] = []
        given: list[Tensor] = []
        for weight, of_weight in zip(weights, jobs):
            travel = weight.travel
            travel.keep([next(pieces) for _ in of_weight], travel.values_of(weight.plain))
            for every, more in zip((to, given), travel.take_kept()):
                every += more
        if to:
            torch._foreach_copy_(to, given)


precompute_float8_dynamic_scale_for_fsdp = precompute_scales  # torchao's name
