"""Norms that mf.quantize_ fuses with the casts of the layers that read them.

A norm is fused where forward of its parent passes the norm's result to converted layers only, or to
modules that pass it to converted layers only:

    TransformerBlock    y = self.attention(self.attention_norm(x), …)
    Attention           q, k, v = self.wq(x), self.wk(x), self.wv(x)

The forwards are read with torch.fx (nn/fuse/module_trace.py). A deferred result is computed when
anything else reads it, so a wrong trace can only cost speed, with one exception: a tensor that is
modified in place. Where the forwards contain such a write between the norm and its readers, the
norm is not fused. Neither is it where several layers would cast the result each on their own, by
their own amax histories or random bits: each cast would compute the norm again. Nor where a cast of
the result writes FP4 as FP8: it finds the amaxes of rows in a read that a fused norm would add to.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import fx, nn

from ..cache.operand_conditions import can_reuse, is_written_as_fp8, reads_codes
from ..convert.selection import Fusion
from ..names import clean_name
from ..state.recipe_state import RecipeState
from .module_trace import Trace, describe, is_metadata, trace_forward, writes
from .norms import adopt_norm, norm_class

MOST_BOUNDARIES = 4  # modules that pass a result on, one within another


@dataclass
class Readers:
    """What reads a value.

    Args:
        modules: converted layers, and modules that pass the value to them, in order.
        layers: the number of reads by converted layers.
        others: sentences about other readers.
    """

    modules: list[nn.Module] = field(default_factory=list)
    layers: int = 0
    others: list[str] = field(default_factory=list)

    def add(self, more: Readers) -> None:
        self.modules += [m for m in more.modules if m not in self.modules]
        self.layers += more.layers
        self.others += [o for o in more.others if o not in self.others]


class Finder:
    """A search for norms to fuse.

    Args:
        model: that mf.quantize_ converts.
        layers: its converted layers.
    """

    def __init__(self, model: nn.Module, layers: Container[nn.Module]) -> None:
        self.model = model
        self.layers = layers
        self.names = {module: clean_name(name) for name, module in model.named_modules()}
        self.traces: dict[nn.Module, Trace | None] = {}

    def trace(self, module: nn.Module) -> Trace | None:
        if module not in self.traces:
            self.traces[module] = trace_forward(module)
        return self.traces[module]

    def name_of(self, module: nn.Module) -> str:
        return self.names.get(module) or type(module).__name__

    def norms(self) -> Iterator[tuple[nn.Module, Readers]]:
        """Yields each norm that converted layers may read, with its readers."""
        found: dict[nn.Module, Readers] = {}
        for parent in self.model.modules():
            norms = [m for m in parent._modules.values() if m is not None and norm_class(m)]
            if not norms or not any(m in self.layers for m in parent.modules()):
                continue
            trace = self.trace(parent)
            for norm in norms:
                readers = found.setdefault(norm, Readers())
                if trace is None:
                    readers.others.append(f"forward of {type(parent).__name__} cannot be traced")
                    readers.modules.append(parent)  # to be reported
                    continue
                calls = [node for node in trace.graph.nodes if trace.module_of(node) is norm]
                each = [self.readers_of(trace, node, MOST_BOUNDARIES) for node in calls]
                most = max((r.layers for r in each), default=0)
                for one in each:
                    readers.add(one)
                readers.layers = most
        yield from ((norm, readers) for norm, readers in found.items() if readers.modules)

    def readers_of(self, trace: Trace, value: fx.Node, boundaries: int) -> Readers:
        """Finds what reads a value of a traced forward."""
        found = Readers()
        last = value
        order = {node: i for i, node in enumerate(trace.graph.nodes)}
        for user in value.users:
            if is_metadata(user):
                continue
            last = max(last, user, key=order.__getitem__)
            found.add(self.reader(trace, value, user, boundaries))
        between = list(trace.graph.nodes)[order[value] + 1 : order[last]]
        if found.modules and any(writes(trace, node) for node in between):
            found.others.append("a tensor is modified in place before all have read it")
        return found

    def reader(self, trace: Trace, value: fx.Node, user: fx.Node, boundaries: int) -> Readers:
        """Finds what reads a value that one node reads."""
        module = trace.module_of(user)
        if module is None:
            return Readers(others=[f"{describe(user)} reads it"])
        places: list[Any] = [i for i, arg in enumerate(user.args) if arg is value]
        places += [name for name, arg in user.kwargs.items() if arg is value]
        if len(places) != 1:
            return Readers(others=[f"{self.name_of(module)} reads it beside other values"])
        if module in self.layers:
            recipe = cast(RecipeState, module).recipe
            if not reads_codes(recipe.fprop.a, recipe.wgrad.b):
                why = f"{self.name_of(module)} reads it in high precision"
                return Readers([module], 1, [why])
            return Readers([module], 1)
        if boundaries == 0 or not any(m in self.layers for m in module.modules()):
            return Readers(others=[f"{self.name_of(module)}, a {type(module).__name__}, reads it"])
        inner = self.trace(module)
        argument = None if inner is None else inner.input_of(places[0])
        if inner is None or argument is None:
            return Readers([module], 0, [f"forward of {type(module).__name__} cannot be traced"])
        found = self.readers_of(inner, argument, boundaries - 1)
        if found.modules:
            found.modules.insert(0, module)
        return found


def shares_codes(layer: nn.Module) -> bool:
    """Tells whether another layer of the same recipe reads the same codes of an input."""
    recipe = cast(RecipeState, layer).recipe
    return can_reuse(recipe.fprop.a, recipe.wgrad.b, allows_delayed=False)


def writes_fp8(layer: nn.Module) -> bool:
    """Tells whether the layer's cast of its input writes FP4 as FP8 on Hopper."""
    recipe = cast(RecipeState, layer).recipe
    return is_written_as_fp8(recipe.fprop.a, recipe.fprop.b)


def fuse_norms(model: nn.Module, layers: Container[nn.Module]) -> list[Fusion]:
    """Converts the norms that converted layers read, in place, and returns the report's rows."""
    finder = Finder(model, layers)
    rows = []
    for norm, readers in finder.norms():
        fqn = finder.names[norm]
        if readers.others:
            rows.append(Fusion(fqn, readers.others[0], is_fused=False))
            continue
        reading = [m for m in readers.modules if m in layers]
        if readers.layers > 1 and not all(shares_codes(layer) for layer in reading):
            rows.append(Fusion(fqn, "each layer that reads it casts it anew", is_fused=False))
            continue
        if any(writes_fp8(layer) for layer in reading):
            reason = "on Hopper a cast of its values writes FP8 at once"
            rows.append(Fusion(fqn, reason, is_fused=False))
            continue
        names = [finder.names[layer] for layer in reading]
        adopt_norm(norm, readers.modules, readers.layers)
        rows.append(Fusion(fqn, f"fused with the casts of {', '.join(names)}", is_fused=True))
    return rows
