"""Conversion of a model's layers: mf.quantize_ and mf.restore_.

A conversion changes the class of a linear layer in place (nn.Linear <-> mf.Linear), and gives
experts the state of their products (moe/convert/experts.py). With `fuse` feed-forwards become MLPs
in place (nn/fuse/find_mlps.py). The object, its parameters, hooks, ties, dtype, device and state-
dict keys stay, so references to the layer remain valid.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import cast

from torch import nn

from ...checks import require_bool, require_int, require_module, require_one_of
from ...recipe import Recipe, RecipeMap
from ..accumulation import ACCUMULATE
from ..cache.operand_cache import share_inputs
from ..fuse.find_mlps import convert_mlps, mlps_of, restore_mlps
from ..linear import (
    Linear,
    adopt,
    class_without_recipe,
    dequantize_parameters,
    make_primary,
    require_primary,
    restore_linear,
)
from ..linear_state import LinearState
from ..names import unwrapped
from ..registry import CODES, COMPUTE_DTYPE, expert_functions, first_of_library, layers_of
from ..shared_amax import GATHERED_WHOLE, SHARE_AMAX, find_groups
from ..state.model_state import (
    require_same_random_state,
    share_random_state,
)
from ..state.random_hooks import hooks_of, remove_hooks
from ..state.recipe_state import (
    DEFAULT_DELAYED,
    RECOMPUTE,
    DelayedScaling,
    RecipeState,
    converted,
    require_delayed_scaling,
)
from .fast_paths import disable_fast_paths_in, enable_fast_paths_in
from .filters import DEFAULT_KEEP, FilterFn, Filters, Keep, read_recipe
from .selection import Report, plan_gathers, require_chosen, select

LOGGER = logging.getLogger("minifloat")


def quantize_(
    model: nn.Module,
    recipe: str | Recipe | RecipeMap,
    filter_fn: FilterFn | None = None,
    *,
    filter_fqns: Iterable[str] = (),
    keep: Keep = DEFAULT_KEEP,
    experts: Mapping[str, Iterable[str]] | None = None,
    primary: bool = False,
    keep_high_precision_init: bool = False,
    gather: str = CODES,
    seed: int = 0,
    data_parallel_rank: int | None = None,
    delayed_scaling: DelayedScaling = DEFAULT_DELAYED,
    fuse: bool = False,
    recompute: str | None = None,
    accumulate: str | None = None,
    share_amax: str | None = None,
) -> Report:
    """Converts linear layers and experts in place, and reports which ones.

    The report is returned, and logged by the logger "minifloat" at the level INFO.

    nn.Linear layers become mf.Linear. Experts are converted in mf.MoE, in modules with torchtitan's
    method _grouped_mm(self, *, A, B_t, offs), in Hugging Face's modules with gate_up_proj and
    down_proj, and where `experts` names them. Routers beside them are left out (docs/moe.md).

    Call mf.step(model) after opt.step(). nn/cache/operand_cache.py describes which codes are cached
    between forwards, and how much memory they take.

    torch's fused inference of nn.TransformerEncoderLayer and the nested tensors of
    nn.TransformerEncoder would skip converted layers. Both are off until mf.restore_, and the
    report's notes name the modules.

    Args:
        model: its linear layers and experts have float32 or bfloat16 weights.
        recipe: one for all layers, or a map from module names: "*: nvfp4; layers.0.*: mxfp8".
        filter_fn: (module, name) -> whether to convert the layer.
        filter_fqns: texts. A layer whose name contains one is left out. The text
            "auto_filter_small_kn" leaves out small layers (see mf.nn.auto_filter_small_kn).
        keep: what else stays in high precision: "head", the layer that computes logits;
            "nvfp4_paper", the head and the last blocks; "nothing" (nn/convert/filters.py). A
            recipe's text may end with it instead: "nvfp4 keep=nvfp4_paper".
        experts: glob of modules' names -> names of 3D parameters, which the modules' forward
            multiplies with by torch's grouped_mm, bmm or matmul.
        primary: whether the codes replace the high-precision weight as the parameter: for weights
            that stay frozen, or that sharded masters update (docs/zero.md). Of other updates, those
            smaller than half a step of the format are lost. Build the optimizer after this call.
            safetensors cannot save codes: call mf.restore_ before. Until this call returns, all
            high-precision weights stay in memory, to undo a failure; quantized_model_init holds
            only one layer's at a time.
        keep_high_precision_init: with primary, whether to keep the values that a weight had, on the
            CPU: weight.get_high_precision_init_val() returns them, and
            weight.clear_high_precision_init_val() frees them.
        gather: how FSDP2 gathers weights: "codes", where they have fewer bits than bf16, or
            "compute_dtype", as FSDP2 does by itself.
        seed: of stochastic rounding, 64 bits with sign. It is mixed with data_parallel_rank, and
            with each layer's name in `model`. Parts of a model that are converted one by one, and
            that have layers of equal names, need a seed each: mf.step raises an error otherwise.
        data_parallel_rank: at least 0; None: torch.distributed's rank, of Megatron-Core's models
            that of its data-parallel group. Ranks that share data (tensor or sequence parallel)
            need the same number.
        delayed_scaling: how scales follow from the amaxes of earlier steps, of recipes with delayed
            scaling.
        fuse: whether feed-forwards become one op (docs/memory.md), as an mf.MLP always does.
        recompute: what backward computes again instead of saving: "weight", the codes of weights
            (docs/memory.md gives the price), or None, nothing.
        accumulate: of linear layers, where backward adds a weight's gradient in float32, within the
            product where the GPU's kernel can: "main_grad", the attribute main_grad of the weight,
            which the caller allocates, zeroes and reads; "grad", .grad, which is float32. None:
            autograd receives the gradient in the weight's dtype (docs/memory.md).
        share_amax: "servers": the weights of q, k and v, and of gate and up, which vLLM and SGLang
            multiply as one, have one amax where they have a scale of the tensor
            (docs/choose.md). Each forward then casts them again, and reads their amaxes, also
            within micro-batches; FSDP2 gathers them in the compute dtype. None: each has its own.

    Returns:
        The names of converted layers with their recipes, and of others with reasons.

    Raises:
        TypeError, ValueError: an argument is not as expected, a text of filter_fqns or a glob of
            the recipe map matches no module, or no layer is left to convert; share_amax with
            primary or recompute, or where no layers can share one. The model is unchanged after any
            error.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        >>> print(mf.quantize_(model, "*: mxfp8; 1: bf16"))
        minifloat: 1 converted, 1 not; the head: none found
          + 0  mxfp8
          - 1  the recipe map says bf16
        >>> model[0]
        Linear(in_features=64, out_features=64, bias=True, recipe='mxfp8')
    """
    model = unwrapped(require_module("quantize_", model))
    require_delayed_scaling(delayed_scaling)
    require_int("seed", seed)
    if data_parallel_rank is not None:
        require_int("data_parallel_rank", data_parallel_rank, 0)
    require_one_of("gather", gather, (CODES, COMPUTE_DTYPE))
    require_primary(primary, keep_high_precision_init)
    require_bool("fuse", fuse)
    require_one_of("recompute", recompute, RECOMPUTE)
    require_one_of("accumulate", accumulate, ACCUMULATE)
    require_one_of("share_amax", share_amax, SHARE_AMAX)
    if share_amax and (primary or recompute):
        raise ValueError(
            "share_amax: expected primary=False and recompute=None with it, got "
            f"primary={primary}, recompute={recompute!r}"
        )
    found = first_of_library(model)
    if data_parallel_rank is None and found is not None:
        data_parallel_rank = found[0].data_parallel_rank()
    recipe_map, policy = read_recipe(recipe, keep)
    filters = Filters(model, recipe_map, filter_fqns, filter_fn, policy)
    selection = select(
        model, filters, expert_functions.select(model, filters, experts, primary), primary
    )
    require_chosen(selection, filters)
    if any(choice.recipe.is_stochastic for choice in selection.chosen):
        require_same_random_state(model, seed, data_parallel_rank)
    groups = find_groups(model, selection.chosen) if share_amax else {}
    plans = plan_gathers(model, selection.chosen, gather, primary)
    plans |= {fqn: (None, GATHERED_WHOLE) for fqn in groups}

    layers: list[RecipeState] = []
    with ExitStack() as undo:
        undo.callback(enable_fast_paths_in, model)
        for module in model.modules():
            undo.callback(remove_hooks, module, hooks_of(module))
        for choice in selection.chosen:
            undo.callback(revert, choice.module, dict(choice.module._parameters))
            plan = plans.get(choice.fqn, (None, ""))[0]
            if choice.library is not None:
                if primary:
                    choice.library.hold_codes()
                new: list[RecipeState] = choice.library.convert(choice, delayed_scaling)
            elif not choice.is_of_experts:
                layer = adopt(choice.module, choice.recipe, choice.fqn, delayed_scaling, plan)
                layer.amax_group = groups.get(choice.fqn)
                new = [layer]
            else:
                new = expert_functions.convert(
                    choice,
                    plan,
                    primary=primary,
                    keep_high_precision_init=keep_high_precision_init,
                    delayed=delayed_scaling,
                )
            for state in new:
                state.recompute = recompute or ""
                if isinstance(state, LinearState):
                    state.accumulate = accumulate or state.accumulate
            if primary and not choice.is_of_experts:
                make_primary(choice.module, choice.names, choice.recipe, keep_high_precision_init)
            layers += new
        share_random_state(model, layers, seed, data_parallel_rank)
        share_inputs(model, {m: m.recipe for m in layers if isinstance(m, Linear)})
        notes = disable_fast_paths_in(model)
        notes += [
            (text, "matches nothing in this stage of the pipeline") for text in filters.unused
        ]
        undo.callback(restore_mlps, model, mlps_of(model))
        fused, not_fused = convert_mlps(model, all_classes=fuse)
        if found is not None:
            named = [f"{each.fqn} under {each.recipe}" for each in layers if not each.is_of_rank]
            found[0].require_same(named)
        undo.pop_all()

    for choice in selection.chosen:
        if (parallel := getattr(choice.module, "parallel", None)) is not None:
            notes.append((choice.fqn, parallel.describe(choice.module)))
    rows = [(row, choice) for choice in selection.chosen for row in choice.rows]
    recipes = [(row, choice.recipe.text) for row, choice in rows]
    gathers = {row: plans[choice.fqn][1] for row, choice in rows if choice.fqn in plans}
    report = Report(recipes, selection.skipped, gathers, notes, fused, not_fused, filters.heads)
    LOGGER.info("%s", report)
    return report


def restore_(model: nn.Module) -> nn.Module:
    """Undoes mf.quantize_ in place, with the same parameters; codes become their values."""
    require_restorable(model)
    for module in model.modules():
        remove_hooks(module)
    restore_mlps(model)
    dequantize_parameters(model)
    for module in list(model.modules()):
        if isinstance(module, Linear):
            restore_linear(module)
        elif (library := layers_of(module)) is not None:
            library.restore(module)
    expert_functions.restore(model)
    enable_fast_paths_in(model)
    return model


def require_restorable(model: nn.Module) -> None:
    """Raises TypeError for what is no module, ValueError where mf.restore_ refuses a layer."""
    require_module("restore_", model)
    for _, state in converted(model):
        if state.weight_gather is not None:
            raise ValueError(
                f"restore_: expected a model that FSDP2 has not sharded, but {state.fqn} is "
                "gathered as codes; restore it before fully_shard"
            )
        if isinstance(state, LinearState) and class_without_recipe(type(state)) is None:
            raise ValueError(
                f"restore_: expected layers that were nn.Linear, but {state.fqn} was built as a "
                f"{type(state).__name__}, a subclass of minifloat.Linear"
            )


def revert(module: nn.Module, parameters: dict[str, nn.Parameter | None]) -> None:
    """Reverts the conversion of one module, complete or not."""
    if isinstance(module, LinearState):
        module.weight = cast(nn.Parameter, parameters["weight"])
    if isinstance(module, Linear):
        restore_linear(module)
    elif (library := layers_of(module)) is not None:
        module._parameters.update(parameters)
        library.restore(module)
    elif not isinstance(module, nn.Linear):
        expert_functions.revert(module)
        module._parameters.update(parameters)
