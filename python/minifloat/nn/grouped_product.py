"""Products of a mixture's experts under a recipe: their state, 3D weights, and the call of the op.

A GroupedProduct is a child of the module that holds the 3D weight. It has no parameters and adds no
key to a state dict. The weight is passed to each call, so references to it stay valid. It may be
sharded by FSDP2, or be codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .._native import ops
from ..private_torch import has_transform, tracing_state
from ..recipe import Recipe, operand_names
from ..spec import Spec
from ..tensor.attributes import attributes_kept
from ..tensor.quantized_tensor import QuantizedTensor
from .cache.operand_cache import WeightCodes, weight_codes
from .names import PRODUCT, is_scripted, join
from .registry import ExpertWeightGather, GatherPlan, distributed_functions, is_distributed
from .state.primary_weights import quantized_again, require_primary_dtype
from .state.random_state import require_shared_seed
from .state.recipe_state import DEFAULT_DELAYED, DelayedScaling, ExpertRange, RecipeState

if TYPE_CHECKING:
    import torch.distributed as dist


class Sharding(NamedTuple):
    """The ranks of a group that cut a weight, as ops take them.

    Args:
        group: its name in torch.distributed.
        rank: this one's number in the group.
        ranks: their number.
    """

    group: str
    rank: int
    ranks: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Sharding:
        """Returns this rank's place in a group."""
        return cls(group.group_name, group.rank(), group.size())


@dataclass(frozen=True)
class ProductCall:
    """The arguments of one grouped product besides its matrices.

    Args:
        recipe: its text.
        rng: int64 (seed, count[, stream]); None: nothing is stochastic.
        stream: of the product, besides one in rng.
        amax_history: float32 (6, E, 1 + length); None: nothing is delayed.
        operands: of the weight, as the op layer_operands returns them; None: cast by the product.
        first_expert: the number of the first matrix among all ranks' experts.
        recompute: "weight" where backward of `multiply` quantizes B again; "": it saves codes.
        reads_values: whether a product reads the weight in high precision.
    """

    recipe: str = "bf16"
    rng: Tensor | None = None
    stream: int = 0
    amax_history: Tensor | None = None
    operands: list[Tensor] | None = None
    first_expert: int = 0
    recompute: str = ""
    reads_values: bool = True

    def multiply(
        self,
        a_MK: Tensor,
        b_EKN: Tensor,
        offs_E: Tensor,
        row_ids_M: Tensor | None = None,
        bias_EN: Tensor | None = None,
    ) -> Tensor:
        """Returns the rows of each group times its matrix, (M, N) in A's dtype."""
        return ops.scaled_grouped_mm(
            a_MK,
            b_EKN,
            offs_E,
            self.recipe,
            out_dtype=a_MK.dtype,
            bias=bias_EN,
            rng=self.rng,
            row_ids=row_ids_M,
            first_expert=self.first_expert,
            amax_history=self.amax_history,
            stream=self.stream,
            weight_operands=self.operands,
            recompute=self.recompute,
        )


