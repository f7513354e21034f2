"""Modules that mf.quantize_ makes an MLP: those whose forward is a feed-forward, by a run of it.

A candidate has two or three converted layers whose shapes fit, no other parameters, and a forward
of x alone. Its replica runs on a small input on the CPU, in both dtypes, training and evaluating,
while hooks record what its layers read and return. It is a feed-forward where, bit for bit,

    each layer is called once           all but the last one read x
    the last one reads                  act(gate's result) * up's result, or act(up's result)
    its result is returned              x and the module's attributes are as before

So no list of classes is needed: these are all effects of such a forward. Dropout that is active,
and an activation that is written by hand and rounds differently, fail the check.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Collection
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...spec import Spec
from ..convert.same_result import isolated, replica, seeded
from ..linear import Linear
from ..names import clean_name
from .mlp import ACTIVATIONS, MLP, VALUE_DTYPES, Parts, mlp_class, restore_mlp

WIDTH = 24  # of a replica's x, hidden layer and result alike, whichever layer is the last


class Run(NamedTuple):
    """What a replica did: of each layer, in the order of calls, what it read and returned."""

    given: dict[str, Tensor]
    returned: dict[str, Tensor]
    x: Tensor
    y: Tensor


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
        if found is None or not (all_classes or isinstance(parent, MLP)):
            continue
        try:
            parts = parts_of(parent, found)
            require_one_op(list(found.values()))
        except ValueError as error:
            not_fused.append((clean_name(name), str(error)))
            continue
        if not isinstance(parent, MLP):
            parent.__class__ = mlp_class(type(parent))
        cast(MLP, parent).mlp_parts = parts._replace(recipe=found[parts.down].recipe.text)
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


def layers_of(parent: nn.Module) -> dict[str, Linear] | None:
    """Returns the layers of a candidate by name; None: the module is none."""
    found = {n: child for n, child in parent._modules.items() if isinstance(child, Linear)}
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


def require_one_op(layers: list[Linear]) -> None:
    """Raises ValueError where layers of a feed-forward cannot be one op."""
    recipe = layers[0].recipe
    of_x = Spec.parse(recipe.fprop.a), Spec.parse(recipe.wgrad.b)
    if any(layer.recipe.text != recipe.text for layer in layers):
        raise ValueError("its layers have several recipes")
    if any(layer.accumulate != layers[0].accumulate for layer in layers):
        raise ValueError("its layers accumulate gradients in several places")
    if any(spec.is_bf16 or spec.is_stochastic for spec in of_x):
        why = "its layers read x in high precision, or with random bits"
        raise ValueError(f"{why}, under {recipe}")


@isolated()
def parts_of(parent: nn.Module, layers: dict[str, Linear]) -> Parts:
    """Returns the parts of a feed-forward; raises ValueError where the module is none."""
    possible: list[Parts] = []
    for dtype, is_training in itertools.product(VALUE_DTYPES, (True, False)):
        run = run_of(parent, layers, dtype, is_training)
        *first, down = run.given
        if not possible:
            gates = [None] if len(first) == 1 else first
            pairs = [(gate, up) for gate in gates for up in first if up != gate]
            possible = [Parts(*pair, down, act) for pair in pairs for act in ACTIVATIONS]
        for name in first:
            if not same(run.given[name], run.x):
                raise ValueError(f"{name} does not read x")
        possible = [p for p in possible if same(run.given[down], hidden_of(run, p))]
        if not possible:
            product = ", times a product" if len(first) > 1 else ""
            raise ValueError(f"what {down} reads is no silu or gelu{product}")
        if not same(run.returned[down], run.y) or run.y.shape != run.x.shape:
            raise ValueError(f"its forward does not return {down}'s result")
    return possible[0]


def hidden_of(run: Run, parts: Parts) -> Tensor:
    """Computes what the last layer reads."""
    hidden = ACTIVATIONS[parts.activation](run.returned[parts.gate or parts.up])
    return hidden if parts.gate is None else hidden * run.returned[parts.up]


def same(a: Tensor, b: Tensor) -> bool:
    """Compares bits, whatever the leading dimensions."""
    return a.dtype == b.dtype and torch.equal(a.reshape(-1), b.reshape(-1))


def run_of(
    parent: nn.Module, layers: dict[str, Linear], dtype: torch.dtype, is_training: bool
) -> Run:
    """Runs a replica whose layers compute in high precision."""
    sizes = {size for m in layers.values() for size in (m.in_features, m.out_features)}
    model = replica(parent, dict.fromkeys(sizes, WIDTH), dtype)
    names = {model._modules[name]: name for name in layers}
    calls: list[str] = []
    run = Run({}, {}, seeded((2, 6, WIDTH), 1).to(dtype), torch.empty(0))

    def record(layer: nn.Module, args: Any, kwargs: dict[str, Any], result: Tensor) -> None:
        given = [*args, *kwargs.values()][0]
        calls.append(names[layer])
        run.given[names[layer]], run.returned[names[layer]] = given.clone(), result.clone()

    for layer in names:
        layer.__class__ = nn.Linear
        layer.register_forward_hook(record, with_kwargs=True)
    x, before = run.x.clone(), attributes_of(model.train(is_training))
    try:
        y = type(model).forward(model, x)
    except Exception as error:  # whatever foreign code raises
        text = str(error).partition("\n")[0]
        why = f"cannot run on a small input: {type(error).__name__}: {text}"
        raise ValueError(why) from None
    if sorted(calls) != sorted(layers):
        raise ValueError("its forward does not call each layer once")
    if not isinstance(y, Tensor):
        raise ValueError(f"its forward returns a {type(y).__name__}, not a tensor")
    if not torch.equal(x, run.x) or attributes_of(model) != before:
        raise ValueError("its forward modifies x, or the module's attributes")
    return run._replace(y=y)


def attributes_of(module: nn.Module) -> list[tuple[str, int, int]]:
    """Returns the identity of each attribute, and the length of containers."""
    return [
        (name, id(value), len(value) if isinstance(value, (dict, list, set)) else 0)
        for name, value in module.__dict__.items()
    ]
