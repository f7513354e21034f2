"""nn.Linear under a recipe, the conversion of layers to and from that, and primary weights."""

from __future__ import annotations

from collections.abc import Sequence
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..checks import require_bool, require_int, require_text
from ..recipe import FORWARD_W, Recipe
from ..spec import Spec
from ..tensor.attributes import attributes_of
from ..tensor.directions import require_nearest
from ..tensor.quantized_tensor import QuantizedTensor
from .accumulation import weight_sums
from .convert.fast_paths import disable_fast_path, enable_fast_path
from .linear_state import LinearState, parameter_of
from .registry import GatherPlan, distributed_functions, is_distributed
from .state.model_state import share_random_state
from .state.recipe_state import DEFAULT_DELAYED, WEIGHT_DTYPES, DelayedScaling, RecipeState

INITIAL_VALUES = "initial_values"  # of a quantized weight, and how its reader gets at them:
GET_INITIAL, CLEAR_INITIAL = "get_high_precision_init_val", "clear_high_precision_init_val"


class Linear(LinearState, nn.Linear):
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
            return type(self).forward(self, input)
        weight = parameter_of(self, "weight")
        if is_distributed(weight):
            weight_sums(self, weight)  # raises an error under `accumulate`
            if self.amax_group is not None:
                self.amax_group.weights(self.recipe)  # raises an error
            return distributed_functions.forward(self, input)
        return self.multiply(input, weight, parameter_of(self, "bias"))

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, {super().extra_repr()}"


def adopt(
    module: nn.Module,
    recipe: Recipe,
    fqn: str,
    delayed: DelayedScaling = DEFAULT_DELAYED,
    gather_plan: GatherPlan | None = None,
    form: type[LinearState] | None = None,
) -> Any:
    """Converts `module` to a class under a recipe in place; object, parameters and hooks stay.

    Args: as those of mf.quantize_; `fqn` is the name that the stream of random bits comes from, and
        `form` the class, whose last base is the module's; None: Linear.
    """
    weight, form = cast(Tensor, module.weight), form or Linear
    # Before the class, so that a module is unchanged where there is no memory for its state.
    RecipeState.set_state(cast(RecipeState, module), recipe, fqn, weight.device, delayed)
    if not isinstance(module, form):
        module.__class__ = form
    layer = cast(LinearState, module)
    layer.shared_input = None
    layer.gather_plan = gather_plan
    layer.amax_group = None
    layer.weight_gather = None
    layer._forget()
    return layer


def rebased(cls: type, base: type, other: type) -> type:
    """Returns a class derived as `cls` is, from `other` instead of `base`."""
    if cls is base:
        return other
    bases = tuple(rebased(b, base, other) if issubclass(b, base) else b for b in cls.__bases__)
    members = {k: v for k, v in cls.__dict__.items() if k not in ("__dict__", "__weakref__")}
    return type(cls.__name__, bases, members)


def class_without_recipe(cls: type[LinearState]) -> type[nn.Module] | None:
    """Finds the class that a converted layer of class `cls` had, or would have, without a recipe.

    torch derives classes from that of a layer: parametrize for its properties, fully_shard for its
    methods. Such a class is derived again, from the one without a recipe.

    Returns:
        The class. None: `cls` is a subclass of Linear in user code, which was never an nn.Linear.
    """
    forms = (c for c in cls.__mro__ if issubclass(c, LinearState))
    form = next(c for c in forms if not issubclass(c.__bases__[-1], LinearState))
    derived = [c for c in cls.__mro__ if issubclass(c, form) and c is not form]
    if any(not c.__module__.startswith("torch.") for c in derived):
        return None
    return rebased(cls, form, form.__bases__[-1])


def restore_linear(module: LinearState) -> None:
    """Converts a layer back to its class without a recipe, its weight to high precision."""
    dequantize_parameters(module)
    module.accumulate = ""
    for name in (*RecipeState.__annotations__, *LinearState.__annotations__):
        if name != "weight":  # a tensor, where it is computed in each forward
            module.__dict__.pop(name, None)
    if isinstance(module, Linear):
        enable_fast_path(module)
    module.__class__ = cast(Any, class_without_recipe(type(module)))


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
    if all(spec is None or Spec.parse(spec).transform for spec in specs):
        return f"{recipe} transforms the weight, so no codes of it have its values"
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
        quantized = QuantizedTensor.from_tensor(weight.detach(), *specs)
        codes = nn.Parameter(quantized, requires_grad=weight.requires_grad)
        vars(codes).update(attributes_of(weight))
        if keep_high_precision_init:
            keep_initial_values(codes, weight.detach().cpu().clone())
        setattr(module, name, codes)
    if isinstance(module, RecipeState):
        module._forget()  # the weight before had a cache


def keep_initial_values(weight: Tensor, values: Tensor) -> None:
    """Keeps a weight's values of before it was codes, with the methods of Transformer Engine.

    weight.get_high_precision_init_val() returns them, and weight.clear_high_precision_init_val()
    frees them: Megatron-Core's optimizer calls both for its masters.
    """
    vars(weight)[INITIAL_VALUES] = values
    vars(weight)[GET_INITIAL] = MethodType(initial_values, weight)
    vars(weight)[CLEAR_INITIAL] = MethodType(clear_initial_values, weight)


def initial_values(weight: Tensor) -> Tensor:
    return cast(Tensor, vars(weight)[INITIAL_VALUES])


def clear_initial_values(weight: Tensor) -> None:
    for name in (INITIAL_VALUES, GET_INITIAL, CLEAR_INITIAL):
        vars(weight).pop(name, None)


def require_primary(primary: bool, keep_high_precision_init: bool) -> None:
    require_bool("primary", primary)
    require_bool("keep_high_precision_init", keep_high_precision_init)
    if keep_high_precision_init and not primary:
        raise ValueError(
            "keep_high_precision_init: expected primary=True with it, got primary=False, "
            "where the weight itself stays in high precision"
        )


def dequantize_parameters(module: nn.Module) -> None:
    """Replaces quantized parameters, also of a parametrization, by the values of their codes.

    Modules that share one share its values too.
    """
    made = WeakIdKeyDictionary()  # keeps no codes whose values are made
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            local = getattr(parameter, "_local_tensor", parameter)
            if parameter is not None and isinstance(local, QuantizedTensor):
                if parameter not in made:
                    values = nn.Parameter(parameter.detach() * 1, parameter.requires_grad)
                    vars(values).update(attributes_of(parameter))
                    clear_initial_values(values)
                    made[parameter] = values
                setattr(owner, name, made[parameter])
