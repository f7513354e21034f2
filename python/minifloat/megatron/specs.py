"""The modules that Megatron-Core builds models of, in place of Transformer Engine's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from .attention import DotProductAttention
from .norms import LayerNormColumnParallelLinear, Norm
from .versions import sequential_experts


class SpecProvider(BackendSpecProvider):  # type: ignore[misc]
    """Megatron-Core's BackendSpecProvider with modules that mf.quantize_ converts.

    Parameters have the names that those of Transformer Engine have: a norm is part of the linear
    layer behind it. The modules compute in high precision until mf.quantize_ converts them.
    """

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type | None:
        return LayerNormColumnParallelLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> Any:
        return Norm

    def core_attention(self) -> type:
        return DotProductAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *legacy: bool) -> Any:
        return sequential_experts(self)

    def activation_func(self) -> None:
        return None

    def linear(self) -> type:
        raise NotImplementedError(
            "multi_latent_attention: expected Megatron's local spec (use_transformer_engine=False) "
            "with minifloat.megatron.backend(), got Transformer Engine's"
        )


class LocalProvider(SpecProvider):
    """The same with the names of Megatron's local specs: norms are modules of their own."""

    def fuse_layernorm_and_linear(self) -> bool:
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        return None


# The names in Megatron's modules that build specs, where it looks its providers and norms up.
REPLACED = {
    "LocalSpecProvider": LocalProvider,
    "TESpecProvider": SpecProvider,
    "LNImpl": Norm,
    "TENorm": Norm,
}
LOCK = threading.RLock()  # of those names


@contextmanager
def backend() -> Iterator[None]:
    """Has Megatron-Core's functions build specs of SpecProvider, while the statement runs.

    With use_transformer_engine=True, or by the functions named so, the parameters have the names of
    Transformer Engine's modules, else those of local specs. The providers are replaced in
    Megatron's modules for the statement, for all threads.

    Example:
        >>> with minifloat.megatron.backend():  # doctest: +SKIP
        ...     spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    """
    with LOCK, ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if name.startswith("megatron.core.") and hasattr(module, "LocalSpecProvider"):
                # Without Transformer Engine some names are absent.
                for attribute, value in REPLACED.items():
                    stack.enter_context(patch.object(module, attribute, value, create=True))
        yield
