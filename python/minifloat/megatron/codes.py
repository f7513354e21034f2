"""Weights that are codes in Megatron-Core's buffers and its distributed optimizer.

Megatron asks functions of fp8_utils and fp4_utils about a parameter that is Transformer Engine's.
gather_codes has these functions answer for mf.QuantizedTensor too:

    is_float8tensor, is_nvfp4tensor    tell whether a parameter is codes
    modify_underlying_storage, …       move its codes into the buffer that Megatron gathers
    quantize_param_shard, …            cast shards of masters to codes, with all ranks' scales
    post_all_gather_processing         transposes gathered codes
    dequantize_fp8_tensor              returns values, for checkpoints and new masters

A buffer has one region for a parameter: the codes of one direction.

    8 bits    a byte an element. Shards of codes begin where those of gradients do.
    4 bits    two elements a byte. Shards begin at half the elements' index, which packed_layout
              ensures: Megatron pads the codes by themselves, and shards may then begin elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from typing import Any

from megatron.core import fp4_utils, fp8_utils
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.param_and_grad_buffer import (
    _ParamAndGradBucketGroup,
    _ParamAndGradBuffer,
)
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from ..distributed.zero.flat_codes import attach_wires, wires
from ..distributed.zero.master_weights import post_all_gather_processing, quantize_master_weights
from ..nn.linear import clear_initial_values
from ..tensor.quantized_tensor import QuantizedTensor
from .versions import HAS_4_BIT_BUFFERS

Function = Callable[..., Any]


@cache
def gather_codes() -> None:
    """Has Megatron-Core's buffers and DistributedOptimizer take weights that are codes.

    mf.quantize_(model, recipe, primary=True) calls it for a model with Megatron's layers. Call it
    before DistributedDataParallel for a model of nn.Linear alone. It replaces functions in
    Megatron's modules, for the rest of the process; a second call does nothing. Parameters of other
    classes, Transformer Engine's too, are treated as before.

    Example:
        >>> minifloat.megatron.gather_codes()  # doctest: +SKIP
    """
    for module, changes in ((fp8_utils, OF_8_BITS), (fp4_utils, OF_4_BITS)):
        for name, change in changes.items():
            if (before := getattr(module, name, None)) is not None:
                replace_in_megatron(name, before, wraps(before)(change(before)))
    for cls, change in CLASSES.items():
        cls.__init__ = change(cls.__init__)  # type: ignore[misc]
    group = _ParamAndGradBucketGroup
    group.start_param_sync = with_transposes(group.start_param_sync)
    if HAS_4_BIT_BUFFERS:
        layout = packed_layout(_ParamAndGradBuffer._compute_nvfp4_packed_layout)
        _ParamAndGradBuffer._compute_nvfp4_packed_layout = layout


def replace_in_megatron(name: str, before: Function, after: Function) -> None:
    """Replaces a function in each module of Megatron's that has it by its name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("megatron.") and getattr(module, name, None) is before:
            setattr(module, name, after)


# ---- what Megatron asks of a parameter -----------------------------------------------------------


def is_codes(parameter: object) -> bool:
    """Tells whether a parameter is codes of this library."""
    return isinstance(parameter, QuantizedTensor)


def bits_of(weight: QuantizedTensor) -> int:
    """Returns how many bits of a byte an element's code takes: 4 or 8."""
    return 4 if wires(weight)[0].numel() * 2 == weight.numel() else 8


def is_float8(theirs: Function) -> Function:
    # As of Transformer Engine's class, codes of 4 bits are among these.
    return lambda tensor: is_codes(tensor) or theirs(tensor)


def is_nvfp4(theirs: Function) -> Function:
    return lambda tensor: bits_of(tensor) == 4 if is_codes(tensor) else theirs(tensor)


def modify_storage(theirs: Function) -> Function:
    def modify(tensor: Tensor, memory: Tensor) -> None:
        if isinstance(tensor, QuantizedTensor):
            attach_wires(tensor, [memory])
        else:
            theirs(tensor, memory)

    return modify


