"""The forward of mf.MoE's experts where ranks cut the weights along I. Compiled code calls it and
does not trace it.

This module is imported at the first such forward: torch.compiler.disable imports the compiler.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..._native import ops
from ...nn.cache.operand_cache import conditions_of_ranks
from ...nn.expert_parameters import local_of, matrix_of
from ...nn.grouped_product import GroupedProduct, ProductCall, Sharding, product_of
from ...nn.state.random_state import require_shared_seed
from ...tensor.quantized_tensor import QuantizedTensor
from ..functional import Matrices, Plan, compose, compute_dtype, weighted_biases
from ..permute import order_rows, sum_of_slots
from .cut_experts import FUSED, require_cut


class CopyToRanks(torch.autograd.Function):
    """A tensor that is whole on each rank; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' tensors, on each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class OfFirstRank(torch.autograd.Function):
    """A term of a sum over ranks: the identity on the first rank, zeros on the others.

    Its gradient is that of the sum, on each rank.
    """

    @staticmethod
    def forward(ctx: Any, term: Tensor, is_first: bool) -> Tensor:
        return term.view_as(term) if is_first else torch.zeros_like(term)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def cut_calls(module: Any, x: Tensor) -> list[ProductCall]:
    """Returns the products of experts that ranks cut along I, as a forward of x calls them.

    Raises:
        ValueError: parameters do not fit each other.
    """
    found = []
    for name in module.weight_names:
        product = product_of(module, name)
        weight = require_cut(module, name, name if product is None else product.fqn)
        mesh, parts = weight.device_mesh, 2 if name in FUSED else 1
        dim = 1 if name == "w2" else 0  # of (N, K)
        ranks = mesh.get_local_rank(), mesh.size()
        call = ProductCall(sharding=Sharding(mesh.get_group().group_name, *ranks, dim, parts))
        if product is not None:
            # A gradient of the rows of w2 always exists, that of routing weights.
            needs_columnwise = name == "w2" or x.requires_grad
            call = prepared(call, product, weight, x, needs_columnwise)
        found.append(call)
    for name in (*module.bias_names, "b2"):
        require_cut(module, name, name)
    return found


def prepared(
    call: ProductCall, product: GroupedProduct, weight: Any, x: Tensor, needs_columnwise: bool
) -> ProductCall:
    """Returns the product of a forward now: with its random bits, history and cached weight."""
    local, group = weight._local_tensor, weight.device_mesh.get_group()
    rng = product.draw_rng(x.device)
    if product.rng_state is not None:
        require_shared_seed(product.rng_state, group, product.fqn)
    made = replace(
        call,
        recipe=product.recipe.text,
        rng=rng,
        stream=product.stream_id,
        history=product.step_history(),
        recompute=product.recompute,
    )
    columnwise = torch.is_grad_enabled() and needs_columnwise
    if isinstance(local, QuantizedTensor):
        return replace(made, operands=local.operands(product.recipe, columnwise))
    return replace(made, operands=cached_operands(made, product, weight, x, columnwise, group))


def three_dims(weight: Tensor) -> Tensor:
    """Returns a rank's weight (E, N, K): of a fused w13, gate above up."""
    return weight.flatten(1, 2) if weight.dim() == 4 else weight


def cached_operands(
    call: ProductCall,
    product: GroupedProduct,
    weight: Any,
    x: Tensor,
    columnwise: bool,
    group: dist.ProcessGroup,
) -> list[Tensor] | None:
    """Returns the cached operands of this rank's weight; None where the op is to quantize it."""
    cache, sharding = product.cache_of(weight), call.sharding
    is_cast = weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type)
    if cache is None or sharding is None or is_cast:
        return None
    local = weight._local_tensor
    conditions, is_shown = conditions_of_ranks(local, x, group)
    cast = partial(
        ops.layer_operands.default,
        three_dims(local).to(x.dtype),
        call.recipe,
        "w",
        amax_history=call.history,
        group=sharding.group,
        rank=sharding.rank,
        ranks=sharding.ranks,
        weight_dim=sharding.weight_dim,
    )
    with torch.no_grad():
        return cache.operands(
            weight,
            call.recipe,
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
    values = x_TD.to(compute_dtype(x_TD))
    *inputs, output = cut_calls(module, values)
    mesh = module.w2.device_mesh
    group = mesh.get_group()
    x, weights = (CopyToRanks.apply(t, group) for t in (values, weights_Tk))
    biases = [getattr(module, name) for name in module.bias_names]
    weights_of_rank = [local_of(getattr(module, name)) for name in module.input_names]
    matrices = Matrices(
        tuple(matrix_of(three_dims(weight)) for weight in weights_of_rank),
        tuple(bias if bias is None else local_of(bias).flatten(1) for bias in biases),
        matrix_of(module.w2),
    )
    order = order_rows(indices_Tk, module.experts, token_ids_T)
    plan = Plan(module.gate, tuple(inputs), output)
    base = None
    if module.b2 is not None:  # whole on each rank
        whole = weighted_biases(indices_Tk, weights_Tk, local_of(module.b2))
        base = OfFirstRank.apply(whole, mesh.get_local_rank() == 0)
    with torch.autocast(x.device.type, enabled=False):
        rows = compose(plan, x, weights, order, matrices)
        return SumOverRanks.apply(sum_of_slots(rows, order, base), group)
