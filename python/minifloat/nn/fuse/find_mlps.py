"""Modules that mf.quantize_ makes an MLP: those whose forward is a feed-forward.

A candidate has two or three converted layers whose shapes fit, no other parameters, and a forward
that can take x alone. The source of its forward is matched (nn/fuse/match.py). It is a feed-forward
where it computes

    down(act(gate(x)) * up(x))    or    down(act(up(x)))

and nothing else: so no list of classes is needed. What the match has looked up is kept, and
compared in each forward (nn/convert/reads.py): where a setting, a submodule or code has changed
since, the module runs its own forward.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection
from typing import cast

from torch import nn

from ...recipe import FORWARD_X
from ...spec import Spec
from ..linear import Linear
from ..names import clean_name, is_scripted
from .mlp import MLP, match_mlp, mlp_class, restore_mlp

ACTIVATIONS = {"silu", "gelu"}  # functions, by the names that a forward reads
WITHIN = (
    "its forward computes more than the feed-forward of {}; move those into a module of their own, "
    "whose forward takes x alone"
)


def convert_mlps(
    model: nn.Module, *, all_classes: bool
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Makes a model's feed-forwards MLPs in place.

    Args:
        model: that mf.quantize_ converts.
        all_classes: whether modules of other classes than MLP are converted.

    Returns:
        Rows of the report: (name, what is one op), and (name, why nothing is) of the others.
    """
    fused, not_fused = [], []
    for name, parent in model.named_modules():
        found = layers_of(parent)
        if found is None:
            if all_classes and not is_scripted(parent) and (names := layers_within(parent)):
                texts = f"{', '.join(names[:-1])} and {names[-1]}"
                not_fused.append((clean_name(name), WITHIN.format(texts)))
            continue
        if not (all_classes or isinstance(parent, MLP)):
            continue
        try:
            parts, reads = match_mlp(parent, found)
            require_one_op(list(found.values()))
        except ValueError as error:
            not_fused.append((clean_name(name), str(error)))
            continue
        if not isinstance(parent, MLP):
            parent.__class__ = mlp_class(type(parent))
        mlp = cast(MLP, parent)
        mlp.mlp_parts = parts._replace(recipe=found[parts.down].recipe.text)
        mlp.mlp_reads = reads
        text = f"{', '.join(parts.layers)} and {parts.activation} are one op"
        fused.append((clean_name(name), text))
    return fused, not_fused


def mlps_of(model: nn.Module) -> list[MLP]:
    """Finds the MLPs of a model."""
    return [module for module in model.modules() if isinstance(module, MLP)]


def restore_mlps(model: nn.Module, kept: Collection[MLP] = ()) -> None:
    """Undoes convert_mlps in place, except for what `kept` contains."""
    for module in mlps_of(model):
        if module not in kept:
            restore_mlp(module)


def linear_children(parent: nn.Module) -> dict[str, Linear]:
    return {n: child for n, child in parent._modules.items() if isinstance(child, Linear)}


def layers_of(parent: nn.Module) -> dict[str, Linear] | None:
    """Returns the layers of a candidate by name; None: the module is none."""
    found = linear_children(parent)
    own = {id(p) for layer in found.values() for p in layer.parameters()}
    if len(found) not in (2, 3) or any(id(p) not in own for p in parent.parameters()):
        return None
    shapes = [(layer.in_features, layer.out_features) for layer in found.values()]
    orders = itertools.permutations(shapes) if len(shapes) == 3 else [shapes]
    if not any({*first} == {(first[0][0], down[0])} for *first, down in orders):
        return None
    try:
        inspect.signature(parent.forward).bind(None)
    except (TypeError, ValueError):
        return None
    return None if "forward" in parent.__dict__ else found


def layers_within(parent: nn.Module) -> list[str]:
    """Returns the layers of a feed-forward that a larger forward seems to compute, as registered.

    Such layers are children of one module, as its activation is or is called in its forward, and
    their shapes fit. No layers: there is no sign of a feed-forward, or the module has a forward of
    its own in place of its class's.
    """
    names = getattr(getattr(type(parent).forward, "__code__", None), "co_names", ())
    if "forward" in parent.__dict__ or not (
        ACTIVATIONS.intersection(names)
        or any(isinstance(child, (nn.SiLU, nn.GELU)) for child in parent.children())
    ):
        return []
    shapes = {n: (m.in_features, m.out_features) for n, m in linear_children(parent).items()}
    found: list[str] = []
    for down, (hidden, width) in shapes.items():
        layers = [n for n, shape in shapes.items() if n == down or shape == (width, hidden)]
        if hidden != width and len(layers) > max(len(found), 1):
            found = layers
    return found


def require_one_op(layers: list[Linear]) -> None:
    """Raises ValueError where layers of a feed-forward cannot be one op."""
    recipe = layers[0].recipe
    texts = recipe.fprop.a, recipe.wgrad.b
    of_x = [Spec.parse(text) for text in texts if text != FORWARD_X]
    if any(layer.recipe.text != recipe.text for layer in layers):
        raise ValueError("its layers have several recipes")
    if any(layer.amax_group is not None for layer in layers):
        raise ValueError("its layers share an amax with others")
    if any(layer.accumulate != layers[0].accumulate for layer in layers):
        raise ValueError("its layers accumulate gradients in several places")
    if any(spec.is_bf16 or spec.is_stochastic for spec in of_x):
        why = "its layers read x in high precision, or with random bits"
        raise ValueError(f"{why}, under {recipe}")
