"""torchtitan 0.2's experts, converted: rows in the order of the experts, and each expert's count.

    rows of expert 0 | rows of expert 1 | … | rows that belong to no expert
    gate, up = rows · w1ᵀ, rows · w3ᵀ        h = SwiGLU(gate, up)        y = h · w2ᵀ

torchtitan's own forward multiplies bfloat16 values by torch's grouped_mm. A group may have any
number of rows here. Expert parallelism is torchtitan's: each rank has some experts of all.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from ...nn.expert_parameters import matrix_of
from ...nn.grouped_product import call_of, product_of
from ...nn.hooks import is_distributed
from ...nn.state.recipe_state import ExpertRange
from ..functional import ExpertRows, Matrices, Plan, compose, compute_dtype
from ..permute import Order
from ..swiglu import Gate
from .foreign import Converted
from .same_experts import compare_counted

NAMES = ("w1", "w2", "w3")  # (E, I, D), (E, D, I), (E, I, D)
# The activation is in a module's code, not in its parameters, so modules are known by class.
CLASSES = (("torchtitan.models.moe.moe", "GroupedExperts"),)


def has_counts(module: nn.Module) -> bool:
    """Tells whether a module is torchtitan's, and is called with rows and their counts."""
    return (type(module).__module__, type(module).__name__) in CLASSES


class CountedExperts(Converted):
    """torchtitan's experts, converted."""

    @staticmethod
    def reason_against(module: nn.Module) -> str | None:
        return compare_counted(module, NAMES[1], CountedExperts.forward)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        module = cast(Any, self)
        for name in NAMES:
            keep_own_experts(module, name)
        rows = x.to(compute_dtype(x))
        order = order_of_rows(rows, num_tokens_per_expert)
        calls = [call_of(module, name, rows, needs_columnwise=True) for name in ("w1", "w3", "w2")]
        b1, b3, b2 = (matrix_of(module.get_parameter(name)) for name in ("w1", "w3", "w2"))
        plan = Plan(Gate(), (calls[0], calls[1]), calls[2])
        ones = torch.ones(rows.shape[0], 1, dtype=torch.float32, device=rows.device)
        matrices = Matrices((b1, b3), (None, None), b2)
        if torch.compiler.is_compiling():
            return compose(plan, rows, ones, order, matrices).type_as(x)
        return ExpertRows.apply(plan, rows, ones, *order, b1, b3, None, None, b2).type_as(x)


def order_of_rows(rows_MD: Tensor, counts_E: Tensor) -> Order:
    """Returns the order of rows that are in order: each is a token of its own, with one slot."""
    ids = torch.arange(rows_MD.shape[0], dtype=torch.int32, device=rows_MD.device)
    return Order(ids, ids[:, None], counts_E.cumsum(0, dtype=torch.int32), ids)


def keep_own_experts(module: Any, name: str) -> None:
    """Tells a product which experts this rank has, where torchtitan divides them.

    Raises:
        ValueError: ranks cut the experts' matrices, which no product here can multiply exactly.
    """
    weight, product = module._parameters[name], product_of(module, name)
    if not is_distributed(weight) or product is None:
        return
    mesh = weight.device_mesh
    if len(weight.placements) > 1 or not weight.placements[0].is_shard(0):
        raise ValueError(
            f"{type(module).__name__}.{name}: expected whole experts on each rank (expert parallel "
            f"alone), got {weight.placements} over {mesh}; leave experts that tensor parallelism "
            "cuts in bf16, by filter_fqns or a recipe map"
        )
    if product.expert_range is None:
        own, experts = weight.to_local().shape[0], weight.shape[0]
        begin = mesh.get_local_rank() * own
        product.keep_experts(ExpertRange(begin, own, experts, mesh.get_group()))
        product.first_expert = begin
