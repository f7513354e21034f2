"""Frees what FSDP2 has gathered of a model."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn


def reshard(model: nn.Module) -> None:
    """Frees the weights that FSDP2 has gathered: an evaluation leaves those of the root."""
    if dist.is_available() and dist.is_initialized():
        from torch.distributed.fsdp import FSDPModule  # which no model without ranks needs

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
