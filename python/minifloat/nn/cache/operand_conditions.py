"""Conditions under which operands have codes, and codes can be read again."""

from __future__ import annotations

import torch
from torch import Tensor

from ...spec import Spec

Conditions = tuple[object, ...]


def conditions_of(x: Tensor) -> Conditions:
    """Returns compute dtype, inference mode, CUDA stream and capture, which operands depend on."""
    kind = "cpu" if x.is_cpu else x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if kind != "cuda":
        return dtype, torch.is_inference_mode_enabled(), None, False
    stream = torch._C._cuda_getCurrentRawStream(x.device.index)
    capturing = torch.cuda.is_current_stream_capturing()
    return dtype, torch.is_inference_mode_enabled(), stream, capturing


def is_capturing(conditions: Conditions) -> bool:
    """Tells whether `conditions` are of a forward that a CUDA graph captures."""
    return bool(conditions[-1])


def can_reuse(*texts: str, allows_delayed: bool) -> bool:
    """Tells whether operands in these specs have codes that several forwards can read."""
    specs = [Spec.parse(text) for text in texts]
    is_of_values = not any(
        spec.is_stochastic or (spec.is_delayed and not allows_delayed) for spec in specs
    )
    return is_of_values and not all(spec.is_bf16 for spec in specs)


def reads_codes(*texts: str) -> bool:
    """Tells whether operands in these specs are all codes."""
    return not any(Spec.parse(text).is_bf16 for text in texts)
