"""The linear layer that computes its products under a recipe, and its conversions.

Forward passes the weight, the id of its cache of codes, random state and amax history to `linear`.
The op saves what backward reads, and its backward casts the gradient and multiplies in C++
(torch/layers/linear.cpp): no Python runs there. A primary weight is a QuantizedTensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._native import ops
from ..checks import require_bool, require_int, require_text
from ..private_torch import is_transformed, tracing_state
from ..recipe import FORWARD_W, Recipe
from ..tensor.directions import require_nearest
from ..tensor.quantized_tensor import QuantizedTensor
from .accumulation import TAKER, take_gradients, weight_sums
from .cache.operand_cache import SharedInput, conditions_of, weight_codes
from .convert.fast_paths import disable_fast_path, enable_fast_path
from .registry import GatherPlan, WeightGather, distributed_functions, is_distributed
from .shared_amax import AmaxGroup
from .state.model_state import share_random_state
from .state.recipe_state import (
    DEFAULT_DELAYED,
    WEIGHT_DTYPES,
    DelayedScaling,
    RecipeState,
    quantized_again,
    require_primary_dtype,
)

HIGH_PRECISION_INIT = "_high_precision_init"  # of an attribute's name, after the parameter's


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


class Linear(RecipeState, nn.Linear):
    """nn.Linear under a recipe, with the same parameters and state-dict keys.

    mf.quantize_ converts an nn.Linear to this class in place. A layer that is built alone has a
    random state of its own, which each of its forwards advances.

    Args:
        in_features: K, of x (…, K).
        out_features: N, of y (…, N).
        bias: whether to add a bias (N).
        device: of the parameters.
        dtype: of the parameters, float32 or bfloat16; None: torch's default dtype.
        recipe: the formats of the three products.
        name: of the layer. Layers of different names have different random bits. None: "linear",
            until mf.step, or mf.training_state or its load, names it as the model that is passed.
        seed: of stochastic rounding, 64 bits with sign.

    Raises:
        TypeError, ValueError: an argument is not as expected.

    Example:
        >>> layer = mf.Linear(64, 32, recipe="mxfp8")
        >>> layer
        Linear(in_features=64, out_features=32, bias=True, recipe='mxfp8')
        >>> layer(torch.ones(2, 64)).shape
        torch.Size([2, 32])
    """

    TRANSIENT = (*RecipeState.TRANSIENT, TAKER)
    weight_gather: WeightGather | None
    shared_input: SharedInput | None
    # How FSDP2 gathers the weight as codes; None: in the compute dtype.
    gather_plan: GatherPlan | None = None
    # The layers whose weights share this one's amax; None: it has its own.
    amax_group: AmaxGroup | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: str | Recipe,
        name: str | None = None,
        seed: int = 0,
    ) -> None:
        recipe = Recipe(recipe)
        require_int("in_features", in_features, 0)
        require_int("out_features", out_features, 0)
        require_bool("bias", bias)
        fqn = "linear" if name is None else require_text("name", name)
        require_int("seed", seed)
        if (weight_dtype := dtype or torch.get_default_dtype()) not in WEIGHT_DTYPES:
            raise ValueError(f"dtype: expected float32 or bfloat16, got {weight_dtype}")
        super().__init__(in_features, out_features, bias, device, dtype)
        adopt(self, recipe, fqn, gather_plan=distributed_functions.plan_gather(recipe)[0])
        self.is_named = name is not None
        disable_fast_path(self)
        share_random_state(self, [self], seed, None)

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(self, Linear):  # a wrapper has kept this method past mf.restore_
            return nn.Linear.forward(self, input)
        weight, is_compiling = parameter_of(self, "weight"), torch.compiler.is_compiling()
        sums = weight_sums(self, weight)
        if is_distributed(weight):
            if self.amax_group is not None:
                self.amax_group.weights(self.recipe)  # raises an error
            return distributed_functions.forward(self, input)
        if not weight.is_contiguous():
            weight = weight.contiguous()
        if self.weight_gather is not None and not is_compiling:
            self.weight_gather.complete(weight, needs_gradient(input))
        recipe = self.recipe
        # An argument left out takes less time than its default.
        given = self.op_state(weight.device)
        history = given.get("amax_history")
        has_dgrad = needs_gradient(input)
        operands = (
            weight_operands(weight, recipe, has_dgrad, history)
            if self.amax_group is None
            else self.amax_group.operands(self, input, has_dgrad)
        )
        if operands is not None:
            given["weight_operands"] = operands
        if not is_compiling and type(input) is Tensor and not input.is_meta:
            cache = self.weight_codes
            if cache is not None and tracing_state() is None:  # else a constant
                cache.notice_capture(input)
                given |= {"weight_cache": cache.id, "training": self.training}
            if self.shared_input is not None and not is_transformed():
                columnwise = torch.is_grad_enabled() and weight.requires_grad
                given["x_operands"] = self.shared_input.operands(
                    input, recipe.text, columnwise, conditions_of(input)
                )
        if self.recompute:
            given["recompute"] = self.recompute
        bias = parameter_of(self, "bias")
        return ops.linear.default(input, weight, bias, recipe.text, **given, **sums)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            require_known_class(self, value)
            if self.accumulate == "grad":
                distributed_functions.accumulate_gradients(self, value)
            gather = self.weight_gather
            if gather is not None and gather.has_assigned(value):  # FSDP2 assigns twice a gather
                self._parameters[name] = value
                return
            # FSDP2 assigns the parameter that it has sharded.
            distributed_functions.adopt_weight(self, value)
            if is_distributed(value):
                self.weight_codes = None  # torch does not count writes to its memory
        super().__setattr__(name, value)
        if name in ("weight", "accumulate"):
            take_gradients(self)
        if name == "weight":
            self.follow(value)

    def _forget(self) -> None:
        """Drops cached operands, and prepares a cache and hooks for the present parameter."""
        self.weight_codes = weight_codes(self.weight, self.recipe)
        take_gradients(self)
        if self.shared_input is not None:
            self.shared_input.forget()

    def _load_from_state_dict(self, *args: object, **kwargs: object) -> None:
        self.weight_codes = None  # refers to the parameter, which torch may swap
        super()._load_from_state_dict(*args, **kwargs)
        if self.stream.is_meta and not self.weight.is_meta:  # assigned
            self._move_state(self.weight.device)
        if self.weight_gather is not None:  # torch may have swapped in a plain shard
            distributed_functions.adopt_weight(self, self.weight)
        self._forget()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Linear:
        before = self.weight
        require_primary_dtype(self.fqn, fn, before)
        super()._apply(fn, recurse)
        if (weight := quantized_again(before, self.weight)) is not None:
            self.weight = weight
        if self.weight_gather is not None:
            distributed_functions.adopt_weight(self, self.weight)
        self._forget()
        return self

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, {super().extra_repr()}"


def parameter_of(module: nn.Linear, name: str) -> Any:
    """Returns an attribute, a parameter without a call of nn.Module.__getattr__."""
    found = module._parameters
    return found[name] if name in found else getattr(module, name)


def require_known_class(layer: Linear, weight: Any) -> None:
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


def adopt(
    module: nn.Linear,
    recipe: Recipe,
    fqn: str,
    delayed: DelayedScaling = DEFAULT_DELAYED,
    gather_plan: GatherPlan | None = None,
) -> Linear:
    """Converts `module` to a Linear in place; object, parameters and hooks stay.

    Args: as those of mf.quantize_; `fqn` is the name that the stream of random bits comes from.
    """
    device = module.weight.device
    # Before the class, so that a module is unchanged where there is no memory for its state.
    RecipeState.set_state(cast(RecipeState, module), recipe, fqn, device, delayed)
    if not isinstance(module, Linear):
        module.__class__ = Linear
    module = cast(Linear, module)
    module.shared_input = None
    module.gather_plan = gather_plan
    module.amax_group = None
    module.weight_gather = None
    module._forget()
    return module


def rebased(cls: type, base: type, other: type) -> type:
    """Returns a class derived as `cls` is, from `other` instead of `base`."""
    if cls is base:
        return other
    bases = tuple(rebased(b, base, other) if issubclass(b, base) else b for b in cls.__bases__)
    members = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__, bases, members)


def class_without_recipe(cls: type[nn.Module]) -> type[nn.Linear] | None:
    """Finds the class that a converted layer of class `cls` had, or would have, as an nn.Linear.

    torch derives classes from that of a layer: parametrize for its properties, fully_shard for its
    methods. Such a class is derived again, from nn.Linear.

    Returns:
        The class. None: `cls` is a subclass of Linear in user code, which was never an nn.Linear.
    """
    derived = [c for c in cls.__mro__ if issubclass(c, Linear) and c is not Linear]
    if any(not c.__module__.startswith("torch.") for c in derived):
        return None
    return rebased(cls, Linear, nn.Linear)


def restore_linear(module: Linear) -> None:
    """Converts a Linear back to an nn.Linear in place, its weight to high precision."""
    dequantize_parameters(module)
    module.__dict__.pop("weight" + HIGH_PRECISION_INIT, None)
    module.accumulate = ""
    for name in (*RecipeState.__annotations__, *Linear.__annotations__):
        module.__dict__.pop(name, None)
    enable_fast_path(module)
    cast(nn.Linear, module).__class__ = cast(type[nn.Linear], class_without_recipe(type(module)))


# ---- primary weights -----------------------------------------------------------------------------


def specs_of_weight(recipe: Recipe) -> tuple[str, str | None]:
    """Returns the specs of W's rowwise and columnwise codes; None: dgrad reads the rowwise ones."""
    col = recipe.dgrad.b
    return recipe.fprop.b, None if col == FORWARD_W else col


