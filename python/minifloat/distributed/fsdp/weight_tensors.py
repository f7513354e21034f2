"""The two tensors of a weight that FSDP2 gathers as codes: this rank's shard, the gathered weight.

FSDP2 calls the hook of a full shard with five arguments, among them the compute dtype. It calls the
hook of a short shard with one: only that form may send packed codes. So at the first gather the
ranks agree on the dtype (gather.py).

Rowwise codes of the gathered weight are a view of FSDP2's memory, which has the codes of all ranks
in order. Columnwise codes and scales of blocks are inner tensors that FSDP2 frees with that memory.
Other scales are small and are not freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor

from ...private_torch import COUNTS_WRITES, ExcludeDispatchKey, is_compiler_tracing
from ...tensor.directions import TENSORS
from ...tensor.quantized import Quantized
from ...tensor.quantized_tensor import Context, Op, QuantizedTensor
from .gather import Gather, GatherInputs, Received

aten = torch.ops.aten
METHODS = (MethodType, BuiltinMethodType)


# ---- the shard -----------------------------------------------------------------------------------


class BeforeGather:
    """The pre-gather hook of one shard. FSDP2 inspects the hook's signature at each gather."""

    __slots__ = ("__signature__", "batch", "gather", "place", "receiver", "shard")
    OF_FULL_SHARD = signature(lambda mesh, outer_size, outer_stride, module, mp_policy: None)
    OF_SHORT_SHARD = signature(lambda mesh: None)

    def __init__(self, shard: Tensor, gather: Gather) -> None:
        self.shard, self.gather = shard, gather
        # The Batch that has this hook's inputs when its turn comes, the hook's place there, and
        # what receives the outputs.
        self.batch: Any = None
        self.place = 0
        self.receiver: Callable[[Sequence[Tensor]], object] | None = None
        is_full = shard.shape[0] == gather.chunk
        self.__signature__ = self.OF_FULL_SHARD if is_full else self.OF_SHORT_SHARD

    def __call__(self, mesh: object, *others: Any) -> GatherInputs:
        batch = self.batch
        if batch is not None:
            if batch.turn == self.place:
                batch.turn += 1
                return batch.inputs.pop(), self.receiver
            if self.place == 0 and batch.is_current:
                return batch.start(), self.receiver
        dtype = others[-1].param_dtype or self.shard.dtype if others else None
        return self.gather.send(self.shard, dtype)


class ShardedWeight(Tensor):
    """The local shard of a parameter, with FSDP2's hooks. Other ops read `shard`."""

    is_traced = False  # whether compiled code may write to any: it calls no op here
    shard: Tensor
    weight_gather: Gather
    fsdp_pre_all_gather: BeforeGather

    @staticmethod
    def __new__(cls, shard: Tensor, gather: Gather) -> ShardedWeight:
        out = Tensor._make_wrapper_subclass(
            cls,
            shard.shape,
            strides=shard.stride(),
            storage_offset=shard.storage_offset(),
            dtype=shard.dtype,
            device=shard.device,
        )
        out.shard, out.weight_gather = shard, gather
        out.fsdp_pre_all_gather = BeforeGather(shard, gather)
        gather.forget()
        return out

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: Any, dtype: object, *, out: object = None
    ) -> Received:
        if out is not None and type(metadata) in METHODS:  # a batch's, after the first gather
            metadata(outputs)
            return None
        return self.weight_gather.receive(outputs, metadata, out)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"{type(self).__name__}({self.shard!r}, {self.weight_gather.plan})"

    def untyped_storage(self) -> torch.UntypedStorage:
        """Returns the shard's storage, which FSDP2 frees; while tracing, the wrapper's."""
        is_traced = is_compiler_tracing()
        return super().untyped_storage() if is_traced else self.shard.untyped_storage()

    def __tensor_flatten__(self) -> tuple[list[str], Gather]:
        ShardedWeight.is_traced = True
        return ["shard"], self.weight_gather

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], gather: Gather, outer_size: object, outer_stride: object
    ) -> ShardedWeight:
        return ShardedWeight(inner["shard"], gather)

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
        wrapped: dict[int, ShardedWeight] = {}

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
        for wrapper in wrapped.values():
            if func._schema.is_mutable:
                wrapper.weight_gather.note_write()
            elif func.is_view:
                wrapper.weight_gather.note_alias()
        if not is_traced and (func._schema.is_mutable or func is aten.detach.default):
            with ExcludeDispatchKey(COUNTS_WRITES, False):
                out = func(*positional, **named)
        else:
            out = func(*positional, **named)
        if func in RELAID:
            return cls(out, args[0].weight_gather)
        return rewrap(out)


# The ops by which FSDP2 pads a shard again, and moves it to its device.
RELAID = (
    aten.slice.Tensor,
    aten.new_zeros.default,
    aten._to_copy.default,
    aten._pin_memory.default,
)


# ---- the gathered weight -------------------------------------------------------------------------


class GatheredWeight(QuantizedTensor):
    """A quantized weight whose codes are in FSDP2's memory. A copy has the values.

    The directions are never replaced: a compiled block reads their tensors from attributes at each
    call. A tensor that both directions have is read once.
    """

    owns_codes = False

    def refuse_write(self, *args: object, **options: object) -> NoReturn:
        raise ValueError(
            "QuantizedTensor: expected a write to a parameter's shard, got one to the weight that "
            "FSDP2 gathered from it, whose codes it frees; call reshard() of the module before"
        )

    _write = update_usage = refuse_write
    data = QuantizedTensor.data.setter(refuse_write)  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: object) -> object:
        return self.dequantize().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def _hold(self, rowwise: Quantized | None, columnwise: Quantized | None) -> None:
        super()._hold(rowwise, columnwise)
        names, context = super().__tensor_flatten__()
        for name in names:
            side, tensor = name[1:].split("_")
            self.__dict__[name] = getattr(getattr(self, side), tensor)
        read = [n for n in names if self.__dict__.get(in_row(n)) is not self.__dict__[n]]
        self.flattened = read, context

    def __tensor_flatten__(self) -> tuple[list[str], Context]:
        return self.flattened

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Context, outer_size: object, outer_stride: object
    ) -> QuantizedTensor:
        for name in COLUMNWISE:
            if name not in inner:
                inner = {**inner, name: inner[in_row(name)]}
        return super().__tensor_unflatten__(inner, context, outer_size, outer_stride)


def cast_of_values(cast: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method of torch.Tensor whose result never shares codes, as layers' own casts do."""

    @wraps(cast)
    def cast_values(weight: GatheredWeight, *args: Any, **options: Any) -> Any:
        out = cast(weight, *args, **options)
        shares_codes = isinstance(out, GatheredWeight) and out is not weight
        return cast(weight * 1, *args, **options) if shares_codes else out  # autograd records it

    return cast_values


for _name in ("to", "type", "type_as", "float", "bfloat16"):
    setattr(GatheredWeight, _name, cast_of_values(getattr(Tensor, _name)))


def in_row(name: str) -> str:
    """Returns the name of a columnwise tensor's rowwise one; "" of any other name."""
    return name.replace("columnwise", "rowwise") if name in COLUMNWISE else ""


COLUMNWISE = [f"_columnwise_{name}" for name in TENSORS]
for _side in ("rowwise", "columnwise"):
    for _name in TENSORS:
        setattr(GatheredWeight, f"_{_side}_{_name}", None)  # instances set them
