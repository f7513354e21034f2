"""The choice of the experts that mf.quantize_ converts, and their conversion.

An experts module is converted as a whole: each of its 3D parameters gets a product under the
recipe of the module's name. Objects, parameters, ties, hooks and state-dict keys stay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...checks import require_text
from ...nn.convert.filters import Filters, require_used
from ...nn.convert.foreign_code import code_of
from ...nn.convert.reads import MISSING, hook_of
from ...nn.convert.selection import already_converted
from ...nn.grouped_product import (
    GroupedProduct,
    add_products,
    remove_products,
    require_recipe,
)
from ...nn.linear import (
    dequantize_parameters,
    make_primary,
    reason_against_primary,
    rebased,
)
from ...nn.names import clean_name, is_scripted, join, own_parameter, owners_of_parameters
from ...nn.registry import Choice, Selection
from ...nn.state.recipe_state import WEIGHT_DTYPES
from ...recipe import Recipe
from ..layer import Experts
from . import projections
from .converted import (
    Converted,
    CountedExperts,
    GroupedMmExperts,
    NamedExperts,
    converted_class,
    keep_settings,
)
from .implementations import reason_of_choice
from .projections import (
    FORMULA,
    ProjectionExperts,
    formula_of,
    is_row_major,
    register_implementation,
)
from .settings import SETTINGS, key_of, read_settings

FORMS = (ProjectionExperts, CountedExperts, GroupedMmExperts)
# The forms whose products read the parameters themselves, which may be codes.
READERS = (Experts, ProjectionExperts)
# Parts of names by which models call their router, whose weight is (E, D), and Qwen2-MoE's gate of
# the shared expert, whose weight is (1, D).
ROUTERS = ("router", "gate", "gating", "wg", "shared_expert_gate")
ROUTER_REASON = "a router beside experts, which stays in high precision"

Form = type[Experts] | type[Converted]


def require_experts(experts: object) -> dict[str, tuple[str, ...]]:
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
        texts = [require_text(f"experts: {glob}: a name", name) for name in names]
        found[glob] = tuple(dict.fromkeys(texts))
        if not found[glob]:
            raise ValueError(f"experts: {glob}: expected at least one parameter's name, got none")
    return found


def parameters_of(module: nn.Module, dims: int) -> tuple[str, ...]:
    """Returns the names of a module's parameters of so many dimensions."""
    named = module._parameters.items()
    return tuple(n for n, p in named if p is not None and not is_lazy(p) and p.dim() == dims)


def matrices_of_experts(module: nn.Module, fqn: str) -> Iterator[tuple[str, str]]:
    """Yields (name, reason) of the 2D parameters of a class of experts, such as DBRX's."""
    kind = type(module).__name__
    is_router = "Router" in kind or "Gate" in kind
    if "Expert" in kind and not is_router and not isinstance(module, nn.Linear):
        for name in parameters_of(module, 2):
            yield join(fqn, name), f"a 2D parameter of {kind}; experts are 3D parameters"


def form_of(module: nn.Module, is_named: bool) -> Form | None:
    """Returns the form of an experts module; None where it has none that is known."""
    if isinstance(module, Experts):
        return Experts
    return NamedExperts if is_named else next((f for f in FORMS if f.fits(module)), None)


def names_of(module: nn.Module, form: Form | None) -> tuple[str, ...]:
    """Returns the parameters that the products of a form read."""
    if isinstance(module, Experts):
        return module.weight_names
    return projections.NAMES if form is ProjectionExperts else parameters_of(module, 3)


