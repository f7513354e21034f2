"""WeightWithQuantizedGather: a shard of a parameter, with FSDP2's hooks around its gather.

FSDP2 calls the hook of a full shard with five arguments, among them the compute dtype. It calls the
hook of a short shard with one: only that form may send packed codes. At the first gather the ranks
of the mesh agree on the dtype, the recipe and the shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch._C import _SetExcludeDispatchKeyGuard

from ...tensor.handlers import Op
from .plan import GatherPlan

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

GatherInputs = tuple[tuple[Tensor, ...], object]  # of the all-gather, and what the later hook gets
Received = tuple[Tensor, tuple[Tensor, ...]] | None  # the whole weight and its memory
ADInplaceOrView = torch._C.DispatchKey.ADInplaceOrView  # the key that counts writes
aten = torch.ops.aten


class ShardGather(Protocol):
    """The gathers of a parameter: a layer's (all_gather.py) or experts' (experts.py)."""

    plan: GatherPlan
    chunk: int  # rows, or experts, of a full shard

    def send(self, shard: Tensor, dtype: torch.dtype | None) -> GatherInputs:
        """Returns the all-gather inputs, and the gather for the later hook."""

    def receive(self, outputs: Sequence[Tensor], payload: Any, out: object) -> Received:
        """Returns the whole weight and its memory at the first gather; fills them at later ones."""


# ---- the wrapper ---------------------------------------------------------------------------------


class WeightWithQuantizedGather(Tensor):
    """The local shard of a layer's weight, with FSDP2's hooks. Other ops read `shard`."""

    shard: Tensor
    weight_gather: ShardGather

    @staticmethod
    def __new__(cls, shard: Tensor, gather: ShardGather) -> WeightWithQuantizedGather:
        return Tensor._make_wrapper_subclass(
            cls,
            shard.shape,
            strides=shard.stride(),
            storage_offset=shard.storage_offset(),
            dtype=shard.dtype,
            device=shard.device,
        )

    def __init__(self, shard: Tensor, gather: ShardGather) -> None:
        self.shard, self.weight_gather = shard, gather
        is_full = shard.shape[0] == gather.chunk
        self.fsdp_pre_all_gather = (FullShard if is_full else ShortShard)(shard, gather)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}({self.shard!r}, {self.weight_gather.plan})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns the shard's storage, which FSDP2 frees; while tracing, the wrapper's."""
        is_traced = torch._guards.TracingContext.try_get() is not None
        return super().untyped_storage() if is_traced else self.shard.untyped_storage()

    def __tensor_flatten__(self) -> tuple[list[str], ShardGather]:
        return ["shard"], self.weight_gather

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], gather: ShardGather, outer_size: object, outer_stride: object
    ) -> WeightWithQuantizedGather:
        return WeightWithQuantizedGather(inner["shard"], gather)

    def __reduce_ex__(self, protocol: object) -> object:
        return self.shard.__reduce_ex__(protocol)

    @classmethod
    def __torch_dispatch__(
        cls, func: Op, types: object, args: Any = (), kwargs: dict[str, object] | None = None
    ) -> object:
        """Calls func with the shards. Returns wrappers where func writes or FSDP2 pads.

        The shards count the writes of func, and those to what detach returns: a state dict's
        tensors. The wrapper counts writes to other views of itself.
        """
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
        is_traced = any([type(wrapper.shard) is not Tensor for wrapper in wrapped.values()])
        if not is_traced and (func._schema.is_mutable or func is aten.detach.default):
            with _SetExcludeDispatchKeyGuard(ADInplaceOrView, False):
                out = func(*positional, **named)
        else:
            out = func(*positional, **named)
        if func in RELAID:
            return cls(out, args[0].weight_gather)
        return rewrap(out)

    # ---- FSDP2's hooks ---------------------------------------------------------------------------

    def fsdp_post_all_gather(
        self,
        outputs: Sequence[Tensor],
        metadata: object,
        param_dtype: torch.dtype,
        *,
        out: object = None,
    ) -> Received:
        return self.weight_gather.receive(outputs, metadata, out)


def writes_to(parameter: Any) -> tuple[int, int, int]:
    """Counts the writes to a sharded parameter.

    Eager writes count on the shard: those to the parameter, to its local tensor, to a state dict's
    view of it. Those of compiled code count on its input, the parameter or its local tensor.
    """
    local = parameter._local_tensor
    return parameter._version, local._version, local.shard._version


class BeforeGather:
    """FSDP2's hook before a gather of one shard. FSDP2 reads the signature at each gather."""

    def __init__(self, shard: Tensor, gather: ShardGather) -> None:
        self.shard, self.gather = shard, gather


class FullShard(BeforeGather):
    """The hook of five arguments, for a full shard."""

    def __call__(
        self,
        mesh: object,
        outer_size: object,
        outer_stride: object,
        module: object,
        mp_policy: MixedPrecisionPolicy,
    ) -> GatherInputs:
        return self.gather.send(self.shard, mp_policy.param_dtype or self.shard.dtype)

    __signature__ = signature(lambda mesh, outer_size, outer_stride, module, mp_policy: None)


class ShortShard(BeforeGather):
    """The hook of one argument, for a shard that is short or empty."""

    def __call__(self, mesh: object) -> GatherInputs:
        return self.gather.send(self.shard, None)

    __signature__ = signature(lambda mesh: None)


# The ops by which FSDP2 pads a shard again, and moves it to its device.
RELAID = (
    aten.slice.Tensor,
    aten.new_zeros.default,
    aten._to_copy.default,
    aten._pin_memory.default,
)