def quantize_shards(theirs: Function) -> Function:
    def quantize(
        model_params: Sequence[Tensor],
        main_params: Sequence[Tensor | None],
        start_offsets: Sequence[int | None],
        data_parallel_group: Any,
        fsdp_shard_model_params: Sequence[Any] | None = None,
    ) -> None:
        lists = model_params, main_params, start_offsets, fsdp_shard_model_params
        ours = [is_codes(parameter) for parameter in model_params]
        calls: list[tuple[Function, bool]] = [(quantize_master_weights, True), (theirs, False)]
        for call, wanted in calls:
            if wanted not in ours:
                continue
            chosen = [
                None if each is None else [x for x, own in zip(each, ours) if own is wanted]
                for each in lists
            ]
            call(*chosen[:3], data_parallel_group, chosen[3])

    return quantize


def post_process(theirs: Function) -> Function:
    def post_all_gather(model_params: Any) -> None:
        listed = model_params if isinstance(model_params, list) else [model_params]
        post_all_gather_processing([p for p in listed if isinstance(p, QuantizedTensor)])
        if others := [p for p in listed if not is_codes(p)]:
            theirs(others)

    return post_all_gather


def dequantize(theirs: Function) -> Function:
    return lambda tensor: tensor.dequantize() if is_codes(tensor) else theirs(tensor)


OF_8_BITS: dict[str, Callable[[Function], Function]] = {
    "is_float8tensor": is_float8,
    "modify_underlying_storage": modify_storage,
    "quantize_param_shard": quantize_shards,
    "post_all_gather_processing": post_process,
    "dequantize_fp8_tensor": dequantize,
}
OF_4_BITS: dict[str, Callable[[Function], Function]] = {
    "is_nvfp4tensor": is_nvfp4,
    "modify_nvfp4_rowwise_storage": modify_storage,
    "quantize_nvfp4_param_shard": quantize_shards,
    "dequantize_fp4_tensor": dequantize,
}


def with_transposes(theirs: Function) -> Function:
    """Returns the gather of some buckets that transposes codes also where it does not overlap.

    Before it evaluates or saves, Megatron gathers without overlap, and then post-processes nothing.
    """

    @wraps(theirs)
    def start(group: Any, force_sync: bool = False) -> None:
        theirs(group, force_sync=force_sync)
        if force_sync and group.ddp_config.overlap_param_gather:
            weights = [p for bucket in group.buckets for p in bucket.params if is_codes(p)]
            post_all_gather_processing(weights)

    return start


