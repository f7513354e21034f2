"""The choice of the experts that mf.quantize_ converts, and their conversion.

An experts module is converted as a whole: each of its 3D parameters gets a product under the
recipe of the module's name. Objects, parameters, ties, hooks and state-dict keys stay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import nn

from ...checks import require_text
from ...nn.convert.filters import Filters, require_used
from ...nn.convert.primary_weights import (
    HIGH_PRECISION_INIT,
    make_primary,
    reason_against_primary,
)
from ...nn.convert.selection import already_converted
from ...nn.grouped_product import GroupedProduct, add_products, remove_products
from ...nn.hooks import Choice, Selection, hooks
from ...nn.linear import dequantize_parameters
from ...nn.names import PRODUCT, clean_name, join, owners_of_weights
from ...nn.state.recipe_state import WEIGHT_DTYPES
from ...recipe import Recipe, operand_names
from ...spec import Spec
from ..layer import Experts
from .counted_experts import CountedExperts, has_counts
from .foreign import WHOLE, Converted, NamedExperts, SeamExperts, converted_class, has_seam
from .projections import (
    ProjectionExperts,
    is_projected,
    is_row_major,
    register_implementation,
)

# Parts of names by which models call their router, whose weight is (E, D), and Qwen2-MoE's gate of
# the shared expert, whose weight is (1, D).
ROUTERS = ("router", "gate", "gating", "wg", "shared_expert_gate")
ROUTER_REASON = "a router beside converted experts, which stays in high precision"


def require_experts(experts: Any) -> dict[str, tuple[str, ...]]:
    """Checks mf.quantize_'s `experts`: globs of modules' names, and names of parameters."""
    if experts is None:
        return {}
    if not isinstance(experts, Mapping):
        raise TypeError(f"experts: expected a dict of globs and names, got {experts!r}")
    found = {}
    for glob, names in experts.items():
        require_text("experts: a glob", glob)
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise TypeError(f"experts: {glob}: expected a list of parameters' names, got {names!r}")
        found[glob] = tuple(require_text(f"experts: {glob}: a name", name) for name in names)
        if not found[glob]:
            raise ValueError(f"experts: {glob}: expected at least one parameter's name, got none")
    return found


def weights_of(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of a module's 3D parameters."""
    named = module._parameters.items()
    return tuple(name for name, p in named if p is not None and p.dim() == 3)


def matrices_of_experts(module: nn.Module, fqn: str) -> Iterator[tuple[str, str]]:
    """Yields (name, reason) of the 2D parameters of a class of experts, such as DBRX's."""
    kind = type(module).__name__
    matrices = [name for name, p in module._parameters.items() if p is not None and p.dim() == 2]
    is_router = "Router" in kind or "Gate" in kind
    if "Expert" in kind and not is_router and not isinstance(module, nn.Linear):
        for name in matrices:
            yield join(fqn, name), f"a 2D parameter of {kind}; experts are 3D parameters"


def matching_globs(
    module: nn.Module, fqn: str, experts: Mapping[str, tuple[str, ...]]
) -> list[str]:
    """Returns the globs that match a module with all parameters that they name."""
    weights = set(weights_of(module))
    return [
        glob for glob, names in experts.items() if fnmatchcase(fqn, glob) and weights >= set(names)
    ]


def reason_of_kind(
    module: nn.Module, names: Sequence[str], named: tuple[str, ...] | None
) -> str | None:
    """Returns why a module with 3D parameters is of no form that can be converted."""
    if (product := next(products_of(module), None)) is not None:
        return already_converted(product.recipe)
    what = f"a 3D parameter of {type(module).__name__}"
    kind = None if isinstance(module, Experts) else foreign_kind(module, named is not None)
    if not isinstance(module, Experts) and kind is None:
        return f"{what}, no experts module of a known form{hint_of(module, names)}"
    if "forward" in module.__dict__:
        return f"{what}, whose forward is replaced on the instance"
    if named is None and is_projected(module) and is_row_major(module) is None:
        shapes = [tuple(module.get_parameter(name).shape) for name in names]
        return f"{what}, whose shapes {shapes} are of no known layout"
    for name in names:
        if (dtype := module.get_parameter(name).dtype) not in WEIGHT_DTYPES:
            return f"{what}, {name} of {dtype}; expected float32 or bfloat16"
    return None


