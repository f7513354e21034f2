"""The choice of the linear layers to convert, how FSDP2 will gather weights, and the report.

Each layer that is left out has a reason. moe/convert/experts.py chooses experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from ...recipe import Recipe
from ..linear import reason_against_primary
from ..names import join, own_parameter, owners_of_parameters
from ..registry import (
    COMPUTE_DTYPE,
    Choice,
    LibraryLayers,
    PlannedGather,
    Selection,
    distributed_functions,
    is_distributed,
    layers_of,
    named_modules,
)
from ..state.recipe_state import WEIGHT_DTYPES
from .filters import Filters
from .foreign_code import code_of, reason_unsafe
from .replica import CannotCopyError, replica, seeded
from .same_result import Trial, isolated

# Of the inputs by which a Conv1D is compared with nn.Linear.
LINEAR_SCALES = (2.0**-10, 1.0, 2.0**10)

LAZY = "lazy: it has no shape before its first forward; it can be converted after that"


@dataclass(frozen=True)
class Report:
    """The layers that mf.quantize_ converted, and those that it left out.

    Args:
        converted: (name, recipe) of each converted linear layer and 3D parameter.
        skipped: (name, reason) of each other one, of routers beside converted experts, and of
            weights that other modules multiply with.
        gather: name -> how FSDP2 gathers the weight; printed where torch.distributed is in use.
        notes: (name, sentence) of each other module whose behaviour changes, such as a fast path
            that is off, and of each text of an argument that matches nothing in a stage of a
            pipeline.
        fused: (name, sentence) of each feed-forward that is one op.
        not_fused: (name, reason) of each that could be expected to be.
        heads: the names of heads, whether they stay or the recipe map names them; empty: none was
            found. None: keep="nothing" looks for none.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        >>> report = mf.quantize_(model, "mxfp8", filter_fqns=["1"])
        >>> report.converted, report.skipped
        ([('0', 'mxfp8')], [('1', "filter_fqns has '1'")])
    """

    converted: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    gather: dict[str, str] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    fused: list[tuple[str, str]] = field(default_factory=list)
    not_fused: list[tuple[str, str]] = field(default_factory=list)
    heads: Sequence[str] | None = None

    def __str__(self) -> str:
        head = "" if self.heads is None else f"; the head: {', '.join(self.heads) or 'none found'}"
        lines = [f"minifloat: {len(self.converted)} converted, {len(self.skipped)} not{head}"]
        gather = self.gather if dist.is_available() and dist.is_initialized() else {}
        rows = [
            ("+", fqn, f"{recipe}; {gather[fqn]}" if fqn in gather else recipe)
            for fqn, recipe in self.converted
        ]
        rows += [("-", *row) for row in self.skipped]
        rows += [("*", *row) for row in self.fused]
        rows += [("-", fqn, f"not fused: {reason}") for fqn, reason in self.not_fused]
        rows += [("!", *row) for row in self.notes]
        width = max((len(display(fqn)) for _, fqn, _ in rows), default=0)
        lines += [f"  {sign} {display(fqn):<{width}}  {text}" for sign, fqn, text in rows]
        return "\n".join(lines)


def display(fqn: str) -> str:
    """Returns the name that a report prints."""
    return fqn or "(the model itself)"


def is_attention(module: nn.Module) -> TypeGuard[nn.MultiheadAttention]:
    """Tells whether torch reads the weights of a module's projections without calling a layer."""
    attention = nn.MultiheadAttention
    return isinstance(module, attention) and type(module).forward is attention.forward


