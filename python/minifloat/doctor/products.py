"""The device that is measured, the dtype that it multiplies fast in, the time of a GPU's work."""

from collections.abc import Callable

import torch

from .._native import ops
from ..engine_choice import CPU
from ..private_torch import has_fast_bf16, sleep_cycles


def find_device() -> tuple[str, tuple[int, int]]:
    """Returns "cuda" where torch and this build have it, else "cpu"; and the capability."""
    if torch.cuda.is_available() and ops.has_cuda():
        return "cuda", torch.cuda.get_device_capability()
    return "cpu", CPU


def product_dtype(device: str) -> torch.dtype:
    """Returns bf16, or fp32 on CPUs without a fast bf16 product (x86-64 without AVX-512).

    There torch's bf16 product takes 5 to 50 times as long as its fp32 product.
    """
    return torch.bfloat16 if device != "cpu" or has_fast_bf16() else torch.float32


def describe_product_dtype(device: str) -> str:
    """Returns the dtype that `product_dtype` chose, as reports print it."""
    is_narrow = product_dtype(device) == torch.bfloat16
    return "bf16" if is_narrow else "fp32 (this CPU has no fast bf16 product)"


def cuda_seconds(work: Callable[[], object], calls: int = 16) -> float:
    """Returns the GPU's time of one call, as the mean of a few: an event takes 5 microseconds.

    The GPU first waits for about a millisecond, in which the host launches all calls. So the time
    of the launches is not counted.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    sleep_cycles(2_000_000)
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls
