"""torchtitan's experts, converted.

CountedExperts, of torchtitan 0.2, have rows in the order of the experts, and each expert's count:

    rows of expert 0 | rows of expert 1 | … | rows that belong to no expert
    gate, up = rows · w1ᵀ, rows · w3ᵀ        h = SwiGLU(gate, up)        y = h · w2ᵀ

Their own forward multiplies bfloat16 values by torch's grouped_mm. A group may have any number of
rows here. Expert parallelism is torchtitan's: each rank has some experts of all.

GroupedMmExperts multiply by a method _grouped_mm, which alone is replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ...nn.grouped_product import GroupedProduct, ProductCall, call_of, matrix_of, product_of
from ...nn.hooks import is_distributed
from ...nn.names import PRODUCT, join
from ...nn.state.recipe_state import ExpertRange
from ..feed_forward import Matrices, Plan, compute, compute_dtype
from ..permute import Order
from ..swiglu import Gate
from .converted import Converted, multiply
from .same_forward import compare_forward, compare_grouped_mm, counted_calls

NAMES = ("w1", "w2", "w3")  # (E, I, D), (E, D, I), (E, I, D)
# The activation is in a module's code, not in its parameters, so modules are known by class.
CLASSES = (("torchtitan.models.moe.moe", "GroupedExperts"),)


class CountedExperts(Converted):
    """torchtitan's experts, called with rows and their counts."""

    @staticmethod
    def fits(module: nn.Module) -> bool:
        return (type(module).__module__, type(module).__name__) in CLASSES

    @staticmethod
    def reason_against(module: nn.Module) -> str | None:
        return compare_forward(module, NAMES[1], False, CountedExperts.forward, counted_calls)

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        for name in NAMES:
            keep_own_experts(self, name)
        rows = x.to(compute_dtype(x))
        ids = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
        offs = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
        order = Order(ids, ids[:, None], offs, ids)  # each row is a token of its own, with one slot
        calls = [call_of(self, name, rows, needs_columnwise=True) for name in ("w1", "w3", "w2")]
        b1, b3, b2 = (matrix_of(self.get_parameter(name)) for name in ("w1", "w3", "w2"))
        plan = Plan(Gate(), (calls[0], calls[1]), calls[2])
        ones = torch.ones(rows.shape[0], 1, dtype=torch.float32, device=rows.device)
        matrices = Matrices((b1, b3), (None, None), b2)
        return compute(plan, rows, ones, order, matrices, sums=False).type_as(x)


def keep_own_experts(module: nn.Module, name: str) -> None:
    """Tells a product which experts this rank has, where torchtitan divides them.

    Raises:
        ValueError: ranks shard each expert's matrix, which no product here can multiply exactly.
    """
    weight, product = module.get_parameter(name), product_of(module, name)
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


class GroupedMmExperts(Converted):
    """A module with torchtitan's method. Its products are numbered in the order of the calls."""

    PRODUCT_NAME = "grouped_mm_{}"

    @staticmethod
    def fits(module: nn.Module) -> bool:
        method = getattr(type(module), "_grouped_mm", None)
        return callable(method) and {"A", "B_t", "offs"} <= {*inspect.signature(method).parameters}

    @staticmethod
    def reason_against(module: nn.Module) -> str | None:
        return compare_grouped_mm(module, ProductCall().multiply)

    @classmethod
    def number_products(
        cls, module: nn.Module, names: Sequence[str], products: Sequence[GroupedProduct], fqn: str
    ) -> None:
        """Names products, so far called by parameters, by their number among a forward's calls."""
        for i, (name, product) in enumerate(zip(names, products)):
            del module._modules[name + PRODUCT]
            product.rename(join(fqn, cls.PRODUCT_NAME.format(i)))
            module.add_module(cls.PRODUCT_NAME.format(i) + PRODUCT, product)

    def forward(self, *args: object, **kwargs: object) -> object:
        self._calls = 0
        return super().forward(*args, **kwargs)

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        product = product_of(self, self.PRODUCT_NAME.format(self._calls))
        if product is None:
            raise RuntimeError(
                f"{self.original.__name__}: expected a product for each 3D parameter in a forward, "
                f"got a call of _grouped_mm after {self._calls} of them"
            )
        self._calls += 1
        return multiply(self, product, A, B_t, offs)
