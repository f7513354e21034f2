"""Finds the layers that mf.quantize_ leaves out: by name, size, function, or the policy `keep`.

    "head"         the head. The default of mf.quantize_ and of torchtitan's section
    "nvfp4_paper"  the head, and the last blocks, as NVIDIA pretrained in NVFP4 (arXiv 2509.25149,
                   section 4): at most 15% of the blocks, and at least one
    "nothing"      no layer

A kept layer stays in high precision. Published FP8, MXFP8 and MXFP4 runs keep the head alone. Every
policy keeps the routers beside experts.

heads.py finds heads and blocks. Where a recipe map has an entry for the head, other than "*", the
head gets that entry's recipe, and `keep` does not apply to it.

A recipe's text may end with the policy: "nvfp4 keep=nvfp4_paper", as entries of command lines do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Literal, get_args

from torch import nn

from ...checks import require_one_of, require_text
from ...recipe import Recipe, RecipeMap, glob_matches
from ..names import join
from ..registry import first_of_library, is_linear, named_modules, stages_in
from .heads import blocks_of, heads_of

FilterFn = Callable[[nn.Module, str], bool]
AUTO_FILTER = "auto_filter_small_kn"

Keep = Literal["head", "nvfp4_paper", "nothing"]
KEEPS: tuple[str, ...] = get_args(Keep)
DEFAULT_KEEP: Keep = "head"

LAST_PERCENT = 15  # of the blocks

POLICY = re.compile(r"(.*\S)\s+keep=(\S*)\s*", re.DOTALL)
THEN = re.compile(r"\sthen=")

# Recipe -> pairs (K, N): a layer of at most K inputs and at most N outputs is left out. On an H200,
# with 16384 tokens in eager mode, such layers are slower than bf16, and the next larger sizes are
# faster (docs/speed.md, "A layer").
ANY = 1 << 62
SMALL_KN = {
    "fp8_tensorwise": ((1024, 1024),),
    "fp8_rowwise": ((1024, 2048), (2048, 1024)),
    "mxfp4": ((1024, ANY), (2048, 2048), (4096, 1024)),
    "nvfp4_pow2": ((1024, ANY), (2048, 2048), (8192, 1024)),
}


def read_recipe(recipe: str | Recipe | RecipeMap, keep: str) -> tuple[RecipeMap, str]:
    """Returns the recipes, and the policy: that at the end of a text, else the argument.

    Raises:
        TypeError, ValueError: the recipe is none, it ends with another policy than the argument
            names, or it names a recipe of the last steps, which only a training loop can choose.
    """
    if not isinstance(recipe, str):
        return RecipeMap(recipe), keep
    if THEN.search(recipe):
        raise ValueError(
            f"recipe: expected that of the steps from now on, got {recipe!r}; call mf.restore_ and "
            "mf.quantize_ again before the first step of the recipe after then="
        )
    if not (found := POLICY.fullmatch(recipe)):
        return RecipeMap(recipe), keep
    if keep not in (DEFAULT_KEEP, found[2]):
        raise ValueError(f"keep: expected {found[2]!r}, as in {recipe!r}, got {keep!r}")
    return RecipeMap(found[1]), found[2]


def auto_filter_small_kn(recipe: str | Recipe) -> FilterFn:
    """Returns a filter that leaves out layers that a recipe makes slower than bf16.

    The thresholds were measured on one H200 with 16384 tokens (docs/speed.md, "A
    layer"). They do not hold for other devices or for fewer tokens.

    Args:
        recipe: "fp8_tensorwise", "fp8_rowwise", "mxfp4" or "nvfp4_pow2".

    Returns:
        A function of (module, name) for mf.quantize_'s filter_fn: True for a large enough layer,
        and for experts, which have no thresholds.

    Raises:
        ValueError: the recipe has no measured thresholds.

    Example:
        >>> is_large = mf.nn.auto_filter_small_kn("fp8_rowwise")
        >>> [is_large(torch.nn.Linear(n, n, device="meta"), "wq") for n in (1024, 8192)]
        [False, True]
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


class Filters:
    """What stays in high precision, by the arguments of mf.quantize_.

    Args:
        model: the model.
        recipes: the recipe map.
        filter_fqns: a layer whose name contains one is left out.
        filter_fn: as that of mf.quantize_.
        keep: the policy's name.

    Attributes:
        is_stage: whether the model is a stage of a pipeline, or several: a text may match modules
            of others.
        unused: those texts.

    Raises:
        TypeError, ValueError: an argument is not as expected, or a text matches no module's name.
    """

    def __init__(
        self,
        model: nn.Module,
        recipes: RecipeMap,
        filter_fqns: Iterable[str],
        filter_fn: FilterFn | None,
        keep: str,
    ) -> None:
        if isinstance(filter_fqns, str) or not isinstance(filter_fqns, Iterable):
            raise TypeError(f"filter_fqns: expected a list of names, got {filter_fqns!r}")
        if filter_fn is not None and not callable(filter_fn):
            raise TypeError(
                f"filter_fn: expected a function of (module, name), got {type(filter_fn).__name__}"
            )
        names = [require_text("filter_fqns: an entry", name) for name in filter_fqns]
        fqns = [fqn for fqn, _ in named_modules(model)]
        self.recipes, self.filter_fn = recipes, filter_fn
        self.is_sized = AUTO_FILTER in names
        self.parts = [name for name in names if name != AUTO_FILTER]
        unused = [part for part in self.parts if not any(part in fqn for fqn in fqns)]
        self.is_stage, self.unused = bool(stages_in(model)), list[str]()
        if self.is_stage:
            self.unused = unused + unused_globs(recipes, fqns)
        else:
            require_used("filter_fqns", "parts of names of this model's modules", unused, fqns)
            require_globs(recipes, fqns)
        require_one_of("keep", keep, KEEPS)
        heads = {} if keep == "nothing" else heads_of(model)
        self.heads = None if keep == "nothing" else tuple(heads)
        self.kept = kept_by(keep, model, heads, recipes.globs_of)

    def reason(self, module: nn.Module, fqn: str) -> str | None:
        """Returns why a layer or an experts module is left out; None where it is not."""
        recipe = self.recipes.find(fqn)
        if matching := [part for part in self.parts if part in fqn]:
            return f"filter_fqns has {matching[0]!r}"
        if recipe is None:
            return "no glob of the recipe map matches"
        if recipe.text == "bf16":
            return "the recipe map says bf16" if self.recipes.entries[1:] else "the recipe is bf16"
        for name, why in self.kept.items():
            if fqn == name or fqn.startswith(name + "."):
                return why
        if self.is_sized and isinstance(module, nn.Linear):
            n, k = module.weight.shape
            if not auto_filter_small_kn(recipe)(module, fqn):
                return f"{AUTO_FILTER}: K = {k}, N = {n} is too small for {recipe}"
        if self.filter_fn is not None and not self.filter_fn(module, fqn):
            return "filter_fn says no"
        return None


def unused_globs(recipes: RecipeMap, fqns: Sequence[str]) -> list[str]:
    """Returns the globs of a recipe map that match no name of a module."""
    return [g for g, _ in recipes.entries if not any(glob_matches(g, fqn) for fqn in fqns)]


def require_globs(recipes: RecipeMap, fqns: Sequence[str]) -> None:
    """Raises ValueError where a glob of a recipe map matches no name of a module."""
    unused = unused_globs(recipes, fqns)
    require_used("recipe", "globs of names of this model's modules", unused, fqns)


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


# ---- policies ------------------------------------------------------------------------------------


def kept_by(
    keep: str,
    model: nn.Module,
    heads: Mapping[str, str],
    globs_of: Callable[[str], list[str]],
) -> dict[str, str]:
    """Returns the modules that a policy keeps, with all that they hold: name -> the reason.

    Args:
        keep: the policy's name.
        model: the model.
        heads: those of the model, name -> how it was found.
        globs_of: name of a layer -> the globs of the recipe map that match it.

    Raises:
        ValueError: the policy keeps blocks and the model has none.
    """
    if keep == "nothing":
        return {}

    named = dict(named_modules(model))

    def is_in_map(head: str) -> bool:
        linear = [n for n, m in named_modules(named[head]) if is_linear(m)]
        return any(set(globs_of(join(head, n))) - {"*"} for n in linear)

    modules = {head: how for head, how in heads.items() if not is_in_map(head)}
    if keep == "nvfp4_paper":
        found = first_of_library(model)
        of_library = found and found[0].blocks(found[1])
        if of_library:  # whose stages of a pipeline have some of them
            parent, every = of_library
            blocks = [join(parent, str(i)) for i in range(every)]
        else:
            blocks = blocks_of(model)
        if not blocks:
            raise ValueError(
                f'keep="{keep}": expected a model with numbered blocks (layers.0, layers.1, …), '
                f"got {type(model).__name__} without; name layers in filter_fqns instead"
            )
        count = max(1, len(blocks) * LAST_PERCENT // 100)
        last = "block" if count == 1 else f"{count} blocks"
        modules |= dict.fromkeys(blocks[-count:], f"in the last {last} of {len(blocks)}")
    return {name: f'keep="{keep}": {what}' for name, what in modules.items()}
