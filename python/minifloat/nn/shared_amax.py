"""One amax for the weights that servers fuse: mf.quantize_(…, share_amax="servers").

A server multiplies with q, k and v, and with gate and up, as one matrix, which has one scale of the
tensor. Layers of a group here are cast by the largest amax of their weights, in both directions, so
the codes that training reads are the rows of the fused matrix's.

    Linear.forward -> AmaxGroup.operands     the amaxes of all weights of the group, and a cast
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._native import ops
from ..recipe import FORWARD_W, Recipe
from ..spec import Spec
from .cache.operand_cache import SIBLINGS, compute_dtype
from .names import clean_name
from .registry import Choice, is_distributed

GATHERED_WHOLE = "weight is gathered in the compute dtype: its amax is shared"
SHARE_AMAX = (None, "servers")
# vLLM and SGLang fuse these: siblings, multi-head latent attention's, and gated delta nets'.
FUSED = (
    *(names for names in SIBLINGS if "query" not in names),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("wq_a", "wkv_a"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)


def fused_group(name: str) -> tuple[str, tuple[str, ...]] | None:
    """Returns (parent's name, members) of the layers that servers compute as one with this one."""
    parent, _, leaf = name.rpartition(".")
    return next(((parent, group) for group in FUSED if leaf in group), None)


class AmaxGroup:
    """Layers of one module whose weights share an amax.

    Args:
        parent: the module that has the layers.
        names: the attributes that are the layers.
        title: of the parent, for messages.
    """

    def __init__(self, parent: nn.Module, names: tuple[str, ...], title: str) -> None:
        self.parent, self.names, self.title = parent, names, title

    def layers(self, recipe: Recipe) -> list[Any]:
        """Returns the layers.

        Raises:
            ValueError: one is no longer a layer under this recipe.
        """
        found = []
        for name in self.names:
            layer: Any = getattr(self.parent, name, None)
            if getattr(layer, "amax_group", None) is not self or layer.recipe != recipe:
                raise ValueError(
                    f"{self.title}.{name}: expected a layer under {recipe}, whose amax "
                    f"{', '.join(self.names)} share, got {type(layer).__name__}; convert the "
                    "model again"
                )
            found.append(layer)
        return found

    def weights(self, recipe: Recipe) -> list[Tensor]:
        """Returns the weights of the layers.

        Raises:
            ValueError: a layer is no longer one under this recipe, or a weight is cut over ranks.
        """
        found = []
        for name, layer in zip(self.names, self.layers(recipe)):
            if is_distributed(weight := layer.weight):
                raise ValueError(
                    f"{self.title}.{name}: expected a whole weight, as its amax is shared, got a "
                    "DTensor; pass fully_shard the module that has all of "
                    f"{', '.join(self.names)}, without tensor parallelism"
                )
            found.append(weight.detach())
        return found

    def operands(self, layer: Any, weight: Tensor, x: Tensor, columnwise: bool) -> list[Tensor]:
        """Quantizes a layer's weight by the group's amax: eight tensors, as layer_operands returns.

        Args:
            layer: one of the group.
            weight: the layer's, as autograd reads it: a parametrization computes it at each read.
            x: its input, whose dtype is the compute dtype outside autocast.
            columnwise: whether dgrad reads the weight.
        """
        dtype, recipe = compute_dtype(x), layer.recipe
        row, col = recipe.fprop.b, recipe.dgrad.b
        of_forward = col == FORWARD_W
        if not columnwise or Spec.parse(col).is_bf16:
            col = ""
        with torch.no_grad():
            weights = [w.to(dtype) for w in self.weights(recipe)]
            amax = torch.stack([ops.amax.default(w, row) for w in weights]).amax()
            own = weight.detach().to(dtype)
            tensors = list(
                ops.quantize.default(
                    own,
                    row,
                    col,
                    amax_row=amax,
                    amax_col=amax if col and shares(Spec.parse(col)) else None,
                )
            )
        if columnwise and of_forward:
            tensors[4:] = tensors[:4]
        return tensors


def shares(spec: Spec) -> bool:
    """Tells whether a weight's scale follows from the amax of its values."""
    return spec.amax_of == "tensor" and not spec.is_delayed and spec.transform == 0


def reason_against(recipe: Recipe) -> str | None:
    """Returns why layers under a recipe cannot share their weights' amax; None where they can."""
    row, col = Spec.parse(recipe.fprop.b), Spec.parse(recipe.dgrad.b)
    if not shares(row):
        return f"{row.text} has no amax of the values alone"
    for spec in (row, col):
        if spec.is_stochastic or spec.is_delayed:
            return f"{spec.text} is no cast of the values alone, to nearest"
    return None


def find_groups(model: nn.Module, chosen: Iterable[Choice]) -> dict[str, AmaxGroup]:
    """Groups the chosen layers that share an amax.

    Args:
        model: it has the layers.
        chosen: what is to be converted.

    Returns:
        The name of each layer of a group, and the group.

    Raises:
        ValueError: layers that a server fuses have several recipes, or one whose cast of W needs
            more than the values; experts have gate and up apart; or no layers share an amax.
    """
    layers = {choice.module: choice for choice in chosen if isinstance(choice.module, nn.Linear)}
    for choice in chosen:
        apart = any({*names} <= {*choice.names} for names in FUSED)
        if apart and Spec.parse(choice.recipe.fprop.b).amax_of == "tensor":
            raise ValueError(
                f"quantize_: share_amax: {choice.fqn}: expected gate and up as one parameter, got "
                f"{', '.join(choice.names)}; build experts with fused_w13=True, or name another "
                "recipe for them in a recipe map"
            )
    found: dict[str, AmaxGroup] = {}
    for name, parent in model.named_modules():
        parts = dict(parent._modules.items())  # which is no dict in a module of torch.jit
        for names in FUSED:
            children = {n: layers[m] for n in names if (m := parts.get(n)) in layers}
            if len(children) < 2:
                continue
            title = clean_name(name) or type(parent).__name__
            recipes = {choice.recipe for choice in children.values()}
            specs = [Spec.parse(recipe.fprop.b) for recipe in recipes]
            if not any(spec.amax_of == "tensor" for spec in specs):
                continue
            why = reason_against(next(iter(recipes))) if len(recipes) == 1 else "several recipes"
            if why is not None:
                raise ValueError(
                    f"quantize_: share_amax: {title}: expected one recipe of {', '.join(children)} "
                    f"that casts W to nearest by its own amax, got {why}"
                )
            group = AmaxGroup(parent, tuple(children), title)
            found |= {choice.fqn: group for choice in children.values()}
    if not found:
        raise ValueError(
            "quantize_: share_amax: expected layers that a server fuses, such as q_proj, k_proj "
            "and v_proj, whose W has a scale of the tensor, got none"
        )
    return found
