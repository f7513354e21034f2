"""Computes linear layers whose weight is a DTensor, sharded along N or K over one mesh dimension.

DTensor alone would pass the same origin to the casts of all shards, and would reduce no amax. So a
layer computes on local tensors, in one call of the op linear_sharded. The op casts each shard to
the bytes that it has in the gathered operand. It exchanges amaxes, codes and sums between ranks
(torch/layers/sharding.h). This module derives the op's arguments from DTensors: the dimension that
is sharded, and the group.

torch.compile traces all of it. Only eager code reuses codes between forwards and compares seeds.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..._native import ops
from ...nn.cache.operand_cache import SharedInput, conditions_of
from ...nn.linear import Linear
from ...nn.linear_state import needs_gradient, weight_operands
from ...nn.state.random_state import require_shared_seed
from ...recipe import Recipe

Shards = dict[str, object]  # the ranks that have cut a weight, as the ops take them


def linear(
    x: Tensor,
    weight: DTensor,
    bias: Tensor | None,
    recipe: Recipe,
    *,
    rng: Tensor | None = None,
    amax_history: Tensor | None = None,
    stream: int = 0,
    layer: Linear | None = None,
    recompute: str = "",
) -> Tensor:
    """Computes mf.linear with a DTensor weight.

    Args:
        x: DTensor (…, K) over the weight's mesh, float32 or bfloat16.
        weight: DTensor (N, K), Shard(0), Shard(1) or Replicate() over one mesh dimension.
        bias: (N), or None; its local tensor fits the rows of the local weight.
        recipe: the formats of the three products.
        rng: int64 (seed, count[, module stream]), where the recipe rounds stochastically.
        amax_history: float32 (6, 1 + length), under delayed scaling; written in place.
        stream: the module's stream of random bits, XORed with the one in rng.
        layer: whose cached operands are reused; None: nothing is reused.
        recompute: "weight" where backward quantizes the weight again; "": it saves codes.

    Returns:
        DTensor (…, N): cut along N where the weight is, Partial() where it is cut along K.

    Raises:
        ValueError: x and weight do not fit, or ranks cut a block of a prequantized weight.
    """
    x, mesh, dim = require_inputs(x, weight), weight.device_mesh, shard_dim_of(weight)
    local_weight, local_bias = local(weight), None if bias is None else local(bias)
    options = {"rng": rng, "amax_history": amax_history, "stream": stream, "recompute": recompute}
    placement: Placement
    if dim is None:  # every rank multiplies all tokens
        values = local(x.redistribute(placements=[Replicate()]))
        w_operands = weight_operands(local_weight, recipe, needs_gradient(values), amax_history)
        y = ops.linear.default(
            values, local_weight, local_bias, recipe.text, weight_operands=w_operands, **options
        )
        placement = Replicate()
    else:
        shards: Shards = {
            "group": mesh.get_group().group_name,
            "rank": mesh.get_local_rank(),
            "ranks": mesh.size(),
            "weight_dim": dim,
        }
        placed_x, token_dim = placed(x, recipe, dim)
        is_whole = dim == 0 and token_dim is None
        values = local(placed_x, Partial() if is_whole else None)
        x_operands, gathered = None, None
        if layer is not None and layer.shared_input is not None:
            x_operands, gathered = shared_operands(
                layer.shared_input, x, values, weight, recipe, {**shards, "token_dim": token_dim}
            )
        w_operands = shard_operands(layer, weight, x, recipe, amax_history, shards)
        y = ops.linear_sharded.default(
            values,
            local_weight,
            local_bias,
            recipe.text,
            token_dim=token_dim,
            x_operands=x_operands,
            weight_operands=w_operands,
            gathered=gathered,
            **shards,
            **options,
        )
        placement = Shard(y.dim() - 1) if dim == 0 else Partial()
    if recompute and w_operands is None:
        require_unchanged(y, weight)
    return DTensor.from_local(y, mesh, [placement], run_check=False)


def require_inputs(x: Tensor, weight: DTensor) -> DTensor:
    """Returns x; raises ValueError where it does not fit the weight."""
    mesh = weight.device_mesh
    if not isinstance(x, DTensor) or x.device_mesh != mesh:
        got = f"one over {x.device_mesh}" if isinstance(x, DTensor) else type(x).__name__
        raise ValueError(f"linear: expected x as a DTensor over the weight's {mesh}, got {got}")
    if weight.dim() != 2 or x.dim() == 0 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"linear: expected weight (N, K) for x (…, K), got {tuple(weight.shape)} for "
            f"{tuple(x.shape)}"
        )
    return x


# ---- where tensors are cut -----------------------------------------------------------------------


def shard_dim_of(weight: DTensor) -> int | None:
    """Returns the dimension of W that the mesh cuts evenly; None: every rank has all of it."""
    (placement, *others) = weight.placements
    if not others and placement.is_replicate():
        return None
    if others or type(placement) is not Shard:
        raise ValueError(
            "linear: expected a weight that is Shard(0), Shard(1) or Replicate() over one mesh "
            f"dimension, got {weight.placements} over {weight.device_mesh}"
        )
    dim, world = placement.dim, weight.device_mesh.size()
    if weight.shape[dim] % world:
        raise ValueError(
            f"linear: expected {'NK'[dim]} as a multiple of the ranks, got {'NK'[dim]} = "
            f"{weight.shape[dim]} over {world} ranks"
        )
    return dim


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def token_multiple(recipe: str) -> int:
    """Returns the number that must divide a run of tokens for a gather of codes; 0: no gather."""
    return ops.token_unit(recipe)


def placed(x: DTensor, recipe: Recipe, dim: int) -> tuple[DTensor, int | None]:
    """Redistributes x for a weight cut along `dim`; also returns the token dimension still cut."""
    (placement,) = x.placements
    last = x.dim() - 1
    if dim == 1:
        return x.redistribute(placements=[Shard(last)]), None
    if type(placement) is Shard and placement.dim < last:
        at, world, multiple = placement.dim, x.device_mesh.size(), token_multiple(recipe.text)
        run = math.prod(x.shape[at:last]) // world
        if multiple > 0 and x.shape[at] % world == 0 and run % multiple == 0:
            return x, at
    return x.redistribute(placements=[Replicate()]), None


def local(t: Tensor, grad_placement: Placement | None = None) -> Tensor:
    """Returns the local tensor of a DTensor; any other tensor unchanged."""
    if not isinstance(t, DTensor):
        return t
    return t.to_local(grad_placements=None if grad_placement is None else [grad_placement])


def require_unchanged(y: Tensor, weight: DTensor) -> None:
    """Makes backward of y raise an error where the weight is modified in place before.

    torch does not count a write to a DTensor as one to its local tensor, which the op saves.
    """
    if torch.compiler.is_compiling() or not y.requires_grad:
        return
    version = weight._version

    def check(gradient: Tensor) -> None:
        if weight._version != version:
            raise RuntimeError(
                "linear: expected the weight as forward read it, got one that was modified by an "
                f"inplace operation since: version {weight._version}, expected {version}; backward "
                "quantizes it again"
            )

    y.register_hook(check)


# ---- operands that are quantized before the call -------------------------------------------------


def shared_operands(
    shared: SharedInput, x: DTensor, values: Tensor, weight: DTensor, recipe: Recipe, shards: Shards
) -> tuple[list[Tensor], object]:
    """Quantizes x once for all readers whose weights have one placement and need one gradient.

    Args:
        shared: the readers' cache.
        x, weight: of the layer.
        values: this rank's part of x.
        shards: of the weight, with the dimension of x's tokens that is cut.

    Returns:
        The operands of x, and the native GatheredInput where ranks gather them.
    """
    is_trained = torch.is_grad_enabled() and weight.requires_grad

    def quantized() -> tuple[list[Tensor], object]:
        with torch.no_grad():
            operands = ops.layer_operands.default(
                values, recipe.text, "x", columnwise=is_trained, **shards
            )
        if shards["token_dim"] is None:
            return operands, None
        return operands, torch.classes.minifloat.GatheredInput(shared.readers)

    conditions = (*conditions_of(x), weight.placements)
    return shared.operands(x, recipe.text, is_trained, conditions, quantized)


def shard_operands(
    layer: Linear | None,
    weight: DTensor,
    x: DTensor,
    recipe: Recipe,
    amax_history: Tensor | None,
    shards: Shards,
) -> list[Tensor] | None:
    """Returns the shard's prequantized or cached codes; None: linear_sharded quantizes the shard.

    Codes are cached until a rank's shard changes.
    """
    needs_dx = needs_gradient(x)
    prequantized = weight_operands(local(weight), recipe, needs_dx, amax_history)
    if prequantized is not None or layer is None:
        return prequantized
    shard, group = weight._local_tensor, weight.device_mesh.get_group()
    return layer.cached_operands(
        layer.weight_codes, weight, shard, x, needs_dx, amax_history, group, **shards
    )


# ---- the module ----------------------------------------------------------------------------------


def module_linear(layer: Linear, x: Tensor) -> Tensor:
    """Computes the forward of an mf.Linear whose weight is a DTensor."""
    weight, is_compiling = cast(DTensor, layer.weight), torch.compiler.is_compiling()
    state = layer.op_state(weight.device)
    if not is_compiling and layer.rng_state is not None and shard_dim_of(weight) is not None:
        require_shared_seed(layer.rng_state, weight.device_mesh.get_group())
    return linear(
        x,
        weight,
        layer.bias,
        layer.recipe,
        layer=None if is_compiling else layer,
        recompute=layer.recompute,
        **state,
    )
