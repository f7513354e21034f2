"""The choice of the linear layers to convert, with a reason for each layer that is left out.

moe/convert.py chooses experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ..checks import require_text
from ..recipe import Recipe, RecipeMap
from .conv1d import is_conv1d, reason_against_linear
from .names import clean_name, join

WEIGHT_DTYPES = (torch.float32, torch.bfloat16)

FilterFn = Callable[[nn.Module, str], bool]
AUTO_FILTER = "auto_filter_small_kn"

# Recipe -> pairs (K, N): a layer of at most K inputs and at most N outputs is left out. On an H200,
# with 16384 tokens in eager mode, such layers are slower than bf16, and the next larger sizes are
# faster (docs/measured.md, "Small layers").
ANY = 1 << 62
SMALL_KN = {
    "fp8_tensorwise": ((1024, 1024),),
    "fp8_rowwise": ((1024, 2048), (2048, 1024)),
    "mxfp4": ((1024, ANY), (2048, 2048), (4096, 1024)),
    "nvfp4_pow2": ((1024, ANY), (2048, 2048), (8192, 1024)),
}


def auto_filter_small_kn(recipe: str | Recipe) -> FilterFn:
    """Returns a filter that leaves out layers that a recipe makes slower than bf16.

    The thresholds were measured on one H200 with 16384 tokens (docs/measured.md, "Small layers").
    They do not hold for other devices or for fewer tokens.

    Args:
        recipe: "fp8_tensorwise", "fp8_rowwise", "mxfp4" or "nvfp4_pow2".

    Returns:
        A function of (module, name) for mf.quantize_'s filter_fn: True for a large enough layer,
        and for experts, which have no thresholds.

    Raises:
        ValueError: the recipe has no measured thresholds.
    """
    name = Recipe(recipe).text
    if name not in SMALL_KN:
        raise ValueError(
            "auto_filter_small_kn: expected a recipe with thresholds, "
            f"{', '.join(SMALL_KN)}, got {name!r}"
        )
    thresholds = SMALL_KN[name]

    def is_large_enough(module: nn.Module, fqn: str) -> bool:
        if not isinstance(module, nn.Linear):
            return True
        n, k = module.weight.shape
        return not any(k <= small_k and n <= small_n for small_k, small_n in thresholds)

    return is_large_enough


@dataclass(frozen=True)
class Fusion:
    """A norm or an activation that only converted layers read, or that looks so.

    Args:
        fqn: its name.
        text: the layers whose casts it is fused with, or why it is not fused.
        is_fused: whether it is.
    """

    fqn: str
    text: str
    is_fused: bool


@dataclass(frozen=True)
class Report:
    """The layers that mf.quantize_ converted, and those that it left out.

    Args:
        converted: (name, recipe) of each converted linear layer and 3D parameter.
        skipped: (name, reason) of each other one, of routers beside converted experts, and of
            weights that other modules multiply with.
        gather: name -> how FSDP2 gathers the weight; printed where torch.distributed is in use.
        notes: (name, sentence) of each other module whose behaviour changes, such as a fast path
            that is off.
        fused: (name, sentence) of each norm and activation that is fused with casts.
        not_fused: (name, reason) of each that could be expected to be.
    """

    converted: list[tuple[str, str]] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    gather: dict[str, str] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    fused: list[tuple[str, str]] = field(default_factory=list)
    not_fused: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"minifloat: {len(self.converted)} converted, {len(self.skipped)} not"]
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


@dataclass(frozen=True)
class Selection:
    """The layers to convert, with their recipes, and the reasons for the rest."""

    chosen: list[tuple[str, nn.Linear, Recipe]]
    skipped: list[tuple[str, str]]


def require_filters(filter_fqns: Iterable[str], filter_fn: FilterFn | None) -> tuple[str, ...]:
    """Checks mf.quantize_'s filters, and returns the names."""
    if isinstance(filter_fqns, str) or not isinstance(filter_fqns, Iterable):
        raise TypeError(f"filter_fqns: expected a list of names, got {filter_fqns!r}")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"filter_fn: expected a function of (module, name), got {type(filter_fn).__name__}"
        )
    names = tuple(filter_fqns)
    for name in names:
        require_text("filter_fqns: an entry", name)
    return names


