"""The forward of tensor-parallel experts: ranks cut the weights of mf.MoE along I.

Compiled code calls it and does not trace it.

This module is imported at the first such forward: torch.compiler.disable imports the compiler.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..._native import ops
from ...nn.cache.operand_cache import conditions_of_ranks
from ...nn.grouped_product import (
    GroupedProduct,
    ProductCall,
    Sharding,
    local_of,
    matrix_of,
    product_of,
)
from ...nn.state.random_state import require_shared_seed
from ...tensor.quantized_tensor import QuantizedTensor
from ..feed_forward import Matrices, Plan, compute_dtype, run_experts
from ..permute import order_rows
from .cut_experts import require_cut


def cut_calls(module: Any, x: Tensor) -> list[ProductCall]:
    """Returns the products of experts that ranks cut along I, as a forward of x calls them.

    Raises:
        ValueError: parameters do not fit each other.
    """
    found = []
    for name in module.weight_names:
        product = product_of(module, name)
        weight = require_cut(module, name, name if product is None else product.fqn)
        # A gradient of the rows of w2 always exists, that of routing weights.
        needs_columnwise = name == "w2" or x.requires_grad
        if product is None:
            found.append(ProductCall())
        else:
            found.append(begin_product(product, name, weight, x, needs_columnwise))
    for name in (*module.bias_names, "b2"):
        require_cut(module, name, name)
    return found


def begin_product(
    product: GroupedProduct, name: str, weight: Any, x: Tensor, needs_columnwise: bool
) -> ProductCall:
    """Begins a product: draws its random bits, and casts a weight whose codes are not cached."""
    local, mesh = weight._local_tensor, weight.device_mesh
    rng = product.draw_rng(x.device)
    if product.rng_state is not None:
        require_shared_seed(product.rng_state, mesh.get_group(), product.fqn)
    history = product.step_history()
    columnwise = torch.is_grad_enabled() and needs_columnwise
    operands: list[Tensor] | None
    if isinstance(local, QuantizedTensor):
        operands = local.operands(product.recipe, columnwise)
    else:
        where = {**sharding_of(mesh)._asdict(), "weight_dim": 1 if name == "w2" else 0}
        operands = cached_operands(product, weight, x, columnwise, history, where)
    return ProductCall(
        product.recipe.text,
        rng,
        product.stream_id,
        history,
        operands,
        recompute=product.recompute,
    )


def sharding_of(mesh: DeviceMesh) -> Sharding:
    """Returns this rank's place among those that cut the weights."""
    return Sharding(mesh.get_group().group_name, mesh.get_local_rank(), mesh.size())


def three_dims(weight: Tensor) -> Tensor:
    """Returns a rank's weight (E, N, K): of a fused w13, gate above up."""
    return weight.flatten(1, 2) if weight.dim() == 4 else weight


def cached_operands(
    product: GroupedProduct,
    weight: Any,
    x: Tensor,
    columnwise: bool,
    history: Tensor | None,
    where: dict[str, Any],
) -> list[Tensor] | None:
    """Returns the cached operands of this rank's weight; None where the op is to quantize it.

    where: of the rank's cut, as the op layer_operands takes it.
    """
    cache = product.cache_of(weight)
    is_cast = weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type)
    if cache is None or is_cast:
        return None
    local, recipe = weight._local_tensor, product.recipe.text
    conditions, is_shown = conditions_of_ranks(local, x, weight.device_mesh.get_group())
    cast = partial(
        ops.layer_operands.default,
        three_dims(local).to(x.dtype),
        recipe,
        "w",
        amax_history=history,
        **where,
    )
    with torch.no_grad():
        return cache.operands(
            weight,
            recipe,
            columnwise,
            conditions,
            product.is_in_step(),
            cast,
            is_shown,
            saves_weight=bool(product.recompute),
        )


@torch.compiler.disable
def forward_cut(
    module: Any, x_TD: Tensor, indices_Tk: Tensor, weights_Tk: Tensor, token_ids_T: Tensor | None
) -> Tensor:
    """Computes the forward of Experts; the arguments are those of Experts.forward."""
    x = x_TD.to(compute_dtype(x_TD))
    *inputs, output = cut_calls(module, x)
    biases = [getattr(module, name) for name in module.bias_names]
    weights_of_rank = [local_of(getattr(module, name)) for name in module.input_names]
    matrices = Matrices(
        tuple(matrix_of(three_dims(weight)) for weight in weights_of_rank),
        tuple(bias if bias is None else local_of(bias).flatten(1) for bias in biases),
        matrix_of(module.w2),
    )
    order = order_rows(indices_Tk, module.experts, token_ids_T)
    plan = Plan(module.gate, tuple(inputs), output, sharding=sharding_of(module.w2.device_mesh))
    output_bias = None if module.b2 is None else local_of(module.b2)  # whole on each rank
    with torch.autocast(x.device.type, enabled=False):
        return run_experts(plan, x, indices_Tk, weights_Tk, order, matrices, output_bias)