def skipped_kinds(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields (name, reason) of weights of linear layers that are no nn.Linear, or lazy."""
    for fqn, module in named_modules(model):
        lazy = [name for name, p in module.named_parameters(recurse=False) if is_lazy(p)]
        if not isinstance(module, nn.Linear):
            yield from ((join(fqn, name), LAZY) for name in lazy)
        if is_conv1d(module):
            what, why = type(module).__name__, reason_against_linear(module)
            how = "to convert it, first call minifloat.transformers.replace_conv1d_(model)"
            yield fqn, f"{what}, whose weight is (K, N); {how if why is None else why}"
        elif is_attention(module):
            for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                if own_parameter(module, name) is not None:
                    yield (
                        join(fqn, name),
                        f"{type(module).__name__} multiplies with it without calling a layer; a "
                        "module with nn.Linear projections around "
                        "F.scaled_dot_product_attention can be converted",
                    )


def is_conv1d(module: nn.Module) -> bool:
    """Tells whether this is transformers' Conv1D or derived from it, without importing that.

    Its weight is (K, N).
    """
    names = [cls.__name__ for cls in type(module).__mro__]
    features = getattr(module, "nx", None), getattr(module, "nf", None)
    weight = own_parameter(module, "weight")
    return "Conv1D" in names and weight is not None and tuple(weight.shape) == features


@isolated()
def reason_against_linear(module: Any) -> str | None:
    """Returns why nn.Linear cannot stand for a Conv1D; None where it can."""
    if "forward" in module.__dict__:
        return "its forward is replaced on the instance"
    if list(module._parameters) != ["weight", "bias"] or module._modules or module._buffers:
        return "it has more parameters, buffers or modules than Conv1D"
    if hasattr(module.weight, "_local_tensor"):
        return "its weight is sharded already"
    forward = type(module).forward
    if (why := reason_unsafe(code_of(type(module), forward))) is not None:
        return f"its forward {why}"
    sizes = {module.nx: 24, module.nf: 24 if module.nx == module.nf else 40}
    try:
        theirs, ours = replica(module, sizes), replica(module, sizes)
    except CannotCopyError as error:
        return f"it {error}"

    def linear(model: Any, x: Tensor) -> Tensor:
        return nn.functional.linear(x, model.weight.t(), model.bias)

    for mode, count, scale in itertools.product((True, False), (4, 65, 129, 1025), LINEAR_SCALES):
        x = seeded((2, count, 24), 1) * scale
        why = Trial(theirs.train(mode), ours, forward, linear, (x,), bound=0).difference()
        if why is not None:
            return f"its forward {why}"
    return None


def already_converted(recipe: Recipe) -> str:
    """Returns why a converted layer is left out."""
    return f"already converted ({recipe}); mf.restore_ undoes that"


def reason_of_kind(
    module: nn.Module, library: LibraryLayers | None, is_read_past: bool
) -> str | None:
    """Returns why a module of this kind cannot be converted; None where it can."""
    if isinstance(recipe := getattr(module, "recipe", None), Recipe):
        return already_converted(recipe)
    if library is not None:
        return library.reason(module)
    if is_read_past:
        return (
            f"{type(module).__name__}: nn.MultiheadAttention reads its weight, and in_proj_weight, "
            "without calling a layer"
        )
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        return LAZY
    if is_parametrized(module):
        return "parametrized (torch.nn.utils.parametrize); it can be converted before that"
    if type(module) is not nn.Linear:
        return f"a subclass of nn.Linear, {type(module).__name__}"
    if "forward" in module.__dict__:
        return "its forward is replaced on the instance"
    if module._parameters.get("weight") is None:
        hooks = {type(hook).__name__ for hook in module._forward_pre_hooks.values()} - {"function"}
        how = f", but computed before each forward ({', '.join(sorted(hooks))})" if hooks else ""
        return f"its weight is no parameter{how}"
    if module.weight.dtype not in WEIGHT_DTYPES:
        return f"its weight is {module.weight.dtype}; expected float32 or bfloat16"
    return None


def select(model: nn.Module, filters: Filters, experts: Selection, primary: bool) -> Selection:
    """Chooses the linear layers to convert. The result has the experts too.

    Args:
        model: the model.
        filters: what the arguments of mf.quantize_ leave out.
        experts: those to convert, and the routers beside them, which are left out.
        primary: whether layers are left out whose weight cannot be a QuantizedTensor.
    """
    out, routers = Selection([], []), experts.routers
    read_past = {module.out_proj for module in model.modules() if is_attention(module)}
    owners = owners_of_parameters(model)

    def reason(
        module: Any, library: LibraryLayers | None, fqn: str, recipe: Recipe | None
    ) -> str | None:
        if module in routers:
            return routers[module][1]
        if (why := reason_of_kind(module, library, module in read_past)) is not None:
            out.unfit.append(fqn)
            return why
        why = filters.reason(module, fqn)
        if why is None and primary and recipe is not None:
            weights = (module.get_parameter(name) for name in names_of(module, library))
            whys = (reason_against_primary(weight, recipe, owners) for weight in weights)
            why = next(filter(None, whys), None)
        return why

    for fqn, module in named_modules(model):
        library = None if isinstance(module, nn.Linear) else layers_of(module)
        if not isinstance(module, nn.Linear) and library is None:
            continue
        recipe = filters.recipes.find(fqn)
        why_not = reason(module, library, fqn, recipe)
        if why_not is not None:
            out.skipped.append((fqn, why_not))
        elif recipe is not None:
            names, kind = names_of(module, library), type(module)
            out.chosen.append(Choice(fqn, module, names, recipe, kind, library=library))
    out.skipped.extend(row for m, row in routers.items() if not isinstance(m, nn.Linear))
    out.skipped.extend(skipped_kinds(model))
    out.skipped.extend(experts.skipped)
    out.chosen.extend(experts.chosen)
    return out


def names_of(module: nn.Module, library: LibraryLayers | None) -> tuple[str, ...]:
    """Returns the names of the parameters that a layer multiplies with."""
    return ("weight",) if library is None else library.weights(module)


def require_chosen(selection: Selection, filters: Filters) -> None:
    """Raises ValueError, with every reason and its count, where there is nothing to convert.

    A stage of a pipeline may have none, where other stages have the layers that a filter leaves.
    """
    converts_nothing = all(recipe.text == "bf16" for _, recipe in filters.recipes.entries)
    if selection.chosen or (filters.is_stage and not selection.unfit and not converts_nothing):
        return
    names: dict[str, list[str]] = {}
    for fqn, why in selection.skipped:
        names.setdefault(why, []).append(display(fqn))
    reasons = [f"{len(fqns)} x {why} (such as {fqns[0]})" for why, fqns in names.items()]
    listed = "; ".join(reasons) or "the model has no nn.Linear"
    raise ValueError(f"quantize_: nothing to convert; {listed}")


def plan_gathers(
    model: nn.Module, chosen: Sequence[Choice], gather: str, primary: bool
) -> dict[str, PlannedGather]:
    """Plans how FSDP2 gathers the weights of each chosen module.

    Returns:
        Name -> (plan, or None for the compute dtype; sentence for the report).

    Raises:
        ValueError: FSDP2 has sharded a weight that is to be gathered as codes.
    """
    owners = owners_of_parameters(model)
    recipes = {id(choice.module): choice.recipe for choice in chosen}

    def reason_against_codes(choice: Choice) -> str | None:
        if gather == COMPUTE_DTYPE:
            return "gather says so"
        readers = [owner for weight in choice.weights for owner in owners[id(weight)]]
        is_tied = len(readers) > len(choice.names)
        if isinstance(choice.module, nn.Linear):
            if any(recipes.get(id(reader)) != choice.recipe for reader in readers):
                return "it is tied to another reader's"
            is_scaled_twice = is_tied and choice.recipe.is_delayed
            return "it is tied, and each reader has its own scale" if is_scaled_twice else None
        if is_tied:
            return "a weight of the module is tied to another's"
        placements = [p for w in choice.weights if is_distributed(w) for p in w.placements]
        if any(getattr(placement, "dim", 0) != 0 for placement in placements):
            return "ranks cut the experts' matrices"
        return None if choice.reads_codes else "the module's own forward reads the parameter"

    def plan(choice: Choice) -> PlannedGather:
        if primary:
            return None, "its weight is codes"
        if (why := reason_against_codes(choice)) is not None:
            return None, f"weight is gathered in the compute dtype: {why}"
        is_linear = isinstance(choice.module, nn.Linear)
        plan_for = (
            distributed_functions.plan_gather if is_linear else distributed_functions.plan_experts
        )
        planned = plan_for(choice.recipe)
        for weight in choice.weights if planned[0] is not None else ():
            if is_distributed(weight):
                distributed_functions.require_no_shard(choice.module, choice.fqn, weight)
        return planned

    return {choice.fqn: plan(choice) for choice in chosen if choice.library is None}
