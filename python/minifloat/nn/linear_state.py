"""The state and the products of a module with one weight (N, K) under a recipe.

Forward passes the weight, the id of its cache of codes, random state and amax history to `linear`.
The op saves what backward reads, and its backward casts the gradient and multiplies in C++
(torch/layers/linear.cpp): no Python runs there. A primary weight is a QuantizedTensor.

mf.Linear is such a module, and so are the layers of other libraries that mf.quantize_ converts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .._native import ops
from ..private_torch import is_transformed, tracing_state
from ..recipe import Recipe
from ..tensor.attributes import attributes_kept
from ..tensor.quantized_tensor import QuantizedTensor
from .accumulation import TAKER, take_gradients, weight_sums
from .cache.operand_cache import SharedInput, conditions_of, weight_codes
from .registry import GatherPlan, WeightGather, distributed_functions, is_distributed
from .shared_amax import AmaxGroup
from .state.primary_weights import quantized_again, require_primary_dtype
from .state.recipe_state import RecipeState

if TYPE_CHECKING:
    from typing_extensions import Self


def weight_operands(
    weight: Tensor, recipe: str | Recipe, has_dgrad: bool, amax_history: Tensor | None
) -> list[Tensor] | None:
    """The codes of a quantized weight as the op `linear` takes them; None: it is not quantized.

    Args:
        weight: (N, K).
        recipe: of the layer: fprop reads W rowwise, dgrad columnwise.
        has_dgrad: whether dgrad is computed.
        amax_history: of the layer, for delayed scaling.

    Returns:
        The eight tensors of the op layer_operands.

    Raises:
        ValueError: the weight does not hold these codes. Nothing is rounded a second time.
    """
    if not isinstance(weight, QuantizedTensor):
        return None
    recipe = recipe if isinstance(recipe, Recipe) else Recipe(recipe)
    if torch.compiler.is_compiling():  # which sees an op, not the parts of the weight
        return ops.layer_operands.default(
            weight, recipe.text, "w", columnwise=has_dgrad, amax_history=amax_history
        )
    return weight.operands(recipe, has_dgrad)


def needs_gradient(x: Any) -> bool:
    """Tells whether backward computes the gradient of a layer's input."""
    return torch.is_grad_enabled() and getattr(x, "requires_grad", False)