def layers_read_past(model: nn.Module) -> set[nn.Module]:
    """Finds the out_proj of each nn.MultiheadAttention, which torch reads without calling it."""
    attention = nn.MultiheadAttention
    return {
        module.out_proj
        for module in model.modules()
        if isinstance(module, attention) and type(module).forward is attention.forward
    }


def skipped_kinds(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yields (name, reason) of weights of linear layers that are no nn.Linear."""
    attention = nn.MultiheadAttention
    for raw_fqn, module in model.named_modules():
        fqn = clean_name(raw_fqn)
        if is_conv1d(module):
            what, why = type(module).__name__, reason_against_linear(module)
            how = "to convert it, first call minifloat.transformers.replace_conv1d_(model)"
            yield fqn, f"{what}, whose weight is (K, N); {how if why is None else why}"
        elif isinstance(module, attention) and type(module).forward is attention.forward:
            for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                if module._parameters.get(name) is not None:
                    yield (
                        join(fqn, name),
                        f"{type(module).__name__} multiplies with it without calling a layer; a "
                        "module with nn.Linear projections around "
                        "F.scaled_dot_product_attention can be converted",
                    )


def reason_of_kind(module: nn.Linear, is_read_past: bool) -> str | None:
    """Returns why a module of this kind cannot be converted; None where it can."""
    if isinstance(recipe := getattr(module, "recipe", None), Recipe):
        return f"already converted ({recipe})"
    if is_read_past:
        return (
            f"{type(module).__name__}: nn.MultiheadAttention reads its weight, and in_proj_weight, "
            "without calling a layer"
        )
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


def select(
    model: nn.Module,
    recipes: RecipeMap,
    filter_fqns: Sequence[str],
    filter_fn: FilterFn | None,
    routers: Mapping[nn.Module, tuple[str, str]] = {},
) -> Selection:
    """Chooses the layers to convert. A name filter matches a layer whose name contains it.

    Args: as those of mf.quantize_; routers: module -> (name, reason), which are left out.
    """
    names = [name for name in filter_fqns if name != AUTO_FILTER]
    use_auto_filter = AUTO_FILTER in filter_fqns
    chosen, skipped = [], []
    read_past = layers_read_past(model)

    def reason(module: nn.Linear, fqn: str, recipe: Recipe | None) -> str | None:
        matching = [name for name in names if name in fqn]
        if module in routers:
            return routers[module][1]
        if (kind := reason_of_kind(module, module in read_past)) is not None:
            return kind
        if matching:
            return f"filter_fqns has {matching[0]!r}"
        if recipe is None:
            return "no glob of the recipe map matches"
        if recipe.text == "bf16":
            return "the recipe map says bf16" if recipes.entries[1:] else "the recipe is bf16"
        if use_auto_filter and not auto_filter_small_kn(recipe)(module, fqn):
            n, k = module.weight.shape
            return f"{AUTO_FILTER}: K = {k}, N = {n} is too small for {recipe}"
        if filter_fn is not None and not filter_fn(module, fqn):
            return "filter_fn says no"
        return None

    for raw_fqn, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        fqn = clean_name(raw_fqn)
        recipe = recipes.find(fqn)
        why_not = reason(module, fqn, recipe)
        if why_not is not None:
            skipped.append((fqn, why_not))
        elif recipe is not None:
            chosen.append((fqn, module, recipe))
    skipped += [row for module, row in routers.items() if not isinstance(module, nn.Linear)]
    skipped += skipped_kinds(model)
    return Selection(chosen, skipped)


def require_some(selection: Selection, skipped_experts: Iterable[tuple[str, str]] = ()) -> None:
    """Raises ValueError, with every reason and its count, where no layer is left to convert."""
    if selection.chosen:
        return
    examples: dict[str, list[str]] = {}
    for fqn, why in [*selection.skipped, *skipped_experts]:
        examples.setdefault(why, []).append(display(fqn))
    reasons = [f"{len(fqns)} x {why} (such as {fqns[0]})" for why, fqns in examples.items()]
    raise ValueError(
        "quantize_: nothing to convert; " + ("; ".join(reasons) or "the model has no nn.Linear")
    )
