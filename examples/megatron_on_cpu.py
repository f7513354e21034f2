"""Gives Megatron-Core the CPU where it asks for a GPU.

Nothing that Megatron computes is replaced: tensors are made on the CPU, streams and events do
nothing, and the random numbers are those of the CPU's generator.
"""

from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode


class NoStream:
    """Stands for a CUDA stream or event: the CPU computes in order."""

    def __init__(self, *args, **kwargs):
        pass

    def nothing(self, *args, **kwargs):
        pass

    def record_event(self, event=None):
        return event or NoStream()

    wait_stream = wait_event = record = synchronize = wait = nothing


ALL_TO_ALL = torch.distributed.all_to_all_single


def all_to_all_single(output, input, *sizes, **options):
    """Calls torch's, with sizes as lists where Megatron has them in tensors on the host."""

    def as_list(size):
        return size.tolist() if isinstance(size, torch.Tensor) else size

    options = {name: as_list(option) for name, option in options.items()}
    return ALL_TO_ALL(output, input, *map(as_list, sizes), **options)


@contextmanager
def each_alone(*group, **options):
    """Yields what waits for the collectives of the statement.

    gloo returns wrong bytes where all-gathers of several dtypes are joined: each goes alone.
    """
    started = Started()
    with ExitStack() as stack:
        for module, name in (
            (param_and_grad_buffer, "dist_all_gather_func"),
            (param_and_grad_buffer, "dist_reduce_scatter_func"),
            (torch.distributed, "all_reduce"),
        ):
            stack.enter_context(patch.object(module, name, started.by(getattr(module, name))))
        yield started


class Started(list):
    """The collectives that run beside the computation."""

    def by(self, function):
        def call(*args, **kwargs):
            work = function(*args, **kwargs)
            if work is not None:
                self.append(work)
            return work

        return call

    def wait(self):
        for work in self:
            work.wait()


class CpuForGpu(TorchFunctionMode):
    """While it is entered, Megatron-Core runs on the CPU. Its own functions stay replaced after."""

    def __enter__(self):
        cuda = torch.cuda
        cuda.current_device = lambda: "cpu"
        cuda.Stream = cuda.Event = NoStream
        cuda.current_stream = cuda.default_stream = NoStream
        cuda.stream = lambda stream: nullcontext()
        cuda.synchronize = NoStream().nothing
        cuda.manual_seed = torch.manual_seed
        cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        megatron_random._get_cuda_rng_state = cuda.get_rng_state
        megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(
            state
        )
        torch.distributed.all_to_all_single = all_to_all_single
        # 0.16.1 defines this name only where Transformer Engine is.
        moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
        param_and_grad_buffer._coalescing_manager = each_alone
        return super().__enter__()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.record_stream:
            return None
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):  # compared with CUDA's names
            result = result.replace("torch.", "torch.cuda.")
        return result