class GroupedProduct(RecipeState):
    """The state of one product of experts under a recipe.

    Args:
        recipe: the formats of the three products.
        fqn: the name of the weight, which the stream of random bits comes from.
        weight: its E experts have a state each, on its device.
        delayed: how delayed scaling computes scales.
        is_row_major: whether the weight is (E, K, N).
        gather_plan: how FSDP2 gathers the weight as codes; None: in the compute dtype.

    Attributes:
        first_expert: the number of the weight's first matrix among all ranks' experts. Expert
            parallelism sets it.
        weight_gather: the gathers of the weight as codes; None: FSDP2 has not sharded it.
    """

    weight_gather: ExpertWeightGather | None
    _cached_weight: int | None  # the id of the parameter that weight_codes are of

    def __init__(
        self,
        recipe: Recipe,
        fqn: str,
        weight: Tensor,
        *,
        delayed: DelayedScaling = DEFAULT_DELAYED,
        is_row_major: bool = False,
        gather_plan: GatherPlan | None = None,
    ) -> None:
        super().__init__()
        self.is_row_major, self.gather_plan = is_row_major, gather_plan
        self.first_expert = 0
        local: Tensor = getattr(weight, "_local_tensor", weight)
        self.set_state(recipe, fqn, weight.device, delayed, (local.shape[0],))
        self._forget()

    def keep_experts(self, kept: ExpertRange) -> None:
        """Keeps the state of this rank's experts alone."""
        history = self.amax_history
        if history is not None and history.shape[1] == kept.experts:
            self.amax_history = kept.own(history).clone()
        self.expert_range = kept
        self._forget()

    def prepare(
        self,
        weight: Tensor,
        x: Tensor,
        is_row_major: bool = False,
        needs_columnwise: bool | None = None,
        ranks: dist.ProcessGroup | None = None,
        weight_dim: int | None = None,
    ) -> ProductCall:
        """Returns the arguments of a forward now.

        Args:
            weight: (E, N, K), or (E, K, N) where it is row-major; or a DTensor of which this rank
                has such a part.
            x: the rows that are multiplied, or their tokens.
            is_row_major: whether `weight` is B itself.
            needs_columnwise: whether backward computes a gradient of the rows; None: where x
                requires one.
            ranks: those that cut each matrix; None: they are whole.
            weight_dim: of a matrix, which they cut.
        """
        columnwise = x.requires_grad if needs_columnwise is None else needs_columnwise
        columnwise = columnwise and torch.is_grad_enabled()
        local: Tensor = getattr(weight, "_local_tensor", weight)
        text, state = self.recipe.text, self.op_state(x.device)
        shards: dict[str, Any] = {}
        if ranks is not None:
            shards = Sharding.of(ranks)._asdict() | {"weight_dim": weight_dim}
            if self.rng_state is not None:
                require_shared_seed(self.rng_state, ranks, self.fqn)
        if self.has_loaded_codes and not isinstance(local, QuantizedTensor):
            # Their values and an adapter's. Nothing rounds codes of a checkpoint again.
            text = self.recipe.with_values.text
            return ProductCall(text, first_expert=self.first_expert, **state)
        history = state.get("amax_history")
        operands: list[Tensor] | None = None
        if torch.compiler.is_compiling():
            if isinstance(local, QuantizedTensor):
                w = local.mT if is_row_major else local
                operands = ops.layer_operands.default(w, text, "w", amax_history=history)
        elif not isinstance(local, QuantizedTensor):
            is_plain = tracing_state() is None and not has_transform()  # codes would be constants
            cache = self.cache_of(weight) if is_plain and not x.is_meta else None
            w = local.mT if is_row_major else local
            w = w.flatten(1, 2) if w.dim() == 4 else w
            operands = self.cached_operands(
                cache, weight, w, x, columnwise, history, ranks, **shards
            )
        elif self.weight_gather is not None:
            operands = self.weight_gather.operands(columnwise)
        else:
            operands = local.operands(self.recipe, columnwise, is_row_major)
        return ProductCall(
            text,
            operands=operands,
            first_expert=self.first_expert,
            recompute=self.recompute,
            reads_values=self.recipe.reads_values_of_w,
            **state,
        )

    def cache_of(self, weight: Tensor) -> WeightCodes | None:
        """Returns the cache of the weight's codes, new for another parameter; None: no cache."""
        if self._cached_weight != id(weight):
            self.weight_codes = weight_codes(weight, self.recipe)
            self._cached_weight = id(weight)
        return self.weight_codes

    def _forget(self) -> None:
        """Drops cached operands."""
        self.weight_codes, self._cached_weight = None, None


def product_of(module: nn.Module, name: str) -> GroupedProduct | None:
    """Returns the product of the module's 3D parameter `name`; None where it has no recipe."""
    product = module._modules.get(name + PRODUCT)
    return product if isinstance(product, GroupedProduct) else None


def call_of(
    module: nn.Module,
    name: str,
    weight: Tensor,
    x: Tensor,
    is_row_major: bool = False,
    needs_columnwise: bool | None = None,
) -> ProductCall:
    """Returns the arguments of the product of x and the module's 3D parameter `name`.

    weight: the parameter as this forward reads it: a parametrization computes it at each read.
    """
    product = product_of(module, name)
    if product is None:
        return ProductCall()
    return product.prepare(weight, x, is_row_major, needs_columnwise)


def require_recipe(fqn: str, recipe: Recipe) -> None:
    """Raises ValueError where x or g has 2D blocks, which the end of a group would cut."""
    products = (recipe.fprop, recipe.dgrad, recipe.wgrad)
    texts = [text for product in products for text in (product.a, product.b)]
    for name, text in zip(operand_names(), texts):
        if not name.startswith("w") and Spec.parse(text).block[0] > 1:
            raise ValueError(
                f"{fqn}: expected {name} with blocks of one row, which the end of an expert's rows "
                f"cannot cut, got {text} ({recipe}); name another recipe for it, in a recipe map"
            )


