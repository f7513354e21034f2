"""Megatron-Core's ColumnParallelLinear and RowParallelLinear under a recipe.

Megatron's own forward places tensors over the tensor-parallel ranks, and calls _forward_impl for
the product. A converted layer has Megatron's class with another _forward_impl. So parameters, their
names, initialization and distributed checkpoints stay Megatron's.

    tensor parallel      the op linear_sharded: each rank casts its shard to the bytes that it has
                         in the whole operand. Row blocks of the weight are those of Megatron's
                         shards: of a fused gate and up, first this rank's gate, then its up.
    sequence parallel    codes of the input are gathered, where runs of tokens end between blocks;
                         else its values
"""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any, ClassVar

import torch
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from .._native import ops
from ..nn.accumulation import weight_sums
from ..nn.grouped_product import Sharding
from ..nn.linear_state import LinearState, needs_gradient, weight_operands
from ..nn.state.random_state import require_shared_seed


class MegatronLinear(LinearState):
    """The part of a converted class that computes the product of a rank's shard."""

    weight_dim: ClassVar[int]  # of W (N, K), which tensor-parallel ranks cut
    tp_group: torch.distributed.ProcessGroup

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        allreduce_dgrad: bool = False,
        sequence_parallel: bool = False,
        **others: object,
    ) -> Tensor:
        """Computes the product, as Megatron's _forward_impl does.

        Args:
            input: (tokens of this rank, …, K) under sequence parallelism; else (…, K).
            weight: (N, K), this rank's shard.
            bias: (N), or None.
            allreduce_dgrad: whether the gradient of the input is summed over the ranks here.
            sequence_parallel: whether the ranks cut the input along its first dimension.
            others: Megatron's, which reason_against has refused, or whose layer has them too.
        """
        group, token_dim = self.tp_group, None
        if group.size() == 1:
            return self.multiply(input, weight, bias)
        if sequence_parallel:
            run, multiple = math.prod(input.shape[:-1]), ops.token_unit(self.recipe.text)
            if multiple > 0 and run % multiple == 0:
                token_dim = 0
            else:
                input = gather_from_sequence_parallel_region(
                    input, tensor_parallel_output_grad=True, group=group
                )
        if self.rng_state is not None:
            require_shared_seed(self.rng_state, group)
        shards = Sharding.of(group)._asdict() | {"weight_dim": self.weight_dim}
        sums, given = weight_sums(self, weight), self.op_state(weight.device)
        history, has_dgrad = given.get("amax_history"), needs_gradient(input)
        operands = weight_operands(weight, self.recipe, has_dgrad, history)
        if operands is None:
            operands = self.cached_operands(
                self.weight_codes, weight, weight, input, has_dgrad, history, group, **shards
            )
        return ops.linear_sharded.default(
            input,
            weight,
            bias,
            self.recipe.text,
            token_dim=token_dim,
            sum_dx=allreduce_dgrad,
            weight_operands=operands,
            recompute=self.recompute,
            **shards,
            **given,
            **sums,
        )

    def set_extra_state(self, state: Any) -> None:
        drop_extra_state(state)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, recipe={self.recipe.text!r})"


def drop_extra_state(state: Any) -> None:
    """Drops the scales and histories that Transformer Engine saved beside a weight."""
    if state is None or (isinstance(state, Tensor) and state.numel() == 0):
        return
    warnings.warn(  # of all layers here, so that Python shows it once
        "minifloat: _extra_state is that of Transformer Engine's scaling, and is not loaded; "
        "mf.load_training_state loads minifloat's",
        stacklevel=1,
    )


WEIGHT_DIMS = {ColumnParallelLinear: 0, RowParallelLinear: 1}  # of W, which ranks cut


@cache
def form_of(cls: type[nn.Module]) -> type[MegatronLinear]:
    """Returns the class of a converted layer, of one of Megatron's or derived from one."""
    members = {
        "weight_dim": next(dim for base, dim in WEIGHT_DIMS.items() if issubclass(cls, base)),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
    }
    return type(cls.__name__, (MegatronLinear, cls), members)


# Modules whose outputs Megatron frees and computes again.
NEEDS_TRANSFORMER_ENGINE = {"moe_act", "layernorm", "mla_up_proj"}
# Options of a TransformerConfig that other layers have and converted ones would ignore.
OF_TRANSFORMER_ENGINE = (
    "fp8",
    "fp4",
    "fp8_dot_product_attention",
    "fp8_multi_head_attention",
    "quant_recipe",
    "tp_comm_overlap",
    "symmetric_ar_type",
    "delay_wgrad_compute",
    "cpu_offloading",
    "fine_grained_activation_offloading",
    "use_te_activation_func",
    "use_transformer_engine_op_fuser",
    "use_kitchen",
)


def reason_against(module: Any) -> str | None:
    """Returns why a ColumnParallelLinear or RowParallelLinear cannot be converted; None: it can."""
    base = next(c for c in WEIGHT_DIMS if isinstance(module, c))
    if "forward" in module.__dict__ or "_forward_impl" in module.__dict__:
        return "its forward is replaced on the instance"
    if type(module)._forward_impl is not base._forward_impl:
        return f"{type(module).__name__} computes its product itself, in _forward_impl"
    if module._parameters.get("weight") is None:
        return "it has no weight of its own: the caller passes one"
    if getattr(module, "gtp_remat_size", 1) > 1:
        return f"gtp_remat_size = {module.gtp_remat_size}: its weight is gathered in each forward"
    if getattr(module, "grad_output_buffer", None) is not None:
        return "defer_embedding_wgrad_compute: its weight's gradient is computed later"
    return reason_of_config(module.config)


def reason_of_config(config: Any) -> str | None:
    """Returns the option of a TransformerConfig that converted layers would ignore; None: none."""
    recomputed = NEEDS_TRANSFORMER_ENGINE & set(getattr(config, "recompute_modules", None) or ())
    is_selective = config.recompute_granularity == "selective"
    if is_selective and recomputed and not hasattr(random, "FP8GlobalStateManager"):
        return (
            f"recompute_modules: {', '.join(sorted(recomputed))}: Megatron's own code for them "
            "needs Transformer Engine, which is not installed"
        )
    if (graphs := getattr(config, "cuda_graph_impl", "none")) not in (None, "none"):
        return f"cuda_graph_impl={graphs!r} of the TransformerConfig: expected 'none'"
    for option in OF_TRANSFORMER_ENGINE:
        if value := getattr(config, option, None):
            return (
                f"{option}={value!r} of the TransformerConfig is Transformer Engine's or Kitchen's;"
                " leave it out"
            )
    return None
