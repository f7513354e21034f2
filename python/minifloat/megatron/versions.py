"""What differs between the versions of Megatron-Core, from 0.16 to 0.19."""

from __future__ import annotations

from functools import partial
from typing import Any

import megatron.core
from megatron.core import fp4_utils
from megatron.core.models import backends
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import experts

OLDEST, NEWEST = (0, 16), (0, 19)  # that were tried


def require_version() -> tuple[int, int]:
    """Returns the version of Megatron-Core; raises ImportError for one outside 0.16 to 0.19."""
    major, minor = megatron.core.__version__.split(".")[:2]
    version = int(major), int(minor)
    if not OLDEST <= version <= NEWEST:
        raise ImportError(
            "minifloat.megatron: expected megatron-core 0.16 to 0.19, got "
            f"{megatron.core.__version__}"
        )
    return version


require_version()
# 0.16: experts are a module and its submodules. Later: one function that builds them.
IS_A_PAIR = hasattr(backends, "GroupedMLP")
# 0.16: experts with two 2D parameters, weight1 and weight2.
LEGACY_EXPERTS = (experts.GroupedMLP,) if IS_A_PAIR else ()

# 0.16's buffers have a byte for each element of a weight that is codes.
HAS_4_BIT_BUFFERS = hasattr(fp4_utils, "modify_nvfp4_rowwise_storage")


def grouped_experts(column: type, row: type) -> Any:
    """Returns Megatron's experts that are two grouped linear layers of these classes."""
    submodules = MLPSubmodules if IS_A_PAIR else experts.GroupedMLPSubmodules
    return experts_spec(experts.TEGroupedMLP, submodules(linear_fc1=column, linear_fc2=row))


def experts_spec(module: type, submodules: Any) -> Any:
    """Returns experts as BackendSpecProvider.grouped_mlp_modules does."""
    return (module, submodules) if IS_A_PAIR else partial(module, submodules=submodules)
