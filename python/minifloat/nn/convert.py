"""mf.quantize_: puts a model's linear layers under a recipe, in place; mf.restore_ takes them out.

A layer stays the object that it was: its class changes (nn.Linear <-> mf.Linear), so its
parameters, hooks, ties, dtype, device and state-dict keys are untouched, wherever it is referred to
from.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

from torch import Tensor, nn

from ..checks import require_bool, require_int, require_module
from ..recipe import Recipe, RecipeMap
from ..tensor.quantized_tensor import QuantizedTensor, require_weight_spec
from .distributed_hooks import COMPUTE_DTYPE, QUANTIZED, hooks, is_distributed
from .fast_paths import turn_off, turn_off_in, turn_on_in
from .linear import (
    DEFAULT_HISTORY,
    Linear,
    adopt,
    draw_from,
    release,
    require_history,
    require_releasable,
)
from .names import clean_name, join, unwrapped
from .operand_cache import share_inputs
from .random_state import (
    RngState,
    add_hooks,
    distributed_rank,
    find_hook,
    hooks_of,
    remove_hooks,
    require_int64,
)
from .selection import FilterFn, Report, Selection, require_filters, require_some, select


def quantize_(
    model: nn.Module,
    recipe: str | Recipe | RecipeMap,
    filter_fqns: Iterable[str] = (),
    filter_fn: FilterFn | None = None,
    *,
    primary: bool = False,
    keep_high_precision_init: bool = False,
    gather: str = QUANTIZED,
    seed: int = 0,
    data_parallel_rank: int | None = None,
    amax_history_length: int = DEFAULT_HISTORY,
    amax_algorithm: str = "max",
    margin: int = 0,
    verbose: bool = True,
) -> Report:
    """Converts nn.Linear layers in place; returns, and prints, which ones, and why the others not.

    recipe          a recipe for all, or a map: "*: nvfp4; *.output: bf16"
    filter_fqns     names to leave out: a layer whose name contains one; "auto_filter_small_kn"
                    leaves out those too small to pay (see mf.auto_filter_small_kn)
    filter_fn       (module, name) -> convert it?
    primary         the codes become the parameters: no high-precision weight is kept, and updates
                    smaller than half a step of the format are lost, so give the optimizer masters
                    of its own. Build the optimizer after this call. Until it returns, the
                    high-precision weights stay too, to undo a failure; mf.quantized_model_init
                    holds one layer's at a time
    keep_high_precision_init    with primary: the initial values stay as
                    module.weight_high_precision_init, on the CPU
    gather          under FSDP2: "quantized", weights travel as codes where those are fewer bits
                    than bf16; "compute_dtype", as FSDP2 alone has it
    seed            of stochastic rounding, mixed with data_parallel_rank; None: torch.distributed's
                    rank. Ranks that share data (tensor, sequence parallel) are given the same one
    amax_history_length, amax_algorithm, margin    of delayed scaling: steps kept, "max" or
                    "most_recent", powers of two of headroom

    A weight that is met again unchanged in micro-batches is quantized once a step, and so is an
    input that projections with the usual names share (q, k, v; gate, up): nn/operand_cache.py says
    when, and what memory that holds. Call mf.step(model) after opt.step().

    torch's fused inference of nn.TransformerEncoderLayer and the nested tensors of
    nn.TransformerEncoder are off where they would skip converted layers, until mf.restore_; the
    report's notes say where.

    Raises:
        TypeError, ValueError: an argument is not as expected, or nothing is left to convert. On
            any error the model is as it was.
    """
    model = unwrapped(require_module("quantize_", model))
    names = require_filters(filter_fqns, filter_fn)
    require_history(amax_history_length, amax_algorithm, margin)
    require_random_bits(seed, data_parallel_rank)
    require_gather(gather)
    require_primary(primary, keep_high_precision_init)
    require_bool("verbose", verbose)
    selection = select(model, RecipeMap(recipe), names, filter_fn)
    if primary:
        selection = without_unfit_weights(model, selection)
    require_some(selection)
    layers = [module for _, module, _ in selection.chosen]
    require_same_random_state(model, selection, seed, data_parallel_rank)
    plans = plan_gathers(model, selection, gather, primary)
    # Parts of a model that are converted one by one have layers of the same names, but not of the
    # same names in the whole, which give each its own random bits.
    is_stochastic = any(layer_recipe.is_stochastic for _, _, layer_recipe in selection.chosen)
    parents = parents_of(model) if is_stochastic else ""

    with ExitStack() as undo:
        undo.callback(turn_on_in, model, converted_layers(model))
        for module in model.modules():
            if not hooks_of(module):
                undo.callback(remove_hooks, module)
        for fqn, module, layer_recipe in selection.chosen:
            undo.callback(revert, module, module.weight)
            adopt(
                module,
                layer_recipe,
                join(parents, fqn),
                history_length=amax_history_length,
                algorithm=amax_algorithm,
                margin=margin,
                gather_plan=plans[fqn][0],
            )
            if primary:
                make_primary(module, layer_recipe, keep_high_precision_init)
        share_random_state(model, layers, seed, data_parallel_rank)
        share_inputs(model, {module: layer_recipe for _, module, layer_recipe in selection.chosen})
        notes = turn_off_in(model, converted_layers(model))
        undo.pop_all()

    report = Report(
        [(fqn, r.text) for fqn, _, r in selection.chosen],
        selection.skipped,
        {fqn: text for fqn, (_, text) in plans.items()},
        [(clean_name(fqn), sentence) for fqn, sentence in notes],
    )
    if verbose:
        print(report)
    return report


def restore_(model: nn.Module) -> nn.Module:
    """Gives back the nn.Linear layers that mf.quantize_ converted: the same objects and parameters.

    A quantized primary weight comes back in high precision, with the values of its codes.

    Raises:
        ValueError: FSDP2 gathers a weight as codes, or a layer is a subclass of mf.Linear, which
            was never an nn.Linear. The model is as it was then.
    """
    require_module("restore_", model)
    layers = converted_layers(model)
    for layer in layers:
        require_releasable(layer)
    for module in model.modules():
        remove_hooks(module)
    for layer in layers:
        release(layer)
    turn_on_in(model, converted_layers(model))
    return model


def converted_layers(model: nn.Module) -> dict[Linear, None]:
    """Finds the layers of the model, itself included, that are under a recipe now, in order."""
    return {module: None for module in model.modules() if isinstance(module, Linear)}


def revert(module: nn.Linear, weight: Tensor) -> None:
    """Takes back the conversion of one layer, however much of it was done."""
    if isinstance(module, Linear):
        module.weight = weight
        release(module)


def share_random_state(
    root: nn.Module, layers: list[nn.Linear], seed: int, data_parallel_rank: int | None
) -> None:
    """One RngState for the layers that need one, advanced by hooks of the root and its parts."""
    stochastic = [m for m in layers if isinstance(m, Linear) and m.recipe.is_stochastic]
    if not stochastic:
        return
    hook = find_hook(root)
    state = RngState(seed, data_parallel_rank) if hook is None else hook.state
    add_hooks(root, state, stochastic)
    for layer in stochastic:
        draw_from(layer, state)


def parents_of(model: nn.Module) -> str:
    """The model's name within the modules that hold it, as far up as there are any; "" for a root.

    A module does not refer to its parents, so all live modules are looked through.
    """
    holders: dict[int, tuple[str, nn.Module]] = {}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), nn.Module):
            for name, child in candidate.__dict__.get("_modules", {}).items():
                holders.setdefault(id(child), (name, candidate))
    names: list[str] = []
    while id(model) in holders and len(names) < len(holders):  # modules may hold each other
        name, model = holders[id(model)]
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            names.insert(0, name)
    return clean_name(".".join(names))


# ---- checks --------------------------------------------------------------------------------------


def require_random_bits(seed: int, data_parallel_rank: int | None) -> None:
    require_int64("seed", seed)
    if data_parallel_rank is not None:
        require_int("data_parallel_rank", data_parallel_rank, 0)


def require_gather(gather: str) -> None:
    if gather not in (QUANTIZED, COMPUTE_DTYPE):
        raise ValueError(f"gather: expected {QUANTIZED!r} or {COMPUTE_DTYPE!r}, got {gather!r}")


def require_primary(primary: bool, keep_high_precision_init: bool) -> None:
    require_bool("primary", primary)
    require_bool("keep_high_precision_init", keep_high_precision_init)
    if keep_high_precision_init and not primary:
        raise ValueError(
            "keep_high_precision_init: expected primary=True with it, got primary=False, "
            "where the weight itself stays in high precision"
        )


def require_same_random_state(
    root: nn.Module, selection: Selection, seed: int, data_parallel_rank: int | None
) -> None:
    """Requires the seed and rank of an earlier mf.quantize_ of the same root: it has one state."""
    hook = find_hook(root)
    if hook is None or not any(recipe.is_stochastic for _, _, recipe in selection.chosen):
        return
    rank = distributed_rank() if data_parallel_rank is None else data_parallel_rank
    for name, present, value in (
        ("seed", hook.state.seed, seed),
        ("data_parallel_rank", hook.state.rank, rank),
    ):
        if value != present:
            raise ValueError(
                f"{name}: expected {present}, which this model's converted layers draw their "
                f"random bits with, got {value}"
            )


# ---- how weights travel --------------------------------------------------------------------------


def owners_of_weights(model: nn.Module) -> dict[int, list[nn.Module]]:
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(module)
    return owners


def plan_gathers(
    model: nn.Module, selection: Selection, gather: str, primary: bool
) -> dict[str, tuple[Any, str]]:
    """Of each chosen layer: the plan, None for the compute dtype, and what the report says."""
    owners = owners_of_weights(model)
    recipes = {id(module): recipe for _, module, recipe in selection.chosen}

    def plan(module: nn.Linear, recipe: Recipe) -> tuple[Any, str]:
        if primary:
            return None, "its weight is codes"
        if gather == COMPUTE_DTYPE:
            return None, "weight travels in the compute dtype: gather says so"
        readers = {recipes.get(id(owner)) for owner in owners[id(module.weight)]}
        if len(readers) > 1:
            return None, "weight travels in the compute dtype: it is tied to another reader's"
        if recipe.is_delayed and len(owners[id(module.weight)]) > 1:
            return None, "weight travels in the compute dtype: tied, each reader has its own scale"
        return hooks().plan_gather(recipe)

    return {fqn: plan(module, recipe) for fqn, module, recipe in selection.chosen}


# ---- primary weights -----------------------------------------------------------------------------


def weight_specs(recipe: Recipe) -> tuple[str | None, str | None]:
    """The specs of W as fprop reads it and as dgrad does; None: in high precision."""
    row, col = recipe.fprop.b, recipe.dgrad.b
    return None if row == "bf16" else row, None if col == "bf16" else col


def reason_against_primary(
    module: nn.Linear, recipe: Recipe, owners: dict[int, list[nn.Module]]
) -> str | None:
    if len(owners[id(module.weight)]) > 1:
        return "primary: its weight is tied to another module's"
    if is_distributed(module.weight):
        return "primary: its weight is a DTensor"
    row, col = weight_specs(recipe)
    if row is None or col is None:
        return f"primary: {recipe} reads the weight in high precision too"
    try:
        require_weight_spec(row)
        require_weight_spec(col)
    except ValueError as error:
        return f"primary: {error}"
    return None


def without_unfit_weights(model: nn.Module, selection: Selection) -> Selection:
    """Layers whose weight cannot be kept as codes go to the skipped ones."""
    owners = owners_of_weights(model)
    chosen, skipped = [], list(selection.skipped)
    for fqn, module, recipe in selection.chosen:
        why_not = reason_against_primary(module, recipe, owners)
        if why_not is None:
            chosen.append((fqn, module, recipe))
        else:
            skipped.append((fqn, why_not))
    return Selection(chosen, skipped)


def make_primary(module: nn.Linear, recipe: Recipe, keep_high_precision_init: bool) -> None:
    weight = module.weight
    if keep_high_precision_init:
        module.weight_high_precision_init = weight.detach().cpu().clone()
    quantized = QuantizedTensor.from_tensor(weight.detach(), *weight_specs(recipe))
    module.weight = nn.Parameter(quantized, requires_grad=weight.requires_grad)
    if isinstance(module, Linear):
        module.weight_codes = None  # the parameter is the codes


@contextmanager
def quantized_model_init(
    recipe: str | Recipe, *, keep_high_precision_init: bool = False, seed: int = 0
) -> Iterator[None]:
    """nn.Linear built inside is an mf.Linear whose weight is codes from the start.

    Subclasses of nn.Linear, such as the out_proj of nn.MultiheadAttention, stay as they are.

        with mf.quantized_model_init("mxfp8_2d"):
            model = Model()

    Memory never holds more than one layer's high-precision weight. Random streams follow the order
    of construction, and each layer advances its own counter.

    Raises:
        TypeError, ValueError: an argument is not as expected, the recipe reads the weight in high
            precision, or the call is inside another quantized_model_init.
    """
    recipe = Recipe(recipe)
    require_bool("keep_high_precision_init", keep_high_precision_init)
    require_int64("seed", seed)
    specs = weight_specs(recipe)
    if None in specs:
        raise ValueError(f"quantized_model_init: {recipe} reads the weight in high precision")
    for spec in specs:
        require_weight_spec(str(spec))
    if getattr(nn.Linear.__init__, "is_quantized_model_init", False):
        raise ValueError("quantized_model_init: expected no other quantized_model_init around it")
    ordinal = count()
    plain_init = nn.Linear.__init__

    def init(self: nn.Linear, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        if type(self) is not nn.Linear:
            return
        adopt(self, recipe, f"linear.{next(ordinal)}")
        make_primary(self, recipe, keep_high_precision_init)
        share_random_state(self, [self], seed, None)
        turn_off(self)

    init.is_quantized_model_init = True  # type: ignore[attr-defined]
    nn.Linear.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Linear.__init__ = plain_init  # type: ignore[method-assign]
