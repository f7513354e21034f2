"""Computes experts that the ranks of one mesh dimension shard along the hidden width I.

The weights are w1, w3 (E, I, D) and w2 (E, D, I). cut_along_width
(distributed/tensor_parallel/experts.py) makes them DTensors. Each rank computes with its part of I,
so its rows of y are partial sums. The op grouped_mlp adds them up over the ranks.

torch.compile does not trace the forward of such experts. Compiled code calls it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...nn.cache.operand_cache import compute_dtype
from ...nn.grouped_product import ProductCall, Sharding, product_of
from ...nn.registry import is_distributed
from ..feed_forward import order_rows, uncompiled

EXPECTED = (
    "expected w1, w3 and their biases as DTensors with Shard(1), w2 with Shard(2), a fused w13 "
    "(E, 2, I, D) and its bias (E, 2, I) with Shard(2), over one mesh dimension"
)


def are_cut(weights: Iterable[Any]) -> bool:
    """Tells whether ranks cut a weight of experts along I."""
    cuts = (cut for weight in weights if is_distributed(weight) for cut in weight.placements)
    return any(getattr(cut, "dim", 0) > 0 for cut in cuts)


def require_cut(parameter: Any, name: str, title: str) -> None:
    """Raises ValueError where ranks do not cut a parameter of experts as they should.

    Args:
        parameter: a weight or a bias; None: there is none.
        name: of the parameter.
        title: of the parameter, for errors.
    """
    if parameter is None or (name == "b2" and not is_distributed(parameter)):
        return
    # Loads DTensor, which experts that are not sharded do without.
    from ...distributed.tensor_parallel.experts import placement_of

    placement = placement_of(name)
    is_one_dim = is_distributed(parameter) and parameter.device_mesh.ndim == 1
    dims = {"w13": 4, "b13": 3, "b1": 2, "b3": 2, "b2": 2}.get(name, 3)
    is_right = is_one_dim and tuple(parameter.placements) == (placement,)
    if not is_right or parameter.dim() != dims:
        got = getattr(parameter, "placements", "no mesh")
        raise ValueError(f"{title}: {EXPECTED}, got {name} {tuple(parameter.shape)} with {got}")
    dim, ranks = getattr(placement, "dim", None), parameter.device_mesh.size()
    if dim is not None and parameter.shape[dim] % ranks:
        raise ValueError(
            f"{title}: expected I as a multiple of the ranks, got {parameter.shape[dim]} over "
            f"{ranks} ranks"
        )


# ---- the forward ---------------------------------------------------------------------------------


def cut_calls(module: Any, weights: Sequence[Any], x: Tensor) -> list[ProductCall]:
    """Returns the products of experts that ranks cut along I, as a forward of x calls them.

    Raises:
        ValueError: parameters do not fit each other.
    """
    found = []
    for name, weight in zip(module.weight_names, weights):
        product = product_of(module, name)
        require_cut(weight, name, name if product is None else product.fqn)
        if product is None:
            found.append(ProductCall())
            continue
        # A gradient of the rows of w2 always exists, that of routing weights.
        found.append(
            product.prepare(
                weight,
                x,
                needs_columnwise=name == "w2" or x.requires_grad,
                ranks=weight.device_mesh.get_group(),
                weight_dim=1 if name == "w2" else 0,
            )
        )
    for name in (*module.bias_names, "b2"):
        require_cut(getattr(module, name), name, name)
    return found


@uncompiled
def forward_cut(
    module: Any,
    weights: Sequence[Any],
    x_TD: Tensor,
    indices_Tk: Tensor,
    weights_Tk: Tensor,
    token_ids_T: Tensor | None,
) -> Tensor:
    """Computes the forward of Experts: of its parameters, and the arguments of Experts.forward."""
    x = x_TD.to(compute_dtype(x_TD))
    calls = cut_calls(module, weights, x)
    ranks = Sharding.of(weights[-1].device_mesh.get_group())
    products = module.products(weights, calls, sharding=ranks)
    order = order_rows(indices_Tk, module.experts, token_ids_T)
    with torch.autocast(x.device.type, enabled=False):
        return products.sum_slots(x, indices_Tk, weights_Tk, order)