class LinearState(RecipeState):
    """The part of a class that a module with a weight (N, K) gets when it is converted."""

    TRANSIENT = (*RecipeState.TRANSIENT, TAKER, "__setattr__")
    weight: Tensor  # (N, K), the module's parameter
    weight_gather: WeightGather | None
    shared_input: SharedInput | None
    # How FSDP2 gathers the weight as codes; None: in the compute dtype.
    gather_plan: GatherPlan | None = None
    # The layers whose weights share this one's amax; None: it has its own.
    amax_group: AmaxGroup | None = None

    def multiply(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes input · weightᵀ + bias under the recipe: (…, K) -> (…, N), differentiably.

        Args:
            input: (…, K), float32 or bfloat16.
            weight: (N, K), the parameter, whole or codes.
            bias: (N), or None.

        Raises:
            NotImplementedError: torch.fx traces a layer with a state.
        """
        if type(input) is not Tensor:
            self.require_no_proxy(input)
        is_compiling, has_dgrad = torch.compiler.is_compiling(), needs_gradient(input)
        sums = weight_sums(self, weight) if self.accumulate else None
        if not weight.is_contiguous():
            weight = weight.contiguous()
        if self.weight_gather is not None and not is_compiling:
            self.weight_gather.complete(weight, has_dgrad)
        text = self.recipe.text
        # An argument left out takes less time than its default.
        given = self.op_state(weight.device)
        if self.amax_group is not None:
            given["weight_operands"] = self.amax_group.operands(self, weight, input, has_dgrad)
        elif isinstance(weight, QuantizedTensor):
            history = given.get("amax_history")
            given["weight_operands"] = weight_operands(weight, self.recipe, has_dgrad, history)
        can_reuse = not is_compiling and type(input) is Tensor and not input.is_meta
        if can_reuse and tracing_state() is None:  # else codes are constants
            cache = self.weight_codes
            if cache is not None:
                cache.notice_capture(input)
                given["weight_cache"], given["training"] = cache.id, self.training
            if self.shared_input is not None and not is_transformed():
                columnwise = torch.is_grad_enabled() and weight.requires_grad
                given["x_operands"] = self.shared_input.operands(
                    input, text, columnwise, conditions_of(input)
                )
        if self.recompute:
            given["recompute"] = self.recompute
        if sums is not None:
            given.update(sums)
        return ops.linear.default(input, weight, bias, text, **given)

    def require_no_proxy(self, input: object) -> None:
        """Raises NotImplementedError where torch.fx would keep the layer's state as constants."""
        has_state = self.rng_state is not None or self.amax_history is not None
        if has_state and isinstance(input, Proxy):
            raise NotImplementedError(
                f"{self.fqn or 'layer'}: expected a forward outside torch.fx.symbolic_trace, which "
                f"would keep random bits and amaxes of {self.recipe} as constants; use "
                "torch.export, or a Tracer whose is_leaf_module returns True for this layer"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        gather = self.weight_gather
        if name == "weight":
            is_of_fsdp = gather is not None and gather.has_assigned(value)
            if not is_of_fsdp:
                require_known_class(self, value)
            if self.accumulate == "grad":
                distributed_functions.accumulate_gradients(self, value)
            elif is_of_fsdp:
                distributed_functions.let_fsdp_assign(self)  # from now on
            if is_of_fsdp:
                self._parameters[name] = value
                return
            # FSDP2 assigns the parameter that it has sharded.
            distributed_functions.adopt_weight(self, value)
            if is_distributed(value):
                self.weight_codes = None  # torch does not count writes to its memory
        super().__setattr__(name, value)
        if gather is not None and name in ("training", "amax_history"):
            gather.forget()
        if name in ("weight", "accumulate"):
            self.__dict__.pop("__setattr__", None)
            take_gradients(self)
        if name == "weight":
            local = getattr(value, "_local_tensor", value)
            if self.has_loaded_codes and not isinstance(local, QuantizedTensor):
                # FSDP2 keeps their values. Nothing rounds codes of a checkpoint again.
                self.has_loaded_codes, self.recipe = False, self.recipe.with_values
            self.follow(value)

    def _forget(self) -> None:
        """Drops cached operands, and prepares a cache and hooks for the present parameter."""
        weight = self._parameters.get("weight")  # none where a parametrization computes it
        self.weight_codes = None if weight is None else weight_codes(weight, self.recipe)
        take_gradients(self)
        if self.shared_input is not None:
            self.shared_input.forget()

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        self.weight_codes = None  # refers to the parameter, which torch may swap
        super()._load_from_state_dict(*args, **kwargs)
        weight = self._parameters.get("weight")
        if weight is not None:
            if self.stream.is_meta and not weight.is_meta:  # assigned
                self._move_state(weight.device)
            if self.weight_gather is not None:  # torch may have swapped in a plain shard
                distributed_functions.adopt_weight(self, weight)
        self._forget()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self._parameters.get("weight")  # a parametrization would compute self.weight
        if before is None:
            return super()._apply(fn, recurse)
        require_primary_dtype(self.fqn, fn, before)
        with attributes_kept(self, ["weight"]):
            super()._apply(fn, recurse)
            if (weight := quantized_again(before, self.weight)) is not None:
                self.weight = weight
        if self.weight_gather is not None:
            distributed_functions.adopt_weight(self, self.weight)
        self._forget()
        return self


def parameter_of(module: nn.Module, name: str) -> Any:
    """Returns an attribute, a parameter without a call of nn.Module.__getattr__."""
    found = module._parameters
    return found[name] if name in found else getattr(module, name)


def require_known_class(layer: LinearState, weight: Any) -> None:
    """Raises TypeError for a weight of another package's tensor subclass, such as torchao's.

    Such a class decides what each op does, and knows none of this package's.
    """
    cls = type(weight)
    package = cls.__module__.partition(".")[0]
    if package in ("torch", "minifloat") or not isinstance(weight, Tensor):
        return
    if cls.__torch_dispatch__ != Tensor.__torch_dispatch__:
        raise TypeError(
            f"{layer.fqn}.weight: expected a torch.Tensor in a layer under recipe {layer.recipe}, "
            f"got {cls.__module__}.{cls.__qualname__}; call mf.restore_(model) before another "
            "library converts the model"
        )
