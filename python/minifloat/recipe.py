"""Recipes: the formats of the operands of a layer's three products, as text.

    Recipe("nvfp4")                                  a preset
    Recipe("fprop=… dgrad=… wgrad=…")                written out; a product is "a*b" or "a*b,fast"
    RecipeMap("*: nvfp4; *.output: bf16")            a recipe a module name, the last match wins

The grammar has one parser, in C++ (include/minifloat/recipe.h); its errors are ValueErrors that
name the position and the legal texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from ._native import ops
from .checks import require_text
from .spec import Spec

__all__ = ["Product", "Recipe", "RecipeMap", "presets"]

FORWARD_X, FORWARD_W = "fprop.x", "fprop.w"  # values of the codes that fprop reads, in backward


@dataclass(frozen=True)
class Product:
    """The operand specs of one matrix product.

    Args:
        a: spec of the first operand (m, k).
        b: spec of the second operand (n, k); in dgrad also "fprop.w", in wgrad "fprop.x": the
            values of the codes that fprop reads.
        fast: whether an FP8 engine may accumulate fast; exact products ignore this.

    Example:
        >>> wgrad = mf.recipe.Product("mxfp8/e5m2", "mxfp8")
        >>> recipe = mf.Recipe(f"fprop=mxfp8*mxfp8 dgrad=bf16*bf16 wgrad={wgrad}")
        >>> recipe.wgrad
        Product(a='mxfp8/e5m2', b='mxfp8', fast=False)
    """

    a: str
    b: str
    fast: bool = False

    def __str__(self) -> str:
        return f"{self.a}*{self.b}" + (",fast" if self.fast else "")


@lru_cache(maxsize=1024)
def _parse(text: str) -> tuple[str, list[Product]]:
    canonical, *products = ops.parse_recipe(text)
    return canonical, [Product(*ops.product_info(product)) for product in products]


@dataclass(frozen=True, init=False, repr=False)
class Text:
    """The base of classes whose value is one canonical text.

    Instances are compared, copied and pickled by that text.
    """

    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.text,)


@dataclass(frozen=True, init=False, repr=False)
class Recipe(Text):
    """The products fprop (x · W), dgrad (g · W) and wgrad (g · x) of a linear layer.

    Recipes are equal where their canonical texts are.

    Args:
        text: a preset's name (mf.presets), or the three products.

    Raises:
        TypeError: `text` is no str.
        ValueError: `text` is no recipe; the message has the position and the legal texts.

    Example:
        >>> recipe = mf.Recipe("nvfp4")
        >>> recipe.wgrad
        Product(a='nvfp4+sr+rht', b='nvfp4+rht', fast=False)
        >>> recipe.is_stochastic
        True
        >>> mf.Recipe("fprop=mxfp8*mxfp8 dgrad=mxfp8*mxfp8 wgrad=mxfp8*mxfp8")
        Recipe('mxfp8')
    """

    fprop: Product = field(compare=False)
    dgrad: Product = field(compare=False)
    wgrad: Product = field(compare=False)

    def __init__(self, text: str | Recipe) -> None:
        source = text.text if isinstance(text, Recipe) else require_text("Recipe", text)
        canonical, products = _parse(source)
        for name, value in zip(("text", "fprop", "dgrad", "wgrad"), (canonical, *products)):
            object.__setattr__(self, name, value)

    @property
    def _specs(self) -> list[Spec]:
        products = (self.fprop, self.dgrad, self.wgrad)
        return [Spec.parse(spec) for p in products for spec in (p.a, p.b)]

    @property
    def is_stochastic(self) -> bool:
        return any(spec.is_stochastic for spec in self._specs)

    @property
    def reads_values_of_w(self) -> bool:
        """Whether fprop or dgrad reads the weight in high precision."""
        return "bf16" in (self.fprop.b, self.dgrad.b)

    @property
    def with_values(self) -> Recipe:
        """The recipe with the weight in high precision."""
        fprop, dgrad = (Product(product.a, "bf16") for product in (self.fprop, self.dgrad))
        return Recipe(f"fprop={fprop} dgrad={dgrad} wgrad={self.wgrad}")

    @property
    def is_delayed(self) -> bool:
        return any(spec.is_delayed for spec in self._specs)


def glob_matches(glob: str, module_name: str) -> bool:
    """Tells whether a glob of a recipe map matches a module's name."""
    return bool(ops.match_recipe(f"{glob}: bf16", module_name))


@dataclass(frozen=True, init=False, repr=False)
class RecipeMap(Text):
    """Recipes by module name. The last glob that matches a name decides.

    Args:
        text: "glob: recipe; …", or one recipe for all modules.

    Raises:
        TypeError: `text` is no str.
        ValueError: `text` is no recipe map; the message has the position and the legal texts.

    Example:
        >>> recipes = mf.RecipeMap("*: nvfp4; *.wo: mxfp8")
        >>> recipes.find("layers.0.wq"), recipes.find("layers.0.wo")
        (Recipe('nvfp4'), Recipe('mxfp8'))
    """

    entries: tuple[tuple[str, Recipe], ...] = field(compare=False)

    def __init__(self, text: str | Recipe | RecipeMap) -> None:
        source = text.text if isinstance(text, Text) else require_text("RecipeMap", text)
        canonical, *pairs = ops.parse_recipe_map(source)
        object.__setattr__(self, "text", canonical)
        entries = tuple((glob, Recipe(recipe)) for glob, recipe in zip(pairs[::2], pairs[1::2]))
        object.__setattr__(self, "entries", entries)

    def find(self, module_name: str) -> Recipe | None:
        """Returns the recipe of the last glob that matches; None where no glob matches."""
        text = ops.match_recipe(self.text, require_text("RecipeMap: module_name", module_name))
        return Recipe(text) if text else None

    def globs_of(self, module_name: str) -> list[str]:
        """Returns the globs that match, in order."""
        return [glob for glob, _ in self.entries if glob_matches(glob, module_name)]


@lru_cache(maxsize=1)
def operand_names() -> tuple[str, ...]:
    """The six operands of a layer, such as "w/dgrad", by their row of an amax history."""
    return tuple(ops.operand_names())


def presets() -> list[str]:
    """Lists the names of the preset recipes.

    Returns:
        The names, in the order of the documentation.

    Example:
        >>> mf.presets()[:4]
        ['bf16', 'fp8_tensorwise', 'fp8_delayed', 'fp8_rowwise']
    """
    return list(ops.preset_names())
