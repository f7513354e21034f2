"""A module's forward as a feed-forward: its source is matched, and nothing of it is run.

The forward is a function of x whose statements assign local names and return one expression.
Its terms are

    x   ->  gate(x), up(x)  ->  act(gate(x))  ->  act(gate(x)) * up(x)  ->  down of that
                                                  (or act(up(x)) alone)

and it may only use, besides names of terms:

    self.name(term)       a layer; a submodule, whose own forward is matched; or one of FUNCTIONS
    package.name(term)    one of FUNCTIONS, found through the function's globals
    nn.Sequential         the submodules in turn
    term * term

Any other expression or statement leaves the module out, and is named. A term but x is read once, so
that no function in place changes what another one reads.

What the source leaves open is looked up and recorded (nn/convert/reads.py): which functions,
submodules and numbers its names stand for. Each forward compares those.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, NoReturn

import torch.nn.functional as F
from torch import nn

from ..convert.reads import MISSING, Reads, Record, hook_of
from .source import tree_of

X, PRODUCT, ACTIVATED, HIDDEN, RESULT = "x", "product", "activated", "hidden", "result"
SILU, GELU, DROPOUT = F.silu, F.gelu, F.dropout  # those of torch as it was imported
FUNCTIONS: dict[Any, tuple[str, ...]] = {  # and their parameters after the first one
    SILU: ("inplace",),
    GELU: ("approximate",),
    DROPOUT: ("p", "training", "inplace"),
}
MOST_TEXT = 120  # characters of an expression in a report
DEPTH = 8  # of submodules within submodules


class Term(NamedTuple):
    """A tensor of a forward: its kind, and the layers and the activation that are applied."""

    kind: str
    layers: tuple[str, ...] = ()
    activation: str = ""


def match_forward(
    module: nn.Module, cls: type, layers: Iterable[str]
) -> tuple[str, tuple[str, ...], Reads]:
    """Returns a feed-forward's activation, its layers in the op's order, and what was looked up.

    Args:
        module: it is not changed, and nothing of it is called.
        cls: its class, without mf.MLP.
        layers: the names of the linear layers among its children.

    Raises:
        ValueError: the module is no feed-forward. The text names the expression that differs.
    """
    match = Match(module, cls, layers)
    found = match.forward(module, cls, "", Term(X), 0)
    if found.kind != RESULT:
        raise ValueError("its forward does not return the last layer's result")
    if not sorted(match.called) == sorted(found.layers) == sorted(match.layers):
        raise ValueError("its forward does not call each layer once")
    return found.activation, found.layers, match.record.reads()


class Match:
    """The match of one module: what was looked up, and which layers are called."""

    def __init__(self, module: nn.Module, cls: type, layers: Iterable[str]) -> None:
        self.module, self.layers = module, {*layers}
        self.record = Record(module, cls)
        self.called: list[str] = []

    def forward(self, module: nn.Module, cls: Any, path: str, x: Term, depth: int) -> Term:
        """Matches the forward of the module or, at a path, of a submodule."""
        of = f" of {path}" if path else ""
        function = inspect.getattr_static(cls, "forward", None)
        if type(function) is not FunctionType:
            raise ValueError(f"the forward{of} is no Python function")
        if depth > DEPTH:
            raise ValueError(f"its forward calls {path}, deeper than {DEPTH} submodules")
        if not path:  # a submodule's is recorded by its call
            self.record.attribute(cls, "forward", function)
        self.record.function(function)
        if function is nn.Sequential.forward and cls.__iter__ is nn.Sequential.__iter__:
            self.record.attribute(cls, "__iter__", cls.__iter__)
            self.record.keys(module)
            for name, child in module._modules.items():
                if not self.is_layer(module, name):
                    self.record.item_of(module, "_modules", name)
                x = self.call(module, name, child, path, x, depth, name)
            return x
        return Body(self, module, function, path, depth).run(x)

    def is_layer(self, module: nn.Module, name: str) -> bool:
        """Tells whether a child is a layer, which each forward looks up and compares itself."""
        return module is self.module and name in self.layers

    def call(
        self, module: nn.Module, name: str, value: Any, path: str, x: Term, depth: int, text: str
    ) -> Term:
        """Calls a layer or another submodule, of the module or of the submodule at a path."""
        if self.is_layer(module, name):
            self.called.append(name)
            if x.kind == X:
                return Term(PRODUCT, (name,))
            if x.kind in (ACTIVATED, HIDDEN):
                return Term(RESULT, (*x.layers, name), x.activation)
            refuse(text, path)
        path = f"{path}.{name}" if path else name
        if not isinstance(value, nn.Module):
            refuse(text, path)
        if type(value).__call__ is not nn.Module.__call__ or "forward" in value.__dict__:
            raise ValueError(f"its forward calls {path}, which has a call or forward of its own")
        if hook := hook_of(value):
            raise ValueError(f"its forward calls {path}, which has a {hook}")
        self.record.call(value)
        return self.forward(value, type(value), path, x, depth + 1)


class Body:
    """The statements of one forward.

    Args:
        match: the match that it is a part of.
        module: whose forward it is.
        function: the forward.
        path: of the submodule, as text; "": the module itself.
        depth: of submodules.
    """

    def __init__(
        self, match: Match, module: nn.Module, function: FunctionType, path: str, depth: int
    ) -> None:
        self.match, self.module, self.function = match, module, function
        self.path, self.depth = path, depth
        self.terms: dict[str, Term] = {}

    def run(self, x: Term) -> Term:
        """Returns the term that the forward returns for x."""
        of = f" of {self.path}" if self.path else ""
        code = self.function.__code__
        if code.co_freevars:
            raise ValueError(f"the forward{of} reads {code.co_freevars[0]} of an enclosing scope")
        tree = tree_of(code)
        if tree is None:
            raise ValueError(f"the source of the forward{of} cannot be read")
        names = [parameter.arg for parameter in (*tree.args.posonlyargs, *tree.args.args)]
        if len(names) != 2 or tree.args.vararg or tree.args.kwonlyargs or tree.args.kwarg:
            raise ValueError(f"the forward{of} takes more than one tensor")
        self.own, name = names
        self.terms[name] = x
        for node in tree.body:
            if isinstance(node, ast.Return) and node.value is not None:
                return self.term(node.value)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                continue  # a docstring
            targets: list[Any] = getattr(node, "targets", [getattr(node, "target", None)])
            value: Any = getattr(node, "value", None)
            is_plain = isinstance(node, (ast.Assign, ast.AnnAssign)) and value is not None
            name = getattr(targets[0], "id", self.own)
            if not is_plain or len(targets) != 1 or name == self.own:
                self.refuse(node)
            self.terms[name] = self.term(value)
        raise ValueError(f"the forward{of} returns nothing")

    def refuse(self, node: ast.AST) -> NoReturn:
        """Raises ValueError for what is no part of a feed-forward."""
        refuse(ast.unparse(node), self.path)

    # ---- terms -----------------------------------------------------------------------------------

    def term(self, node: ast.expr) -> Term:
        """Returns the term that an expression stands for."""
        if isinstance(node, ast.Name) and node.id in self.terms:
            found = self.terms[node.id]
            return found if found.kind == X else self.terms.pop(node.id)
        if isinstance(node, ast.Name) and node.id in self.function.__code__.co_varnames:
            raise ValueError(f"its forward reads {self.text(node)} more than once")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return self.product(node)
        if not isinstance(node, ast.Call) or not node.args or isinstance(node.args[0], ast.Starred):
            self.refuse(node)
        name = self.own_name(node.func)
        if name is None:
            return self.apply(self.global_of(node.func), node)
        is_layer = self.match.is_layer(self.module, name)
        value = self.value_of(name) if is_layer else self.own_value(name)
        if not isinstance(value, nn.Module):
            return self.apply(value, node)
        if len(node.args) > 1 or node.keywords:
            self.refuse(node)
        if is_layer and value is not self.module._modules[name]:
            self.refuse(node)
        x = self.term(node.args[0])
        text = ast.unparse(node)
        return self.match.call(self.module, name, value, self.path, x, self.depth, text)

    def product(self, node: ast.BinOp) -> Term:
        """An activated product times another one."""
        if any(isinstance(side, ast.Constant) for side in (node.left, node.right)):
            self.refuse(node)
        gate, up = self.term(node.left), self.term(node.right)
        if gate.kind == PRODUCT:
            gate, up = up, gate
        if (gate.kind, up.kind) != (ACTIVATED, PRODUCT):
            self.refuse(node)
        return Term(HIDDEN, (*gate.layers, *up.layers), gate.activation)

    def apply(self, function: Any, node: ast.Call) -> Term:
        """An activation of a product; or dropout that drops nothing."""
        options: dict[str | None, Any] = {}
        if type(function) is functools.partial:
            self.match.record.partial(function)
            if function.args:
                self.refuse(node)
            function, options = function.func, dict(function.keywords)
        if not any(function is known for known in FUNCTIONS):
            self.refuse(node)
        if type(function) is FunctionType:
            self.match.record.function(function)
        names: tuple[str, ...] = FUNCTIONS[function]
        given = [*zip(names, node.args[1:]), *((k.arg, k.value) for k in node.keywords)]
        places = 0 if function is GELU else len(names)  # of parameters that have one
        if len(node.args) - 1 > places or not {*options, *(name for name, _ in given)} <= {*names}:
            self.refuse(node)
        options |= {name: self.option(name, value, node) for name, value in given}
        x = self.term(node.args[0])
        if function is DROPOUT:
            p = options.get("p", 0.5)
            if type(p) not in (int, float) or p != 0:
                raise ValueError(f"its forward drops with p={p}, by {self.text(node)}")
            return x
        if x.kind != PRODUCT:
            self.refuse(node)
        activation = "silu"
        if function is GELU:
            known = {"none": "gelu", "tanh": "gelu_tanh"}
            approximate = options.get("approximate", "none")
            if type(approximate) is not str or approximate not in known:
                self.refuse(node)
            activation = known[approximate]
        return Term(ACTIVATED, x.layers, activation)

    # ---- what names stand for --------------------------------------------------------------------

    def own_name(self, node: ast.expr) -> str | None:
        """Returns the name in an expression self.name; None: it is another one."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.attr if node.value.id == self.own else None
        return None

    def option(self, name: str | None, value: ast.expr, node: ast.expr) -> Any:
        """Returns a constant or an attribute of self that a function takes, but the mode."""
        if isinstance(value, ast.Constant):
            return value.value
        own = self.own_name(value)
        if own is None:
            self.refuse(node)
        return None if name == "training" else self.own_value(own)

    def own_value(self, name: str) -> Any:
        """Returns and records an attribute of self."""
        value = self.value_of(name)
        self.match.record.attribute(self.module, name, value)
        return value

    def value_of(self, name: str) -> Any:
        """Returns an attribute of self that is read without the module's own code."""
        cls: Any = self.match.record.cls if self.module is self.match.module else type(self.module)
        of_class = inspect.getattr_static(cls, name, MISSING)
        is_computed = hasattr(type(of_class), "__get__")
        is_plain = cls.__getattribute__ is object.__getattribute__
        if is_computed or not is_plain or cls.__getattr__ is not nn.Module.__getattr__:
            raise ValueError(f"its forward reads {self.text(name)}, which code computes")
        value = getattr(self.module, name, MISSING)
        if value is MISSING:
            raise ValueError(f"its forward reads {self.text(name)}, which does not exist")
        return value

    def global_of(self, node: ast.expr) -> Any:
        """Returns and records what a name, or an attribute of a Python module, stands for."""
        record = self.match.record
        if isinstance(node, ast.Name) and node.id not in self.function.__code__.co_varnames:
            scope = self.function.__globals__
            return record.item((scope, None), node.id, scope.get(node.id, MISSING))
        if isinstance(node, ast.Attribute):
            owner = self.global_of(node.value)
            if type(owner) is ModuleType and node.attr in owner.__dict__:
                record.attribute(owner, node.attr, owner.__dict__[node.attr])
                return owner.__dict__[node.attr]
        return MISSING

    def text(self, node: ast.AST | str) -> str:
        """Returns an expression, or the name of an attribute, with the submodule's path."""
        text = node if isinstance(node, str) else ast.unparse(node)
        return f"{text} of {self.path}" if self.path else text


def refuse(text: str, path: str) -> NoReturn:
    """Raises ValueError for an expression or a statement of the forward at a path."""
    line, _, more = text.partition("\n")
    if more or len(line) > MOST_TEXT:
        line = f"{line[: MOST_TEXT - 1]}…"
    raise ValueError(f"{line}{f' of {path}' if path else ''} is no part of a feed-forward")
