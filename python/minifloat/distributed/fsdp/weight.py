"""FSDP2 with weights that are gathered as codes: WeightWithQuantizedGather, and its hooks.

    mf.quantize_(model, "nvfp4")          plans the gathers of each weight (plan.py)
    fully_shard(model)                    assigns each layer its sharded parameter, a DTensor
    Linear.__setattr__                    wraps that DTensor's local tensor: wrap_sharded_weight
    gather                                shards -> codes and scales (batch.py)
                                          -> QuantizedTensors (gathered_weight.py)
    mf.precompute_scales(model)           exchanges the amaxes of all weights in one all-reduce

The parameter is wrapped when FSDP2 has sharded it, not before: FSDP2 assigns through __setattr__
where a module defines one. So without FSDP2 the layer, its parameter, its state dict and its
optimizer do not change. With FSDP2 only the gather sees the wrapper: every other op unwraps it and
returns a torch.Tensor.

FSDP2 frees and fills gathered memory by its storage, so codes that autograd saved are refilled for
backward. Rowwise codes are views of the gathered bytes. Columnwise codes and scales of blocks are
inner tensors. The native batch writes them in place, and torch counts no write.

FSDP2 calls the hook of a full shard with five arguments, among them the compute dtype. It calls the
hook of a short shard with one: only that form may send packed codes. At the first gather the ranks
of the mesh agree on the dtype, the recipe and the shape.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...nn.operand_cache import STEPS
from .all_gather import WeightGather
from .batch import BOTH_GATHERS, Batch, exchange_amaxes

aten = torch.ops.aten


# ---- the wrapper ---------------------------------------------------------------------------------


class WeightWithQuantizedGather(Tensor):
    """The local shard of a layer's weight, with FSDP2's hooks. Other ops read `shard`."""

    shard: Tensor
    weight_gather: WeightGather

    @staticmethod
    def __new__(cls, shard: Tensor, gather: WeightGather) -> WeightWithQuantizedGather:
        return Tensor._make_wrapper_subclass(
            cls,
            shard.shape,
            strides=shard.stride(),
            storage_offset=shard.storage_offset(),
            dtype=shard.dtype,
            device=shard.device,
        )

    def __init__(self, shard: Tensor, gather: WeightGather) -> None:
        self.shard, self.weight_gather = shard, gather
        is_full = shard.shape[0] == gather.chunk
        self.fsdp_pre_all_gather = (FullShard if is_full else ShortShard)(shard, gather)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}({self.shard!r}, {self.weight_gather.plan})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns the shard's storage, which FSDP2 frees; while tracing, the wrapper's."""
        is_traced = torch._guards.TracingContext.try_get() is not None
        return super().untyped_storage() if is_traced else self.shard.untyped_storage()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["shard"], self.weight_gather

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], gather: Any, outer_size: Any, outer_stride: Any
    ) -> WeightWithQuantizedGather:
        return WeightWithQuantizedGather(inner["shard"], gather)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.shard.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls func with the shards. Returns wrappers where func writes or FSDP2 pads."""
        wrapped: dict[int, WeightWithQuantizedGather] = {}

        def unwrap(value: Any) -> Any:
            kind = type(value)
            if kind is cls:
                wrapped[id(value.shard)] = value
                return value.shard
            return kind([unwrap(v) for v in value]) if kind in (list, tuple) else value

        def rewrap(value: Any) -> Any:
            kind = type(value)
            if kind in (list, tuple):
                return kind([rewrap(v) for v in value])
            return wrapped.get(id(value), value)

        positional = unwrap(args)
        named = {name: unwrap(value) for name, value in kwargs.items()} if kwargs else {}
        if func._schema.is_mutable:
            for wrapper in wrapped.values():
                wrapper.weight_gather.writes += 1
        out = func(*positional, **named)
        if func in RELAID:
            return cls(out, args[0].weight_gather)
        return rewrap(out)

    # ---- FSDP2's hooks ---------------------------------------------------------------------------

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        return self.weight_gather.receive(outputs, metadata, out)


class BeforeGather:
    """FSDP2's hook before a gather of one shard. FSDP2 reads the signature at each gather."""

    def __init__(self, shard: Tensor, gather: WeightGather) -> None:
        self.shard, self.gather = shard, gather


