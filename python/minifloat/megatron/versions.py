"""What differs between the versions of Megatron-Core, 0.16 and 0.19."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core import fp4_utils
from megatron.core.models import backends
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

# 0.16: a module and its submodules. Later: one function that builds it.
IS_A_PAIR = hasattr(backends, "GroupedMLP")

# 0.16's buffers have a byte for each element of a weight that is codes.
HAS_4_BIT_BUFFERS = hasattr(fp4_utils, "modify_nvfp4_rowwise_storage")


def experts_spec(module: type, submodules: Any) -> Any:
    """Returns experts as BackendSpecProvider.grouped_mlp_modules does."""
    return (module, submodules) if IS_A_PAIR else partial(module, submodules=submodules)


def sequential_experts(provider: Any) -> Any:
    """Returns the experts that are one MLP each."""
    linear = MLPSubmodules(
        linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear()
    )
    return experts_spec(SequentialMLP, linear)