def reason_against_recipe(recipe: Recipe) -> str | None:
    """Returns why a recipe does not read the codes of a QuantizedTensor; None where it does."""
    specs = specs_of_weight(recipe)
    if "bf16" in specs:
        return f"{recipe} reads the weight in high precision"
    try:
        for spec in specs:
            if spec is not None:
                require_nearest(spec, False)
    except ValueError as error:
        return str(error)
    return None


def reason_against_primary(
    weight: Tensor, recipe: Recipe, owners: dict[int, list[nn.Module]]
) -> str | None:
    """Returns why a weight cannot be a QuantizedTensor; None where it can."""
    if len(owners[id(weight)]) > 1:
        return "primary: its weight is tied to another module's"
    if is_distributed(weight):
        return "primary: its weight is a DTensor"
    why = reason_against_recipe(recipe)
    return None if why is None else f"primary: {why}"


def make_primary(
    module: nn.Module,
    names: Sequence[str],
    recipe: Recipe,
    keep_high_precision_init: bool,
    is_row_major: bool = False,
) -> None:
    """Replaces parameters of a converted module by QuantizedTensors: a weight, or 3D ones."""
    row, col = specs_of_weight(recipe)
    specs = (col, row) if is_row_major else (row, col)  # of the parameter as it lies in memory
    for name in names:
        weight = module.get_parameter(name)
        if keep_high_precision_init:
            setattr(module, name + HIGH_PRECISION_INIT, weight.detach().cpu().clone())
        quantized = QuantizedTensor.from_tensor(weight.detach(), *specs)
        setattr(module, name, nn.Parameter(quantized, requires_grad=weight.requires_grad))
    if isinstance(module, RecipeState):
        module._forget()  # the weight before had a cache


def require_primary(primary: bool, keep_high_precision_init: bool) -> None:
    require_bool("primary", primary)
    require_bool("keep_high_precision_init", keep_high_precision_init)
    if keep_high_precision_init and not primary:
        raise ValueError(
            "keep_high_precision_init: expected primary=True with it, got primary=False, "
            "where the weight itself stays in high precision"
        )


def dequantize_parameters(module: nn.Module) -> None:
    """Replaces quantized parameters, also of a parametrization, by the values of their codes."""
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            local = getattr(parameter, "_local_tensor", parameter)
            if parameter is not None and isinstance(local, QuantizedTensor):
                values = nn.Parameter(parameter.detach() * 1, parameter.requires_grad)
                setattr(owner, name, values)