def reason_of_form(module: nn.Module, names: Sequence[str], form: Form | None) -> str | None:
    """Returns why a module with 3D parameters is of no form that can be converted."""
    if (product := next(products_of(module), None)) is not None:
        return already_converted(product.recipe)
    what = f"a 3D parameter of {type(module).__name__}"
    if is_scripted(module):
        return f"{what}, a module of torch.jit"
    if form is None:
        return f"{what}, no experts module of a known form{hint_of(module, names)}"
    if "forward" in module.__dict__:
        return f"{what}, whose forward is replaced on the instance"
    if computed := [name for name in names if own_parameter(module, name) is None]:
        return f"{what}, which computes {' and '.join(computed)} in each forward"
    if form is ProjectionExperts and is_row_major(module) is None:
        shapes = [tuple(module.get_parameter(name).shape) for name in names]
        return f"{what}, whose shapes {shapes} are of no known layout"
    for name in names:
        if (dtype := module.get_parameter(name).dtype) not in WEIGHT_DTYPES:
            return f"{what}, {name} of {dtype}; expected float32 or bfloat16"
    return None


# Of each class, what comparisons of its modules found. A key has all that a comparison depends on.
COMPARISONS: WeakKeyDictionary[type, list[tuple[object, str | None]]] = WeakKeyDictionary()


def reason_of_forward(module: nn.Module, form: Form | None) -> str | None:
    """Returns how a module's forward differs from its conversion's; equal modules run once."""
    if form is None or not issubclass(form, Converted) or form is NamedExperts:
        return None
    cls, replaced = type(module), form.replaced(module)
    parts = list(module.modules())
    key = (
        form,
        (formula_of(module), reason_of_choice(module)) if form is ProjectionExperts else None,
        code_of(cls, *replaced).functions,
        key_of(read_settings(module, *replaced)),
        [(name, p.shape) for name, p in module.named_parameters()],
        [(type(m), [(k, type(v)) for k, v in m.__dict__.items()], [*m._buffers]) for m in parts],
        [*map(hook_of, parts)],
        torch.get_default_dtype(),
    )
    known = COMPARISONS.setdefault(cls, [])
    found = next((why for other, why in known if other == key), MISSING)
    if found is MISSING:
        found = form.reason_against(module)
        known.append((key, found))
    what = f"a 3D parameter of {cls.__name__}, whose forward"
    return None if found is None else f"{what} {found}"


def hint_of(module: nn.Module, names: Sequence[str]) -> str:
    """Returns the hint at mf.quantize_'s `experts`, where products could read the parameters.

    torch's own modules have no products of experts, and one matrix, such as a position embedding,
    is no experts.
    """
    is_torch = type(module).__module__.startswith("torch.nn.")
    is_one = all(module.get_parameter(name).shape[0] == 1 for name in names)
    return "" if is_torch or is_one else "; `experts` can name it"


def reason_against_codes(
    module: nn.Module, form: Form | None, recipe: Recipe, owners: dict[int, list[nn.Module]]
) -> str | None:
    """Returns why an experts module's weights cannot be QuantizedTensors; None where they can."""
    if form not in READERS:
        return "primary: the module's own forward reads the parameter"
    weights = [module.get_parameter(name) for name in names_of(module, form)]
    reasons = (reason_against_primary(weight, recipe, owners) for weight in weights)
    return next((why for why in reasons if why is not None), None)


def products_of(module: nn.Module) -> Iterator[GroupedProduct]:
    return (child for child in module._modules.values() if isinstance(child, GroupedProduct))


def select(model: nn.Module, filters: Filters, experts: object, primary: bool) -> Selection:
    """Chooses the experts to convert, with a reason for each 3D parameter that is left out."""
    given = require_experts(experts)
    out = Selection([], [], {})
    matched: set[str] = set()
    fqns: list[str] = []  # of all 3D parameters
    owners = owners_of_parameters(model)
    for raw_fqn, module in model.named_modules():
        fqn, weights = clean_name(raw_fqn), parameters_of(module, 3)
        if not weights and not isinstance(module, Experts):
            out.skipped.extend(matrices_of_experts(module, fqn))
            continue
        fqns += [join(fqn, name) for name in weights]
        globs = [g for g in given if fnmatchcase(fqn, g) and {*weights} >= {*given[g]}]
        matched.update(globs)
        form = form_of(module, bool(globs))
        names = given[globs[-1]] if globs else names_of(module, form)
        recipe = filters.recipes.find(fqn)
        why = reason_of_form(module, names, form) or filters.reason(module, fqn)
        if why is None and primary and recipe is not None:
            why = reason_against_codes(module, form, recipe, owners)
        why = why or reason_of_forward(module, form)
        if why is None and recipe is not None and form is not None:
            require_recipe(fqn, recipe)
            out.chosen.append(Choice(fqn, module, names, recipe, form, form in READERS))
        taken = names if why is None else ()
        reason = why or "a 3D parameter of an experts module that no product reads"
        every = dict.fromkeys((*weights, *names))  # of which a parametrization computes some
        out.skipped.extend((join(fqn, name), reason) for name in every if name not in taken)
    unused = [join(g, name) for g in given if g not in matched for name in given[g]]
    expected = "globs that match a module with the named 3D parameters"
    require_used("experts", expected, unused, fqns)
    find_routers(model, out)
    return out