def reason_of_forward(module: nn.Module, is_named: bool) -> str | None:
    """Returns how a module's forward differs from its conversion's, which runs both."""
    kind = None if isinstance(module, Experts) else foreign_kind(module, is_named)
    why = None if kind is None else kind.reason_against(module)
    what = f"a 3D parameter of {type(module).__name__}, whose forward"
    return None if why is None else f"{what} {why}"


def hint_of(module: nn.Module, names: Sequence[str]) -> str:
    """Returns the hint at mf.quantize_'s `experts`, where products could read the parameters.

    torch's own modules have no products of experts, and one matrix, such as a position embedding,
    is no experts.
    """
    is_torch = type(module).__module__.startswith("torch.nn.")
    is_one = all(module.get_parameter(name).shape[0] == 1 for name in names)
    return "" if is_torch or is_one else "; `experts` can name it"


def reason_against_primary_of(
    module: nn.Module,
    named: tuple[str, ...] | None,
    recipe: Recipe,
    owners: dict[int, list[nn.Module]],
) -> str | None:
    """Returns why an experts module's weights cannot be QuantizedTensors; None where they can."""
    if not reads_codes(module, named is not None):
        return "primary: the module's own forward reads the parameter"
    for name in chosen_weights(module):
        why = reason_against_primary(module.get_parameter(name), recipe, owners)
        if why is not None:
            return why
    return None


def reads_codes(module: nn.Module, is_named: bool) -> bool:
    """Tells whether a module's products read the parameters themselves, which may be codes."""
    return isinstance(module, Experts) or (not is_named and is_projected(module))


def foreign_kind(module: nn.Module, is_named: bool) -> type[Converted] | None:
    """Returns how a module is converted; None where it is no experts module of a known form."""
    if is_named:
        return NamedExperts
    if is_projected(module):
        return ProjectionExperts
    if has_counts(module):
        return CountedExperts
    return SeamExperts if has_seam(module) else None


def products_of(module: nn.Module) -> Iterator[GroupedProduct]:
    return (child for child in module._modules.values() if isinstance(child, GroupedProduct))


def require_recipe(fqn: str, recipe: Recipe) -> None:
    """Raises ValueError where x or g has 2D blocks, which the end of a group would cut."""
    products = (recipe.fprop, recipe.dgrad, recipe.wgrad)
    texts = [text for product in products for text in (product.a, product.b)]
    for name, text in zip(operand_names(), texts):
        if not name.startswith("w") and Spec.parse(text).block[0] > 1:
            raise ValueError(
                f"quantize_: {fqn}: expected {name} with blocks of one row, which the end of an "
                f"expert's rows cannot cut, got {text} ({recipe}); name another recipe for it in a "
                "recipe map"
            )


def select(model: nn.Module, filters: Filters, experts: Any, primary: bool) -> Selection:
    """Chooses the experts to convert, with a reason for each 3D parameter that is left out."""
    given = require_experts(experts)
    out = Selection([], [], {})
    matched: set[str] = set()
    owners = owners_of_weights(model)
    for raw_fqn, module in model.named_modules():
        fqn = clean_name(raw_fqn)
        weights, globs = weights_of(module), matching_globs(module, fqn, given)
        if not weights:
            out.skipped.extend(matrices_of_experts(module, fqn))
            continue
        matched.update(globs)
        named = given[globs[-1]] if globs else None
        recipe = filters.recipes.find(fqn)
        why = reason_of_kind(module, named or weights, named) or filters.reason(module, fqn)
        if why is None and primary and recipe is not None:
            why = reason_against_primary_of(module, named, recipe, owners)
        if why is None:
            why = reason_of_forward(module, named is not None)
        if why is None and recipe is not None:
            require_recipe(fqn, recipe)
            chosen = named or chosen_weights(module)
            out.chosen.append(Choice(fqn, module, chosen, recipe, named is not None))
        taken = () if why is not None else out.chosen[-1].names
        reason = why or "a 3D parameter of an experts module that no product reads"
        out.skipped.extend((join(fqn, name), reason) for name in weights if name not in taken)
    unused = [join(g, name) for g in given if g not in matched for name in given[g]]
    fqns = [
        join(clean_name(fqn), name)
        for fqn, module in model.named_modules()
        for name in weights_of(module)
    ]
    expected = "globs that match a module with the named 3D parameters"
    require_used("experts", expected, unused, fqns)
    find_routers(model, out)
    return out


