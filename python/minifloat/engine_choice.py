"""mf.engines: which GEMM multiplies each product of a recipe."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ._native import ops
from .checks import require_int
from .recipe import Recipe

__all__ = ["Engine", "engines"]

CPU = (0, 0)


def find_device() -> tuple[str, tuple[int, int]]:
    """Returns "cuda" where torch and this build have it, else "cpu"; and the capability."""
    if torch.cuda.is_available() and ops.has_cuda():
        return "cuda", torch.cuda.get_device_capability()
    return "cpu", CPU


@dataclass(frozen=True)
class Engine:
    """What multiplies one product of a recipe.

    Attributes:
        product: fprop, dgrad or wgrad.
        specs: the specs of the product's operands, as text.
        name: the engine's name.
        native: whether the GEMM reads the codes; else it reads their values in bf16 (emulated). The
            result of an emulated product is the same but for the order of its sums.
        does: which GEMM it is and, where it is emulated, which GPUs multiply the codes.

    Example:
        >>> fprop, dgrad, wgrad = mf.engines("fp8_rowwise", (9, 0))
        >>> fprop.specs, fprop.native
        ('e4m3/row*e4m3/row,fast', True)
        >>> fprop.does
        'an FP8 GEMM with a scale a row'
    """

    product: str
    specs: str
    name: str
    native: bool
    does: str


def engines(
    recipe: str | Recipe, capability: tuple[int, int] | None = None, *, experts: bool = False
) -> tuple[Engine, ...]:
    """Returns what multiplies the products of a recipe, in sizes that every engine takes.

    A GPU need not be there: the choice depends on its compute capability alone. Sizes that an
    engine does not take are multiplied by the next one, at last by the exact product
    (docs/numerics.md, section 9).

    Args:
        recipe: a preset's name, a recipe's text, or a Recipe.
        capability: the compute capability (major, minor), as torch.cuda.get_device_capability
            returns it; (0, 0): a CPU. None: that of the current GPU, or a CPU where torch or this
            build has none.
        experts: whether the products are of a mixture's experts (grouped GEMMs).

    Returns:
        Three engines, of fprop, dgrad and wgrad.

    Raises:
        TypeError: an argument of another type.
        ValueError: `recipe` is no recipe, or `capability` no compute capability.

    Example:
        >>> [engine.native for engine in mf.engines("nvfp4", (9, 0))]  # on an H100
        [False, False, False]
        >>> [engine.name for engine in mf.engines("nvfp4", (10, 0))]  # on a B200
        ['block_scaled', 'block_scaled', 'block_scaled']
    """
    recipe = Recipe(recipe)
    if capability is None:
        capability = find_device()[1]
    if not isinstance(capability, tuple) or len(capability) != 2:
        raise TypeError(f"engines: expected capability as (major, minor), got {capability!r}")
    major, minor = (require_int("engines: capability", n, least=0) for n in capability)
    found = []
    for product, groups in (("fprop", "m"), ("dgrad", "m"), ("wgrad", "k")):
        specs = str(getattr(recipe, product))
        info = ops.engine_info(specs, 10 * major + minor, groups=groups if experts else "")
        found.append(Engine(product, specs, *info))
    return tuple(found)
