"""Peak memory, the operations of a training step, and the dtype of products."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from minifloat.private_torch import has_fast_bf16
from torch import nn

from tests.support.llama import Llama


def product_dtype(device: str) -> torch.dtype:
    """Returns bf16, or fp32 on CPUs without a fast bf16 product (x86-64 without AVX-512).

    There torch's bf16 product takes 5 to 50 times as long as its fp32 product.
    """
    return torch.bfloat16 if device != "cpu" or has_fast_bf16() else torch.float32


def step_flops(model: Llama, tokens: int, seq: int) -> float:
    """Counts the operations of a step's linear layers and of causal attention.

    A product has 2 M N K operations, and two as large in backward. Attention has two products of
    2 S S D a sequence, half of which the causal mask leaves.
    """
    shapes = [m.weight.shape for m in model.modules() if isinstance(m, nn.Linear)]
    attention = model.config.layers * seq * model.config.dim
    return 3 * 2.0 * tokens * (sum(n * k for n, k in shapes) + attention)


class PeakMemory:
    """Peak bytes since the object was made.

    GPU: of all tensors together. CPU: of the resident memory that the process has added.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        self.base = status_bytes("VmRSS")

    def bytes(self) -> int:
        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return max(status_bytes("VmHWM") - self.base, 0)


def status_bytes(key: str) -> int:
    """Returns a field of /proc/self/status in bytes; 0 where there is none."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(key)), 0)