def packed_layout(theirs: Function) -> Function:
    """Returns the layout of a buffer of 4-bit codes: each begins and ends at half the element."""

    @wraps(theirs)
    def compute(buffer: Any, params_with_names: list[tuple[Tensor, str]]) -> None:
        kinds = {bits_of(p) if isinstance(p, QuantizedTensor) else 0 for p, _ in params_with_names}
        if kinds == {0}:
            theirs(buffer, params_with_names)
            return
        if kinds != {4}:
            raise ValueError(
                "DistributedDataParallel: expected codes of 4 bits alone, or of 8 bits alone, in "
                "one of Megatron's buffers, which ranks cut at the same fraction of elements and "
                "bytes, got both"
            )
        ranks = buffer.data_parallel_world_size
        for begin, end in buffer.bucket_indices:
            if (end - begin) % (2 * ranks) != 0:
                raise ValueError(
                    f"DistributedDataParallel: expected buckets of a multiple of {2 * ranks} "
                    f"elements, whose shards begin on bytes, got {end - begin}; pass "
                    "pad_buckets_for_high_nccl_busbw=True"
                )
        buffer.nvfp4_packed_param_index_map = {
            p: (begin // 2, end // 2, i) for p, (begin, end, i) in buffer.param_index_map.items()
        }
        halves = [(begin // 2, end // 2) for begin, end in buffer.bucket_indices]
        buffer.nvfp4_packed_bucket_indices = halves
        buffer.nvfp4_packed_numel_unpadded = sum(p.numel() // 2 for p, _ in params_with_names)

    return compute


# ---- what cannot work ----------------------------------------------------------------------------


def checked(check: Function) -> Callable[[Function], Function]:
    """Returns what changes an __init__ so that it raises what `check` of its arguments raises."""

    def change(theirs: Function) -> Function:
        @wraps(theirs)
        def init(self: object, *args: Any, **kwargs: Any) -> None:
            check(self, *args, **kwargs)
            theirs(self, *args, **kwargs)

        return init

    return change


def trained_codes(module: nn.Module) -> Iterator[tuple[str, QuantizedTensor]]:
    """Yields (name, weight) of a model's trained parameters that are codes."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, QuantizedTensor) and parameter.requires_grad:
            yield name, parameter


def check_wrapper(wrapper: object, config: Any, module: nn.Module, *args: Any) -> None:
    """Raises ValueError for codes in a wrapper that is not DistributedDataParallel."""
    if isinstance(wrapper, DistributedDataParallel):
        return
    for name, _ in trained_codes(module):
        raise ValueError(
            f"{type(wrapper).__name__}: {name}: expected a weight in high precision, got codes; "
            "wrap the model in Megatron's DistributedDataParallel, or convert it with primary=False"
        )


def check_flags(
    wrapper: object, config: Any, ddp_config: Any, module: nn.Module, *args: Any, **others: Any
) -> None:
    """Raises ValueError where DistributedDataParallel's options do not fit a weight's codes."""
    for name, weight in trained_codes(module):
        flat_codes, bits = wires(weight), bits_of(weight)
        if len(flat_codes) != 1 or flat_codes[0].numel() * 8 != weight.numel() * bits:
            raise ValueError(
                f"DistributedDataParallel: {name}: expected a weight with one direction to gather, "
                f"for which Megatron's buffer has memory, got {weight.specs}; use fp8_tensorwise, "
                "fp8_blockwise, mxfp8_2d or nvfp4, or convert the model with primary=False"
            )
        if bits == 4 and not HAS_4_BIT_BUFFERS:
            raise ValueError(
                f"DistributedDataParallel: {name}: expected codes of 8 bits with this version of "
                f"Megatron-Core, whose buffers have a byte an element, got {weight.specs[0]}; "
                "install megatron-core 0.19, or convert the model with primary=False"
            )
        wanted = {
            "use_distributed_optimizer": True,
            f"fp{bits}_param_gather": True,
            "reuse_grad_buf_for_mxfp8_param_ag": False,
        }
        for option, value in wanted.items():
            if (got := getattr(ddp_config, option, False)) is not value:
                raise ValueError(
                    f"DistributedDataParallel: {name}: {option}: expected {value} with a weight "
                    f"that is codes of {bits} bits, got {got}"
                )


def with_masters(theirs: Function) -> Function:
    """Returns DistributedOptimizer's __init__ that frees the initial values of all its weights.

    Megatron frees those of weights with a shard on this rank.
    """

    @wraps(theirs)
    def init(self: Any, optimizer: object, config: Any, *args: Any, **kwargs: Any) -> None:
        of_chunks = kwargs.get("per_model_buffers") or next(
            (each for each in args if isinstance(each, dict)), {}
        )
        buffers = [buffer for listed in of_chunks.values() for buffer in listed]
        weights = [p for buffer in buffers for p in buffer.params if is_codes(p)]
        if weights and config.use_precision_aware_optimizer_no_fp8_or_ds_fp8:
            raise ValueError(
                "DistributedOptimizer: use_precision_aware_optimizer: expected False with weights "
                "that are codes, to which masters of this optimizer are cast, got True"
            )
        theirs(self, optimizer, config, *args, **kwargs)
        for weight in weights:
            clear_initial_values(weight)

    return init


CLASSES: dict[type, Callable[[Function], Function]] = {
    _BaseDataParallel: checked(check_wrapper),
    DistributedDataParallel: checked(check_flags),
    DistributedOptimizer: with_masters,
}
