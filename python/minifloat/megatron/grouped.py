"""The grouped linear layers of Megatron-Core's experts, in place of Transformer Engine's.

Megatron's TEGroupedMLP builds two of them, and computes activation, probabilities and biases around
them. Parameters are weight0, weight1, … (N, K), one an expert, as in Transformer Engine. They lie
one behind the other in memory, also in Megatron's buffers, which take parameters from the last to
the first; so the product reads them as one weight (E, N, K). Where they do not, each forward copies
them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from .._native import ops
from ..nn.convert.selection import already_converted
from ..nn.grouped_product import GroupedProduct, ProductCall, Sharding, require_recipe
from ..nn.linear import dequantize_parameters
from ..nn.linear_state import needs_gradient
from ..nn.names import PRODUCT
from ..nn.state.primary_weights import quantized_again, require_primary_dtype
from ..nn.state.random_state import require_shared_seed
from ..nn.state.recipe_state import DelayedScaling
from ..recipe import Recipe
from ..tensor.attributes import attributes_kept
from ..tensor.quantized_tensor import QuantizedTensor
from .linear import drop_extra_state, reason_of_config

NAME = "weight" + PRODUCT  # of the child that has the recipe's state


class TogetherWeights(torch.autograd.Function):
    """Returns the weights (N, K) of E experts as one (E, N, K), and gives each its gradient.

    In place of weights that are codes it returns one NaN: the product reads the codes.
    """

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        first, (n, k) = weights[0], weights[0].shape
        if isinstance(first, QuantizedTensor):
            nan = torch.full((), float("nan"), dtype=first.dtype, device=first.device)
            return nan.expand(len(weights), n, k)
        if lie_together(weights):
            return first.detach().as_strided((len(weights), n, k), (n * k, k, 1))
        return torch.stack(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0].unbind(0)


def lie_together(weights: Sequence[Tensor]) -> bool:
    """Tells whether weights of one shape lie one behind the other in one memory."""
    first = weights[0]
    size = first.numel() * first.element_size()
    return all(
        w.is_contiguous()
        and w.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and w.data_ptr() == first.data_ptr() + i * size
        for i, w in enumerate(weights)
    )


class GroupedLinear(nn.Module):
    """The linear layers of this rank's experts, as TEGroupedMLP builds and calls them.

    Args:
        num_gemms: E, the experts of this rank.
        input_size: K, of all expert-tensor-parallel ranks together.
        output_size: N, likewise.
        config: the TransformerConfig.
        init_method: fills a weight in place.
        bias: whether there are biases bias0, bias1, … (N).
        skip_bias_add: whether the caller adds them.
        pg_collection: Megatron's groups; None: those of its parallel_state.
        others: is_expert, tp_comm_buffer_name and name of Transformer Engine's, which are not read.
    """

    weight_dim: ClassVar[int]  # of W (N, K), which expert-tensor-parallel ranks cut

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], object],
        bias: bool,
        skip_bias_add: bool,
        pg_collection: Any = None,
        **others: Any,
    ) -> None:
        super().__init__()
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.config, self.num_gemms, self.skip_bias_add = config, num_gemms, skip_bias_add
        self.ep_group, self.tp_group, self.dp_group = groups.ep, groups.expt_tp, groups.expt_dp
        self.is_expert, self.use_bias = True, bias
        sizes, dim, ranks = [output_size, input_size], self.weight_dim, self.tp_group.size()
        if sizes[dim] % ranks:
            raise ValueError(
                f"expert_tensor_parallel_size: expected a divisor of {sizes[dim]}, got {ranks}"
            )
        whole = output_size, input_size
        sizes[dim] //= ranks
        self.out_features, self.in_features = sizes
        options: dict[str, Any] = {"dtype": config.params_dtype}
        if not config.use_cpu_initialization:
            options["device"] = torch.cuda.current_device()
        memory = torch.empty(num_gemms, *sizes, **options)
        for i in reversed(range(num_gemms)):  # Megatron's buffers begin with the last
            weight = nn.Parameter(memory[i])
            self._initialize(weight, whole, init_method)
            self.register_parameter(f"weight{i}", weight)
        for i in range(num_gemms if bias else 0):
            parameter: Any = nn.Parameter(torch.zeros(sizes[0], **options))
            parameter.tensor_model_parallel = dim == 0
            parameter.partition_dim, parameter.partition_stride = (0 if dim == 0 else -1), 1
            self.register_parameter(f"bias{i}", parameter)
        is_divided = config.expert_model_parallel_size > 1 or (
            config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        for parameter in self.parameters():
            parameter.allreduce = not is_divided  # over the ranks of all data, or of these experts

    def _initialize(
        self, weight: Any, whole: tuple[int, int], init_method: Callable[[Tensor], object]
    ) -> None:
        if not self.config.perform_initialization:
            set_tensor_model_parallel_attributes(weight, True, self.weight_dim, 1)
        elif not self.config.use_cpu_initialization:
            _initialize_affine_weight_gpu(
                weight, init_method, partition_dim=self.weight_dim, is_expert=True
            )
        else:
            _initialize_affine_weight_cpu(
                weight,
                *whole,
                weight.shape[self.weight_dim],
                self.weight_dim,
                init_method,
                params_dtype=self.config.params_dtype,
                rank=self.tp_group.rank(),
                world_size=self.tp_group.size(),
            )

    # ---- the product -----------------------------------------------------------------------------

    @property
    def weights(self) -> list[nn.Parameter]:
        """The weights in the order of experts."""
        return [self.get_parameter(f"weight{i}") for i in range(self.num_gemms)]

    @property
    def product(self) -> GroupedProduct | None:
        """The state of the product under a recipe; None: it is in high precision."""
        found = self._modules.get(NAME)
        return found if isinstance(found, GroupedProduct) else None

    def forward(
        self, x: Tensor, tokens_per_expert: Sequence[int] | Tensor
    ) -> tuple[Tensor, Tensor | list[nn.Parameter] | None]:
        """Multiplies the rows of each expert by its weight.

        Args:
            x: (rows, K), float32 or bfloat16, sorted by expert.
            tokens_per_expert: (E), how many rows each has.

        Returns:
            (rows, N), and the biases where the caller adds them.

        Raises:
            ValueError: tokens_per_expert is not of E counts, or they have another sum.
        """
        counts = torch.as_tensor(tokens_per_expert, dtype=torch.int32, device="cpu")
        if counts.shape != (self.num_gemms,) or counts.sum() != x.shape[0]:
            raise ValueError(
                f"tokens_per_expert: expected {self.num_gemms} counts with the sum {x.shape[0]}, "
                f"the rows of x, got {counts.tolist()}"
            )
        offs = counts.cumsum(0, dtype=torch.int32).to(x.device, non_blocking=True)
        weight: Tensor = TogetherWeights.apply(*self.weights)
        biases: list[Any] = [
            self.get_parameter(f"bias{i}") for i in range(self.num_gemms * self.use_bias)
        ]
        if biases and self.skip_bias_add:
            return self.multiply(x, weight.mT, offs, None), biases
        return self.multiply(x, weight.mT, offs, torch.stack(biases) if biases else None), None

    def multiply(self, x: Tensor, b_EKN: Tensor, offs_E: Tensor, bias_EN: Tensor | None) -> Tensor:
        """Computes the grouped product, on this rank's shard of the weights."""
        product = self.product
        call = ProductCall() if product is None else call_of(product, x, self.weights)
        if product is None or self.tp_group.size() == 1:
            return call.multiply(x, b_EKN, offs_E, None, bias_EN)
        if product.rng_state is not None:
            require_shared_seed(product.rng_state, self.tp_group, product.fqn)
        return ops.scaled_grouped_mm_sharded(
            x,
            b_EKN,
            offs_E,
            call.recipe,
            **Sharding.of(self.tp_group)._asdict(),
            weight_dim=self.weight_dim,
            out_dtype=x.dtype,
            bias=bias_EN,
            rng=call.rng,
            amax_history=call.amax_history,
            stream=call.stream,
            weight_operands=call.operands,
            recompute=call.recompute,
        )

    def backward_dw(self) -> None:
        """Does nothing: backward has computed the gradients of weights."""

    # ---- state -----------------------------------------------------------------------------------

    def reason(self) -> str | None:
        """Returns why the layers cannot be converted; None where they can."""
        if (product := self.product) is not None:
            return already_converted(product.recipe)
        if "forward" in self.__dict__:
            return "its forward is replaced on the instance"
        return reason_of_config(self.config)

    def convert(self, recipe: Recipe, fqn: str, delayed: DelayedScaling) -> GroupedProduct:
        """Begins to multiply under a recipe, and returns what has its state."""
        require_recipe(fqn, recipe)
        first = self.ep_group.rank() * self.num_gemms
        weight = self.weights[0].detach().expand(self.num_gemms, -1, -1)
        # Ranks that cut the experts draw by the number of the first one in the name.
        name = fqn if self.tp_group.size() == 1 else f"{fqn}.{first}"
        product = GroupedProduct(recipe, name, weight, delayed=delayed)
        product.first_expert = first
        self.add_module(NAME, product.train(self.training))
        return product

    def restore(self) -> None:
        """Multiplies in high precision again."""
        dequantize_parameters(self)
        self._lay_together()
        self._modules.pop(NAME, None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> GroupedLinear:
        """Moves the layers, whose weights may be codes and keep Megatron's attributes."""
        before = dict(self._parameters)
        if (product := self.product) is not None:
            for weight in self.weights:
                require_primary_dtype(product.fqn, fn, weight)
        with attributes_kept(self, before):
            super()._apply(fn, recurse)
            for name, old in before.items():
                if (codes := quantized_again(old, self.get_parameter(name))) is not None:
                    setattr(self, name, codes)
        self._lay_together()
        return self

    def _lay_together(self) -> None:
        """Moves weights that are values, and that something has moved apart, to one memory."""
        weights = self.weights
        if weights[0].is_meta or isinstance(weights[0], QuantizedTensor) or lie_together(weights):
            return
        memory = torch.stack([weight.detach() for weight in weights])
        for weight, part in zip(weights, memory):
            weight.data = part

    def get_extra_state(self) -> None:
        """Returns None, as Megatron's own layers do: Transformer Engine's have scales there."""

    def set_extra_state(self, state: Any) -> None:
        drop_extra_state(state)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("weight", "bias") if self.use_bias else ("weight",):  # of all experts at once
            if (whole := state_dict.pop(prefix + name, None)) is not None:
                shape = self.num_gemms, *self.get_parameter(f"{name}0").shape
                if whole.numel() != math.prod(shape):
                    raise ValueError(
                        f"{prefix}{name}: expected the values of {self.num_gemms} experts, {shape},"
                        f" got {tuple(whole.shape)}"
                    )
                for i, part in enumerate(whole.reshape(shape)):
                    state_dict[f"{prefix}{name}{i}"] = part
        for i in range(1, self.num_gemms):  # an entry an expert in distributed checkpoints
            state_dict.pop(f"{prefix}_extra_state{i}", None)
        state_dict.setdefault(f"{prefix}_extra_state")
        super()._load_from_state_dict(state_dict, prefix, *args)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Returns the parameters by the keys that experts have one by one.

        Source: TEGroupedLinear of Megatron-Core, whose checkpoints these are.
        """
        experts = self.ep_group.size() * self.num_gemms
        first = self.ep_group.rank() * self.num_gemms
        is_single = (metadata or {}).get("singleton_local_shards", False)
        axes = {"weight": self.weight_dim} | ({"bias": 0} if self.weight_dim == 0 else {})
        found: dict[str, Any] = {}
        for i in range(self.num_gemms):
            own = {f"{i}.weight": self.get_parameter(f"weight{i}"), f"{i}._extra_state": None}
            if self.use_bias:
                own[f"{i}.bias"] = self.get_parameter(f"bias{i}")
            place = (len(sharded_offsets), first + i, experts)
            part = make_sharded_tensors_for_checkpoint(
                own,
                "",
                {f"{i}.{name}": axis for name, axis in axes.items()},
                sharded_offsets if is_single else (*sharded_offsets, place),
                tp_group=self.tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
            new = f"{first + i}.{prefix}" if is_single else prefix
            replace_prefix_for_sharding(part, f"{i}.", new)
            found[f"{prefix}weight{i}"] = part[f"{i}.weight"]
            found[f"{prefix}_extra_state{i or ''}"] = part[f"{i}._extra_state"]
            if self.use_bias:
                found[f"{prefix}bias{i}"] = part[f"{i}.bias"]
        for entry in found.values():
            entry.replica_id = (*entry.replica_id[:2], self.dp_group.rank())
        return found

    def extra_repr(self) -> str:
        product = self.product
        recipe = "" if product is None else f", recipe={product.recipe.text!r}"
        return f"{self.num_gemms} x ({self.in_features}, {self.out_features}){recipe}"


def call_of(product: GroupedProduct, x: Tensor, weights: Sequence[Tensor]) -> ProductCall:
    """Returns the arguments of a forward now. Nothing is cached of weights that lie in buffers."""
    operands = None
    if isinstance(weights[0], QuantizedTensor):
        columnwise = needs_gradient(x)
        each = [cast(QuantizedTensor, w).operands(product.recipe, columnwise) for w in weights]
        operands = [together(parts) for parts in zip(*each)]
    return ProductCall(
        product.recipe.text,
        operands=operands,
        first_expert=product.first_expert,
        recompute=product.recompute,
        **product.op_state(x.device),
    )


def together(parts: Sequence[Tensor]) -> Tensor:
    """Returns parts of the experts' operands as one; an empty one where they are not there."""
    return parts[0] if parts[0].numel() == 0 else torch.stack(list(parts))


class ColumnParallelGroupedLinear(GroupedLinear):
    """Expert-tensor-parallel ranks cut the weights along N."""

    weight_dim = 0


class RowParallelGroupedLinear(GroupedLinear):
    """Expert-tensor-parallel ranks cut the weights along K. Megatron sums the results."""

    weight_dim = 1