def add_products(
    module: nn.Module,
    names: Sequence[str],
    recipe: Recipe,
    fqn: str,
    *,
    delayed: DelayedScaling = DEFAULT_DELAYED,
    is_row_major: bool = False,
    gather_plan: GatherPlan | None = None,
) -> list[GroupedProduct]:
    """Gives the module's 3D parameters `names` products under a recipe, and returns those.

    Args: as those of mf.quantize_ and GroupedProduct; `fqn` is the module's name.
    """
    products = []
    for name in names:
        product = GroupedProduct(
            recipe,
            join(fqn, name),
            getattr(module, name),
            delayed=delayed,
            is_row_major=is_row_major,
            gather_plan=gather_plan,
        )
        if (parallel := getattr(module, "parallel", None)) is not None:
            product.keep_experts(parallel.expert_range)
        products.append(product.train(module.training))
    for name, product in zip(names, products):
        module.add_module(name + PRODUCT, product)
    return products


def remove_products(module: nn.Module) -> None:
    """Takes the module's products away."""
    for name, child in list(module._modules.items()):
        if isinstance(child, GroupedProduct):
            del module._modules[name]


# ---- 3D parameters -------------------------------------------------------------------------------


class HasProducts:
    """A part of the class of modules with 3D parameters: FSDP2 assigns those that it has sharded.

    FSDP2 assigns through __setattr__ where a module's class defines one.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        product = self.__dict__.get("_modules", {}).get(name + PRODUCT)
        if isinstance(product, GroupedProduct):
            adopt_weight(self, product, name, value)
            product.follow(value)
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HasProducts:
        """Moves the module, and wraps parameters again that came back as plain shards.

        to_empty returns quantized weights in high precision: those are quantized again.
        """
        parameters, products = self.__dict__["_parameters"], products_by_weight(self)
        before = dict(parameters)
        for name, product in products.items():
            old = before[name]
            require_primary_dtype(product.fqn, fn, getattr(old, "_local_tensor", old))
        with attributes_kept(cast(nn.Module, self), products):
            super()._apply(fn, recurse)  # type: ignore[misc]
            for name in products:
                if (codes := quantized_again(before[name], parameters[name])) is not None:
                    setattr(self, name, codes)
        adopt_again(self)
        return self

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        """Loads the parameters, and moves products from meta to where values were assigned.

        Where torch swaps the parameters, it swaps plain shards in: those are wrapped again.
        """
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        adopt_again(self)
        devices = [p.device for p in self.__dict__["_parameters"].values() if p is not None]
        for product in self.__dict__["_modules"].values():
            if isinstance(product, GroupedProduct) and product.stream.is_meta and devices:
                product._move_state(devices[0])


def products_by_weight(module: Any) -> dict[str, GroupedProduct]:
    """Returns the products of a module's parameters, by the parameter's name."""
    if is_scripted(module):
        return {}
    found = ((name, module._modules.get(name + PRODUCT)) for name in module._parameters)
    return {name: product for name, product in found if isinstance(product, GroupedProduct)}


def adopt_again(module: Any) -> None:
    """Prepares the parameters that FSDP2 gathers, where torch may have replaced their tensors."""
    for name, product in products_by_weight(module).items():
        if product.weight_gather is not None:
            adopt_weight(module, product, name, module._parameters[name])


def adopt_weight(module: Any, product: GroupedProduct, name: str, value: Any) -> None:
    """Prepares a parameter that is about to become the module's `name`."""
    if product.gather_plan is not None and is_distributed(value):
        distributed_functions.adopt_experts(module, product, module._parameters.get(name), value)


class TransposeOfCodes(torch.autograd.Function):
    """Stands for B of a product whose weight is codes: its shape, dtype and gradient.

    The op reads the codes that the call passes. The elements are one NaN.
    """

    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        shape = *weight.shape[:-2], weight.shape[-1], weight.shape[-2]
        nan = torch.full((), float("nan"), dtype=weight.dtype, device=weight.device)
        return nan.expand(shape)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0].mT


def matrix_of(weight: Tensor, call: ProductCall, is_row_major: bool = False) -> Tensor:
    """Returns B (E, K, N) of a product, from a 3D parameter or the part of it on this rank.

    Args:
        weight: (E, N, K), or (E, K, N) where it is row-major.
        call: the product's arguments.
        is_row_major: whether `weight` is B itself.
    """
    weight = local_of(weight)
    if isinstance(weight, QuantizedTensor) and call.reads_values:
        weight = weight.dequantize()
    if isinstance(weight, QuantizedTensor):
        b = TransposeOfCodes.apply(weight)
        return b.mT if is_row_major else b
    return weight if is_row_major else weight.permute(0, 2, 1)


def local_of(weight: Tensor) -> Tensor:
    """Returns the experts of this rank: those of a DTensor, with their gradient, or all."""
    return weight.to_local() if is_distributed(weight) else weight
