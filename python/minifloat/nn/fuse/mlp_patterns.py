"""Feed-forwards that mf.quantize_ fuses: three layers, or two, in one module's forward.

    down(act(gate(x)) * up(x))        Llama, torchtitan, Hugging Face
    down(act(up(x)))

act is silu or gelu: a function, or a module that returns what one of them does.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..convert.same_result import difference, isolated, replica, seeded
from ..convert.selection import Fusion
from ..names import clean_name
from .deferred_mlp import FusedMlp, can_fuse, name_of
from .module_trace import Trace, describe, trace_forward, writes

PRODUCTS = (operator.mul, torch.mul)
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by the op's names
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class Pattern(NamedTuple):
    """The nodes of a feed-forward in a traced forward.

    gate: None without one. between: the module of the activation; None: it is a function.
    name: of the activation.
    """

    gate: fx.Node | None
    up: fx.Node
    down: fx.Node
    act: fx.Node
    product: fx.Node | None
    between: nn.Module | None
    name: str | None


class MlpFinder:
    """A search for feed-forwards among converted layers."""

    def __init__(self, model: nn.Module, layers: Container[nn.Module]) -> None:
        self.names = {module: clean_name(name) for name, module in model.named_modules()}
        self.layers = layers

    def find(self, trace: Trace) -> list[Pattern]:
        """Finds what looks like a feed-forward in a traced forward."""
        found = [self.pattern(trace, node) for node in trace.graph.nodes if self.layer(trace, node)]
        return [pattern for pattern in found if pattern is not None]

    def layer(self, trace: Trace, node: Any) -> Any:
        """Returns the converted layer that a node calls with one argument; None: it does not."""
        module = trace.module_of(node) if isinstance(node, fx.Node) else None
        if module not in self.layers or len(node.args) + len(node.kwargs) != 1:
            return None
        return module

    def pattern(self, trace: Trace, down: fx.Node) -> Pattern | None:
        hidden = input_of(down)
        if hidden is None:
            return None
        if hidden.op == "call_function" and hidden.target in PRODUCTS:
            for act, up in (hidden.args, hidden.args[::-1]):
                gate = self.activated(trace, act)
                if gate is not None and self.layer(trace, up):
                    act, up = cast(fx.Node, act), cast(fx.Node, up)
                    between, name = activation(trace, act)
                    return Pattern(gate, up, down, act, hidden, between, name)
            return None
        alone = self.activated(trace, hidden)
        if alone is None:
            return None
        between, name = activation(trace, hidden)
        return Pattern(None, alone, down, hidden, None, between, name)

    def activated(self, trace: Trace, node: Any) -> fx.Node | None:
        """Returns the layer's node whose product a node changes element by element, it seems."""
        if not isinstance(node, fx.Node) or len(node.all_input_nodes) != 1:
            return None
        module = trace.module_of(node)
        is_module = module is not None and not list(module.parameters())
        is_function = node.op == "call_function" and "torch" in str(
            getattr(node.target, "__module__", "")
        )
        value = node.all_input_nodes[0]
        return value if (is_module or is_function) and self.layer(trace, value) else None

    def reason(self, trace: Trace, pattern: Pattern) -> str | None:
        """Returns why a feed-forward is not fused; None: it is."""
        nodes = [n for n in (pattern.gate, pattern.up, pattern.down) if n is not None]
        layers = [self.layer(trace, node) for node in nodes]
        recipe = layers[0].recipe
        if pattern.name is None:
            what = describe(pattern.act) if pattern.between is None else self.name(pattern.between)
            return f"{what} is no silu or gelu"
        if any(layer.recipe.text != recipe.text for layer in layers):
            return "its layers have several recipes"
        if any(layer.accumulate != layers[0].accumulate for layer in layers):
            return "its layers accumulate gradients in several places"
        if not can_fuse(recipe):
            return f"its layers read x in high precision, or with random bits, under {recipe}"
        if len({*layers}) < len(layers) or any(layer.fused_mlp is not None for layer in layers):
            return "one of its layers is in two feed-forwards"
        if len({input_of(node) for node in nodes[:-1]}) > 1:
            return "gate and up read different inputs"
        inner = [n for n in (pattern.gate, pattern.up, pattern.act, pattern.product) if n]
        if any(len(node.users) > 1 for node in inner):
            return "a result within it has a second reader"
        order = list(trace.graph.nodes)
        first = min(order.index(node) for node in nodes)
        if any(writes(trace, node) for node in order[first : order.index(pattern.down)]):
            return "a tensor is modified in place within it"
        return None

    def name(self, module: nn.Module) -> str:
        return f"{self.names.get(module, '')}, a {type(module).__name__},"


def input_of(node: fx.Node) -> fx.Node | None:
    """Returns the argument of a node with one."""
    values = [*node.args, *node.kwargs.values()]
    return values[0] if len(values) == 1 and isinstance(values[0], fx.Node) else None


def activation(trace: Trace, node: fx.Node) -> tuple[nn.Module | None, str | None]:
    """Returns an activation's module, if it is one, and the activation's name, if it is known."""
    module = trace.module_of(node)
    if module is None:
        return None, name_of(node.target, dict(node.kwargs))
    inner = trace_forward(module)
    calls = [] if inner is None else [n for n in inner.graph.nodes if n.op == "call_function"]
    calls = [n for n in calls if n.target is not operator.getitem]
    if len(calls) != 1 or any(n.op in ("call_method", "call_module") for n in calls):
        return module, None
    name = name_of(calls[0].target, dict(calls[0].kwargs))
    return module, name if name is not None and computes(module, ACTIVATIONS[name]) else None


@isolated()
def computes(module: nn.Module, function: Callable[[Tensor], Tensor]) -> bool:
    """Tells whether an activation's module returns what a function does."""
    x = seeded((4, 64), 1, 0.75)
    return difference(partial(replica(module), x), partial(function, x), bound=0) is None


def fuse_mlps(model: nn.Module, layers: Container[nn.Module]) -> list[Fusion]:
    """Fuses the feed-forwards of a model in place, and returns the report's rows."""
    finder = MlpFinder(model, layers)
    rows = []
    for parent in model.modules():
        if sum(child in layers for child in parent._modules.values()) < 2:
            continue
        trace = trace_forward(parent)
        if trace is None:
            continue
        for pattern in finder.find(trace):
            reason = finder.reason(trace, pattern)
            fqn = finder.names[parent]
            if reason is not None:
                rows.append(Fusion(fqn, reason, is_fused=False))
                continue
            nodes = (pattern.gate, pattern.up, pattern.down)
            gate, up, down = (finder.layer(trace, node) for node in nodes)
            mlp = FusedMlp(gate, up, down, pattern.between)
            for layer in mlp.layers:
                layer.fused_mlp = mlp
            names = ", ".join(finder.names[layer].removeprefix(f"{fqn}.") for layer in mlp.layers)
            rows.append(Fusion(fqn, f"{names} and {pattern.name} are one op", is_fused=True))
    return rows