def chosen_weights(module: nn.Module) -> tuple[str, ...]:
    """Returns the parameters that the products of a known form read."""
    if isinstance(module, Experts):
        return module.weight_names
    return ("gate_up_proj", "down_proj") if is_projected(module) else weights_of(module)


def find_routers(model: nn.Module, selection: Selection) -> None:
    """Lists the routers beside chosen experts: weights (E, D) of modules so named."""
    rows: dict[str, set[int]] = {}  # of a router's weight, by the name of the experts' parent
    for choice in selection.chosen:
        if choice.fqn:
            parent = choice.fqn.rpartition(".")[0]
            rows.setdefault(parent, {1}).add(experts_of(choice))
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules() if rows else ():
        modules.setdefault(clean_name(name), module)
    for parent, counts in rows.items():
        for name, module in modules[parent].named_modules():
            weight = module._parameters.get("weight")
            is_named = any(part in ROUTERS for part in name.split("."))
            if not is_named or weight is None or weight.dim() != 2:
                continue
            if weight.shape[0] in counts and module not in selection.routers:
                fqn = join(parent, clean_name(name))
                selection.routers[module] = fqn, ROUTER_REASON


def experts_of(choice: Choice) -> int:
    """Returns the number of experts, of all ranks together."""
    if isinstance(choice.module, Experts):
        return choice.module.experts
    return choice.module.get_parameter(choice.names[0]).shape[0]


def plan_gather(choice: Choice) -> tuple[Any, str]:
    """Plans how FSDP2 gathers the weights of an experts module.

    Returns:
        The plan, or None for the compute dtype; and the sentence for the report.
    """
    if reads_codes(choice.module, choice.is_named):
        return hooks().plan_experts(choice.recipe)
    return None, (
        "weight is gathered in the compute dtype: the module's own forward reads the parameter"
    )


def convert(
    choice: Choice,
    fqn: str,
    gather_plan: Any,
    *,
    primary: bool,
    keep_high_precision_init: bool,
    **history: Any,
) -> list[GroupedProduct]:
    """Converts one experts module in place.

    Args:
        choice: the module, its parameters and recipe.
        fqn: its name in the whole model, which streams of random bits come from.
        gather_plan: how FSDP2 gathers the weights as codes; None: in the compute dtype.
        primary: whether codes replace the weights.
        keep_high_precision_init: with primary, whether to copy the initial weights to attributes.
        history: of delayed scaling, as mf.quantize_'s.

    Returns:
        The new products.
    """
    module, names = choice.module, choice.names
    kind = None
    if not isinstance(module, Experts):
        kind = foreign_kind(module, choice.is_named)
    row_major = kind is ProjectionExperts and bool(is_row_major(module))
    products = add_products(
        module,
        names,
        choice.recipe,
        fqn,
        is_row_major=row_major,
        gather_plan=gather_plan,
        **history,
    )
    if primary:
        make_primary(module, names, choice.recipe, keep_high_precision_init, row_major)
    if kind is SeamExperts:
        number_products(module, names, products, fqn)
    if kind is not None:
        module.__class__ = converted_class(type(module), kind)
    if "transformers" in sys.modules:
        register_implementation()
    return products


def number_products(
    module: nn.Module, names: Sequence[str], products: Sequence[GroupedProduct], fqn: str
) -> None:
    """Names a seam's products by their number among the calls of a forward."""
    for i, (name, product) in enumerate(zip(names, products)):
        del module._modules[name + PRODUCT]
        product.rename(join(fqn, WHOLE.format(i)))
        module.add_module(WHOLE.format(i) + PRODUCT, product)


def revert(module: nn.Module) -> None:
    """Reverts the conversion of one module, complete or not."""
    remove_products(module)
    module.__dict__.pop("_calls", None)
    if isinstance(module, Converted):
        cast(Any, module).__class__ = module.original


def restore(model: nn.Module) -> None:
    """Reverts the conversion of all experts of a model."""
    for module in list(model.modules()):
        if any(True for _ in products_of(module)):
            revert(module)
            dequantize_parameters(module)
            for name in list(module.__dict__):
                if name.endswith(HIGH_PRECISION_INIT):
                    del module.__dict__[name]