class FullShard(BeforeGather):
    """The hook of five arguments, for a full shard."""

    def __call__(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return self.gather.send(self.shard, mp_policy.param_dtype or self.shard.dtype)

    __signature__ = signature(lambda mesh, outer_size, outer_stride, module, mp_policy: None)


class ShortShard(BeforeGather):
    """The hook of one argument, for a shard that is short or empty."""

    def __call__(self, mesh: Any) -> Any:
        return self.gather.send(self.shard, None)

    __signature__ = signature(lambda mesh: None)


# The ops by which FSDP2 pads a shard again, and moves it to its device.
RELAID = (
    aten.slice.Tensor,
    aten.new_zeros.default,
    aten._to_copy.default,
    aten._pin_memory.default,
)


def wrap_sharded_weight(layer: nn.Module, parameter: Any) -> None:
    """Wraps the local tensor of a parameter that FSDP2 has sharded by rows; leaves any other."""
    plan = layer.__dict__.get("gather_plan")
    if plan is None or not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.tensor import DTensor, Shard

    present = layer._parameters.get("weight")
    is_gathered = isinstance(present, DTensor) and present is not parameter
    if not isinstance(parameter, DTensor) or (is_gathered and layer.weight_gather is None):
        return  # is_gathered without a WeightGather: tensor parallelism cuts the weight as well
    local, mesh = parameter._local_tensor, parameter.device_mesh
    cuts = [(dim, p) for dim, p in enumerate(parameter.placements) if not p.is_replicate()]
    is_by_rows = len(cuts) == 1 and cuts[0][1] == Shard(0) and type(cuts[0][1]) is Shard
    if type(local) is Tensor and is_by_rows:
        shape = parameter.shape[0], parameter.shape[1]
        gather = WeightGather(layer, plan, shape, mesh.get_group(cuts[0][0]))
        local = parameter._local_tensor = WeightWithQuantizedGather(local, gather)
    if isinstance(local, WeightWithQuantizedGather):  # a tied weight may have another layer's
        layer.__dict__["weight_gather"] = local.weight_gather


# ---- all weights at once -------------------------------------------------------------------------


def sharded_batches(model: nn.Module) -> dict[Any, dict[Batch, list[Tensor]]]:
    """Finds the batches and their shards, by process group.

    Leaves out weights that have not been gathered yet, and those that FSDP2 offloads.
    """
    found: dict[Any, dict[Batch, list[Tensor]]] = {}
    for module in model.modules():
        gather = module.__dict__.get("weight_gather")
        if gather is None or not gather.is_quantized:
            continue
        parameter: Any = module._parameters["weight"]
        local = getattr(parameter, "_local_tensor", None)
        if not isinstance(local, WeightWithQuantizedGather):
            continue
        if local.shard.device.type != parameter.device_mesh.device_type:
            continue
        batch = gather.batch or gather.joined_batch()
        batches = found.setdefault(gather.group, {})
        if batch not in batches:
            batches[batch] = batch.shards() or [local.shard]
    return found


@torch.no_grad()
def precompute_scales(model: nn.Module) -> None:
    """Exchanges the amaxes of every weight that FSDP2 gathers as codes, in one all-reduce.

    Call it after opt.step(); mf.step calls it. Without this call each gather that needs amaxes of
    other ranks exchanges them itself. Each gather casts its shards, so the codes are the same. The
    amaxes are valid until the next step of an optimizer, mf.step or load_state_dict. Call it again
    where weights change by other means.

    Args:
        model: a module that fully_shard has sharded, of any floating dtype. Weights that are not
            gathered as codes, and those not gathered yet, are left out.

    Returns:
        None: the native batches hold the amaxes, float32.
    """
    for batches in sharded_batches(model).values():
        exchange_amaxes(list(batches), list(batches.values()), BOTH_GATHERS)
        for batch in batches:
            batch.measured_at = STEPS.taken


precompute_float8_dynamic_scale_for_fsdp = precompute_scales  # name in torchao
