"""What mf.quantize_ asks of Megatron-Core's layers (nn/registry.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import nn

from ..nn.accumulation import MAIN_GRAD
from ..nn.linear import adopt, restore_linear
from ..nn.linear_state import LinearState
from ..nn.registry import Choice, distributed_functions
from ..nn.state.recipe_state import WEIGHT_DTYPES, DelayedScaling
from .codes import gather_codes
from .grouped import GroupedLinear
from .linear import WEIGHT_DIMS, form_of, reason_against
from .versions import LEGACY_EXPERTS

TRANSFORMER_ENGINE = "transformer_engine"
PARALLEL = tuple(WEIGHT_DIMS)


class MegatronLayers:
    """The registry's LibraryLayers for Megatron-Core."""

    def is_layer(self, module: nn.Module) -> bool:
        is_own = isinstance(module, (*PARALLEL, GroupedLinear, *LEGACY_EXPERTS))
        return is_own or is_of_transformer_engine(module)

    def reason(self, module: nn.Module) -> str | None:
        if is_of_transformer_engine(module):
            return (
                "a layer of Transformer Engine, which casts by itself; build the spec and the "
                "model within minifloat.megatron.backend()"
            )
        if isinstance(module, LEGACY_EXPERTS):
            return (
                "experts that multiply by the package grouped_gemm; build the model within "
                "minifloat.megatron.backend(), or with moe_grouped_gemm=False"
            )
        if isinstance(module, GroupedLinear):
            why, weights = module.reason(), module.weights
        else:
            why, weights = reason_against(module), list(module.parameters())
        if why is None and (dtype := weights[0].dtype) not in WEIGHT_DTYPES:
            why = f"its weight is {dtype}; expected float32 or bfloat16"
        return why

    def weights(self, module: nn.Module) -> tuple[str, ...]:
        if isinstance(module, GroupedLinear):
            return tuple(f"weight{i}" for i in range(module.num_gemms))
        return ("weight",)

    def convert(self, choice: Choice, delayed: DelayedScaling) -> list[Any]:
        module: Any = choice.module
        is_divided = module.is_expert and module.config.expert_model_parallel_size > 1
        if is_divided and choice.recipe.is_delayed:
            raise ValueError(
                f"{choice.fqn}: expected a recipe without delayed scaling for experts that ranks "
                f"divide (expert_model_parallel_size), got {choice.recipe}"
            )
        state: Any
        if isinstance(module, GroupedLinear):
            state = module.convert(choice.recipe, choice.fqn, delayed)
        else:
            form = form_of(cast(Any, type(module)))
            state = adopt(module, choice.recipe, choice.fqn, delayed, form=form)
            if module.config.gradient_accumulation_fusion:
                state.accumulate = MAIN_GRAD
        state.is_of_rank = is_divided
        return [state]

    def hold_codes(self) -> None:
        gather_codes()

    def restore(self, module: nn.Module) -> None:
        if isinstance(module, GroupedLinear):
            module.restore()
        elif isinstance(module, LinearState):
            restore_linear(module)

    def numbers(self, module: nn.Module) -> Mapping[str, int]:
        if isinstance(module, SequentialMLP):
            first = module.ep_group.rank() * module.num_local_experts
            return {f"local_experts.{i}": first + i for i in range(module.num_local_experts)}
        found = {}
        for name, child in module.named_children():
            for i, block in enumerate(child if isinstance(child, nn.ModuleList) else ()):
                if isinstance(number := getattr(block, "layer_number", None), int):
                    found[f"{name}.{i}"] = number - 1
        return found

    def blocks(self, model: nn.Module) -> tuple[str, int] | None:
        blocks = getattr(getattr(model, "decoder", None), "layers", None)
        has_list = isinstance(blocks, nn.ModuleList)
        return ("decoder.layers", cast(Any, model).config.num_layers) if has_list else None

    def stage(self, model: nn.Module) -> int | None:
        group = getattr(getattr(model, "pg_collection", None), "pp", None)
        if group is None and parallel_state.is_initialized():
            group = parallel_state.get_pipeline_model_parallel_group()
        if group is None or group.size() == 1:
            return None
        virtual = getattr(model, "vp_stage", None) or 0
        return int(group.rank() + group.size() * virtual)

    def require_same(self, layers: list[str]) -> None:
        if not parallel_state.is_initialized():
            return
        group = parallel_state.get_tensor_model_parallel_group()
        if group.size() > 1:
            distributed_functions.require_same_names("mf.quantize_ of", layers, group)

    def data_parallel_rank(self) -> int:
        if not parallel_state.is_initialized():
            return 0
        return int(parallel_state.get_data_parallel_rank(with_context_parallel=True))


def is_of_transformer_engine(module: nn.Module) -> bool:
    """Tells whether a module is a linear layer of Transformer Engine."""
    return any(
        cls.__module__.startswith(TRANSFORMER_ENGINE) and "Linear" in cls.__name__
        for cls in type(module).__mro__
    )


LAYERS = MegatronLayers()
