"""Which values a module's forward passes to which modules and functions, by a trace with torch.fx.

The trace is read and never run, so it need not be right where forward depends on values: a
condition on a tensor is true, and a tensor that is iterated over has two elements. All submodules
are leaves. Parameters and buffers are symbols, and the module's attributes are those of before
afterwards, so a trace writes nothing to the module.
"""

from __future__ import annotations

import inspect
import math
import operator
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from .deferred import is_writing

MOST_NODES = 20_000  # of a forward whose loop ends by a tensor's value
TABLES = ("_parameters", "_buffers", "_modules")
IN_PLACE = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
METADATA = ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda")
METADATA_METHODS = ("size", "dim", "numel", "is_floating_point", "ndimension", "get_device")
WRITING_FUNCTIONS = ("setitem", *(f"i{name.rstrip('_')}" for name in IN_PLACE))


class Value(fx.Proxy):
    """A symbol for any value."""

    def __len__(self) -> int:
        return 2

    def __index__(self) -> int:
        return 1

    def __int__(self) -> int:
        return 1

    def __float__(self) -> float:
        return 1.0

    def __contains__(self, item: Any) -> bool:
        return True

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})


def _in_place_operator(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Value, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return apply


for _name in IN_PLACE:
    setattr(Value, f"__i{_name}__", _in_place_operator(getattr(operator, f"i{_name}")))


class Tracer(fx.Tracer):
    """A tracer that accepts whatever forward does."""

    proxy_buffer_attributes = True

    def __init__(self) -> None:
        super().__init__(autowrap_modules=(math,))
        self.called: dict[str, nn.Module] = {}  # name of a call's target -> module
        self.nodes = 0

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        self.nodes += 1
        if self.nodes > MOST_NODES:
            raise RuntimeError("its forward does not end")
        return super().create_node(*args, **kwargs)

    def proxy(self, node: fx.Node) -> Value:
        return Value(node, self)

    def path_of_module(self, mod: nn.Module) -> str:
        name = f"module_{id(mod)}"
        self.called[name] = mod
        return name

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not isinstance(attr_val, Tensor):
            return attr_val
        if attr not in parameter_proxy_cache:
            parameter_proxy_cache[attr] = self.create_proxy("get_attr", attr, (), {})
        return parameter_proxy_cache[attr]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, (Tensor, nn.Module)):
            return "constant"
        try:
            return super().create_arg(a)
        except Exception:  # an object of the user's, whose attributes may be symbols
            found = [v for v in getattr(a, "__dict__", {}).values() if isinstance(v, fx.Proxy)]
            return [v.node for v in found]

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        return iter([obj[0], obj[1]])  # type: ignore[index]

    def to_bool(self, obj: fx.Proxy) -> bool:
        self.create_node("call_function", bool, (obj.node,), {})
        return True

    def keys(self, obj: fx.Proxy) -> Any:
        return ()


class Trace:
    """A module's traced forward.

    Args:
        graph: its nodes, in order.
        called: target of a call_module node -> module.
        inputs: the nodes of forward's positional arguments, in order.
        names: of all positional arguments of forward, in order.
    """

    def __init__(
        self,
        graph: fx.Graph,
        called: dict[str, nn.Module],
        inputs: list[fx.Node],
        names: list[str],
    ) -> None:
        self.graph = graph
        self.called = called
        self.inputs = inputs
        self.names = names

    def module_of(self, node: fx.Node) -> nn.Module | None:
        """Returns the module that a node calls; None: it calls none."""
        return self.called.get(str(node.target)) if node.op == "call_module" else None

    def input_of(self, place: int | str) -> fx.Node | None:
        """Returns the node of an argument, by position or name; None: the trace has none."""
        if isinstance(place, str):
            if place not in self.names:
                return None
            place = self.names.index(place)
        return self.inputs[place] if place < len(self.inputs) else None


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Reverts assignments to the module's attributes."""
    attributes = dict(module.__dict__)
    tables = {name: dict(attributes[name]) for name in TABLES}
    try:
        yield
    finally:
        module.__dict__.clear()
        module.__dict__.update(attributes)
        for name, table in tables.items():
            attributes[name].clear()
            attributes[name].update(table)


def trace_with(module: nn.Module, positional: list[str], count: int, keywords: list[str]) -> Trace:
    """Traces forward with symbols for `count` positional arguments and the keywords."""
    tracer = Tracer()
    inputs: list[fx.Node] = []
    forward: Callable[..., Any] = module.forward

    def call(values: Any) -> Any:
        passed = [values[i] for i in range(count)]
        inputs.extend(value.node for value in passed)
        return forward(*passed, **{name: values[name] for name in keywords})

    with torch.no_grad(), warnings.catch_warnings(), unchanged(module):
        warnings.simplefilter("ignore")
        graph = tracer.trace(call)
    return Trace(graph, tracer.called, inputs, positional)


def trace_forward(module: nn.Module) -> Trace | None:
    """Traces a module's forward; None where it cannot be traced.

    Arguments with defaults are first left out, and are symbols where that fails.
    """
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [p.name for p in positional]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    needed = max(1, sum(p.default is p.empty for p in positional))
    for count in dict.fromkeys((needed, max(needed, len(positional)))):
        try:
            return trace_with(module, names, count, keywords)
        except Exception:  # forward is the user's code
            continue
    return None


# ---- nodes ---------------------------------------------------------------------------------------


def is_metadata(node: fx.Node) -> bool:
    """Tells whether a node reads a tensor's shape, dtype or device alone."""
    if node.op == "call_method":
        return node.target in METADATA_METHODS
    return node.op == "call_function" and node.target is getattr and node.args[1] in METADATA


def writes(trace: Trace, node: fx.Node) -> bool:
    """Tells whether a node may modify a tensor in place."""
    if node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None:
        return True
    if node.op == "call_method":
        return is_writing(str(node.target))
    if node.op == "call_function":
        name = getattr(node.target, "__name__", "")
        return is_writing(name) or name in WRITING_FUNCTIONS
    module = trace.module_of(node)
    return module is not None and any(getattr(m, "inplace", False) for m in module.modules())


def describe(node: fx.Node) -> str:
    """Names what a node is, for the report."""
    if node.op == "output":
        return "the caller of forward"
    if node.op == "call_method":
        return f"the method {node.target}"
    return f"the function {getattr(node.target, '__name__', node.target)}"