def find_routers(model: nn.Module, selection: Selection) -> None:
    """Lists the routers beside chosen experts, or a list of experts: weights (E, D), by name."""
    rows: dict[str, set[int]] = {}  # of a router's weight, by the name of the experts' parent
    for name, module in model.named_modules():
        parent, _, own = clean_name(name).rpartition(".")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and "expert" in own:
            rows.setdefault(parent, {1}).add(len(module))
    for choice in selection.chosen:
        if not choice.fqn:
            continue
        if isinstance(choice.module, Experts):  # whose parameters may be those of one rank
            experts = choice.module.experts
        else:
            experts = choice.module.get_parameter(choice.names[0]).shape[0]
        rows.setdefault(choice.fqn.rpartition(".")[0], {1}).add(experts)
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules() if rows else ():
        modules.setdefault(clean_name(name), module)
    for parent, counts in rows.items():
        for name, module in modules[parent].named_modules():
            weight = own_parameter(module, "weight")
            is_named = any(part in ROUTERS for part in name.split("."))
            if not is_named or weight is None or is_lazy(weight) or weight.dim() != 2:
                continue
            if weight.shape[0] in counts and module not in selection.routers:
                fqn = join(parent, clean_name(name))
                selection.routers[module] = fqn, ROUTER_REASON


def convert(
    choice: Choice,
    gather_plan: object,
    *,
    primary: bool,
    keep_high_precision_init: bool,
    **history: Any,
) -> list[GroupedProduct]:
    """Converts one experts module in place.

    Args:
        choice: the module, its name, form, parameters and recipe.
        gather_plan: how FSDP2 gathers the weights as codes; None: in the compute dtype.
        primary: whether codes replace the weights.
        keep_high_precision_init: with primary, whether to keep the initial weights with the codes.
        history: of delayed scaling, as mf.quantize_'s.

    Returns:
        The new products.
    """
    module, names, form = choice.module, choice.names, choice.form
    row_major = form is ProjectionExperts and bool(is_row_major(module))
    products = add_products(
        module,
        names,
        choice.recipe,
        choice.fqn,
        is_row_major=row_major,
        gather_plan=gather_plan,
        **history,
    )
    if primary:
        make_primary(module, names, choice.recipe, keep_high_precision_init, row_major)
    if form is GroupedMmExperts:
        GroupedMmExperts.number_products(module, names, products, choice.fqn)
    if form is ProjectionExperts:
        module.__dict__[FORMULA] = formula_of(module)
    if issubclass(form, Converted):
        module.__class__ = converted_class(type(module), form)
        keep_settings(cast(Converted, module))
    if "transformers" in sys.modules:
        register_implementation()
    return products


def revert(module: nn.Module) -> None:
    """Reverts the conversion of one module, complete or not."""
    remove_products(module)
    for name in ("_calls", SETTINGS, FORMULA):
        module.__dict__.pop(name, None)
    if isinstance(module, Converted):
        form = converted_class(module.original, module.form)
        module.__class__ = rebased(type(module), form, module.original)


def restore(model: nn.Module) -> None:
    """Reverts the conversion of all experts of a model."""
    for module in list(model.modules()):
        if next(products_of(module), None) is not None:
            revert(module)
            dequantize_parameters(module)
