"""What the arguments of mf.quantize_ leave out by name, by size or by a function of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import cast

from torch import nn

from ...checks import require_text
from ...recipe import Recipe, RecipeMap, glob_matches
from ..names import clean_name
from .keep import kept_by

FilterFn = Callable[[nn.Module, str], bool]
AUTO_FILTER = "auto_filter_small_kn"

# Recipe -> pairs (K, N): a layer of at most K inputs and at most N outputs is left out. On an H200,
# with 16384 tokens in eager mode, such layers are slower than bf16, and the next larger sizes are
# faster (docs/measured/layers.md, "Small layers").
ANY = 1 << 62
SMALL_KN = {
    "fp8_tensorwise": ((1024, 1024),),
    "fp8_rowwise": ((1024, 2048), (2048, 1024)),
    "mxfp4": ((1024, ANY), (2048, 2048), (4096, 1024)),
    "nvfp4_pow2": ((1024, ANY), (2048, 2048), (8192, 1024)),
}


def auto_filter_small_kn(recipe: str | Recipe) -> FilterFn:
    """Returns a filter that leaves out layers that a recipe makes slower than bf16.

    The thresholds were measured on one H200 with 16384 tokens (docs/measured/layers.md, "Small
    layers"). They do not hold for other devices or for fewer tokens.

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
class Filters:
    """What stays in high precision, by the arguments of mf.quantize_.

    Args:
        recipes: the recipe map.
        names: filter_fqns. A layer whose name contains one is left out.
        filter_fn: as that of mf.quantize_.
        kept: name -> why the policy keeps the module, and what it holds.
    """

    recipes: RecipeMap
    names: tuple[str, ...]
    filter_fn: FilterFn | None
    kept: Mapping[str, str]

    def reason(self, module: nn.Module, fqn: str) -> str | None:
        """Returns why a layer or an experts module is left out; None where it is not."""
        recipe = self.recipes.find(fqn)
        if matching := [name for name in self.names if name != AUTO_FILTER and name in fqn]:
            return f"filter_fqns has {matching[0]!r}"
        if recipe is None:
            return "no glob of the recipe map matches"
        if recipe.text == "bf16":
            return "the recipe map says bf16" if self.recipes.entries[1:] else "the recipe is bf16"
        for name, why in self.kept.items():
            if fqn == name or fqn.startswith(name + "."):
                return why
        is_sized = AUTO_FILTER in self.names and isinstance(module, nn.Linear)
        if is_sized and not auto_filter_small_kn(recipe)(module, fqn):
            n, k = cast(nn.Linear, module).weight.shape
            return f"{AUTO_FILTER}: K = {k}, N = {n} is too small for {recipe}"
        if self.filter_fn is not None and not self.filter_fn(module, fqn):
            return "filter_fn says no"
        return None


def filters_of(
    model: nn.Module,
    recipes: RecipeMap,
    filter_fqns: Iterable[str],
    filter_fn: FilterFn | None,
    keep: str,
) -> Filters:
    """Checks the arguments of mf.quantize_ that leave layers out.

    Raises:
        TypeError, ValueError: an argument is not as expected, or a text matches no module's name.
    """
    if isinstance(filter_fqns, str) or not isinstance(filter_fqns, Iterable):
        raise TypeError(f"filter_fqns: expected a list of names, got {filter_fqns!r}")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(
            f"filter_fn: expected a function of (module, name), got {type(filter_fn).__name__}"
        )
    names = tuple(require_text("filter_fqns: an entry", name) for name in filter_fqns)
    fqns = [clean_name(fqn) for fqn, _ in model.named_modules()]
    parts = [name for name in names if name != AUTO_FILTER]
    unused = [name for name in parts if not any(name in fqn for fqn in fqns)]
    require_used("filter_fqns", "parts of names of this model's modules", unused, fqns)
    unused = [g for g, _ in recipes.entries if not any(glob_matches(g, fqn) for fqn in fqns)]
    require_used("recipe", "globs of names of this model's modules", unused, fqns)
    return Filters(recipes, names, filter_fn, kept_by(keep, model, recipes.globs_of))


def require_used(argument: str, expected: str, unused: Sequence[str], fqns: Iterable[str]) -> None:
    """Raises ValueError, with the nearest names, where texts match no name of a module.

    Args:
        argument: its name.
        expected: what its texts are to match.
        unused: those that match nothing.
        fqns: the names of the model's modules.
    """
    if not unused:
        return
    near = [name for text in unused for name in nearest_names(text, fqns)]
    hint = f"; the nearest names are {', '.join(dict.fromkeys(near))}" if near else ""
    texts = ", ".join(repr(text) for text in unused)
    raise ValueError(f"{argument}: expected {expected}, got no match for {texts}{hint}")


def nearest_names(text: str, fqns: Iterable[str]) -> list[str]:
    """Finds parts of names that are nearest to a text or a glob, as long as it in dots."""
    wanted = text.strip("*.")
    length = wanted.count(".") + 1
    parts = [fqn.split(".") for fqn in fqns]
    windows = {
        ".".join(part[i : i + length]) for part in parts for i in range(len(part) - length + 1)
    }
    return get_close_matches(wanted, sorted(windows))
