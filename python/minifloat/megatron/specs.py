"""The modules that Megatron-Core builds models of, in place of Transformer Engine's."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from megatron.core.extensions import transformer_engine
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

from .attention import DotProductAttention
from .grouped import ColumnParallelGroupedLinear, RowParallelGroupedLinear
from .norms import LayerNormColumnParallelLinear, Norm
from .versions import experts_spec, grouped_experts


class SpecProvider(BackendSpecProvider):  # type: ignore[misc]
    """Megatron-Core's BackendSpecProvider with modules that mf.quantize_ converts.

    Parameters have the names that those of Transformer Engine have: a norm is part of the linear
    layer after it. The modules compute in high precision until mf.quantize_ converts them.
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
        if any(legacy):
            raise ValueError(
                "moe_use_legacy_grouped_gemm: expected False, got True: those experts have one "
                "weight (K, E · N), which Transformer Engine's checkpoints do not have"
            )
        if moe_use_grouped_gemm:
            return grouped_experts(ColumnParallelGroupedLinear, RowParallelGroupedLinear)
        linear = MLPSubmodules(
            linear_fc1=self.column_parallel_linear(), linear_fc2=self.row_parallel_linear()
        )
        return experts_spec(SequentialMLP, linear)

    def activation_func(self) -> None:
        return None

    def linear(self) -> type:
        return ColumnParallelLinear  # whose outputs multi_latent_attention gathers


class LocalProvider(SpecProvider):
    """The same with the names of Megatron's local specs: norms are modules of their own."""

    def fuse_layernorm_and_linear(self) -> bool:
        return False

    def column_parallel_layer_norm_linear(self) -> None:
        return None


class NoLayer:
    """A class without objects, where Megatron asks whether a layer is a TELinear."""

    def __init__(self, *args: Any, **options: Any) -> None:
        raise NotImplementedError(
            "moe_latent_size: expected None with minifloat.megatron.backend(), whose modules have "
            "no such layer but Transformer Engine's"
        )


# The names in Megatron's modules that build specs, where it looks its providers and norms up.
REPLACED = {
    "LocalSpecProvider": LocalProvider,
    "TESpecProvider": SpecProvider,
    "LNImpl": Norm,
    "TENorm": Norm,
    "TELinear": NoLayer,  # without Transformer Engine it is no class
}
# The modules of Transformer Engine in specs that Megatron builds when it is imported.
MODULES = {
    "TEColumnParallelLinear": ColumnParallelLinear,
    "TERowParallelLinear": RowParallelLinear,
    "TELayerNormColumnParallelLinear": LayerNormColumnParallelLinear,
    "TEColumnParallelGroupedLinear": ColumnParallelGroupedLinear,
    "TERowParallelGroupedLinear": RowParallelGroupedLinear,
    "TEDotProductAttention": DotProductAttention,
    "TENorm": Norm,
}
LOCK = threading.RLock()  # of those names


def replaced(spec: Any) -> Any:
    """Returns a spec of Megatron-Core with minifloat's modules in place of Transformer Engine's."""
    for name, module in MODULES.items():
        if spec is not None and spec is getattr(transformer_engine, name):
            return module
    if isinstance(spec, partial):
        options = {name: replaced(value) for name, value in spec.keywords.items()}
        return partial(spec.func, *map(replaced, spec.args), **options)
    if dataclasses.is_dataclass(spec) and not isinstance(spec, type):
        parts = {f.name: replaced(getattr(spec, f.name)) for f in dataclasses.fields(spec)}
        return dataclasses.replace(spec, **parts)
    if isinstance(spec, (list, tuple)):
        return type(spec)(map(replaced, spec))
    if isinstance(spec, dict):
        return {name: replaced(value) for name, value in spec.items()}
    return spec


@contextmanager
def backend() -> Iterator[Callable[[Any], Any]]:
    """Has Megatron-Core build specs and models of minifloat's modules, while the statement runs.

    With use_transformer_engine=True, or by the functions named so, the parameters have the names of
    Transformer Engine's modules, else those of local specs. Names in Megatron's modules are
    replaced for the statement, for all threads.

    Returns:
        A context manager, whose value is a function: it replaces Transformer Engine's modules in a
        spec that Megatron has built before, such as hybrid_stack_spec.

    Example:
        >>> with minifloat.megatron.backend():  # doctest: +SKIP
        ...     spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
        ...     model = GPTModel(config, spec, vocab_size, max_sequence_length)
    """
    with LOCK, ExitStack() as stack:
        for name, module in list(sys.modules.items()):
            if not name.startswith(("megatron.core.models.", "megatron.core.transformer.")):
                continue
            builds_specs = hasattr(module, "LocalSpecProvider")
            for attribute, value in REPLACED.items():
                # Without Transformer Engine some names are absent where specs are built.
                if builds_specs or hasattr(module, attribute):
                    stack.enter_context(patch.object(module, attribute, value, create=True))
        yield replaced
