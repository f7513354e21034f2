"""Stand-ins of tensors while a forward is traced: the terms of a feed-forward, and no others.

    x   ->  gate(x), up(x)  ->  act(gate(x))  ->  act(gate(x)) * up(x)  ->  down of that
                                                  (or act(up(x)) alone)

Each function that a forward may apply to a tensor has one step here, from terms to a term. Any
other use of a tensor raises Refused, with the node as text: `clamp(w1(x), max=10.0)`. No tensor is
computed. Every term but x has one use, so that no function in place changes what another one reads.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

PRODUCT, ACTIVATED, HIDDEN, RESULT = "product", "activated", "hidden", "result"
MOST_TEXT = 120  # characters of a node in a report


class Refused(BaseException):
    """A forward does what no feed-forward does. No `except Exception` of the forward stops it."""


def refuse(what: str) -> NoReturn:
    """Raises Refused for what a forward does."""
    raise Refused(f"its forward {what}")


def refuse_node(node: str) -> NoReturn:
    """Raises Refused for a node of its graph."""
    if len(node) > MOST_TEXT:
        node = node[: MOST_TEXT - 1] + "…"
    raise Refused(f"{node} is no part of a feed-forward")


def text_of(value: object) -> str:
    """Returns how an argument reads in a node's text."""
    if type(value) in (tuple, list):
        return f"[{', '.join(map(text_of, value))}]"  # type: ignore[call-overload]
    if issubclass(type(value), Named):  # isinstance would read __class__
        return str(object.__getattribute__(value, "text"))
    return repr(value) if type(value) in (int, float, bool, str, type(None)) else "…"


def call_text(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Returns a node's text."""
    given = [*map(text_of, args), *(f"{k}={text_of(v)}" for k, v in kwargs.items())]
    return f"{function}({', '.join(given)})"


class Named:
    """A stand-in, of which the forward sees nothing but what its class allows."""

    __slots__ = ("text",)
    text: str


def refuse_operators(cls: type) -> type:
    """Has a class of stand-ins refuse each of Python's operators that it does not define."""
    binary = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%"}
    binary |= {"pow": "**", "matmul": "@", "and": "&", "or": "|", "xor": "^"}
    binary |= {"lshift": "<<", "rshift": ">>"}
    compared = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
    unary = {"neg": "-", "pos": "+", "invert": "~", "abs": "abs "}
    used = {
        "bool": "branches on {}",
        "index": "reads the value of {}",
        "int": "reads the value of {}",
    }
    used |= {"float": "reads the value of {}", "complex": "reads the value of {}"}
    used |= {"reversed": "iterates over {}"}
    used |= {"len": "reads the shape of {}", "iter": "iterates over {}", "hash": "hashes {}"}
    used |= {"contains": "searches {}", "setitem": "writes into {}", "delitem": "writes into {}"}
    used |= {"enter": "enters with {}", "exit": "enters with {}", "format": "prints {}"}
    used |= {"str": "prints {}", "repr": "prints {}", "getitem": "indexes {}"}
    used |= {"array": "converts {}", "call": "calls {}"}

    def infix(sign: str, reverse: bool) -> Callable[..., Any]:
        def refused(self: Any, other: Any, *_: Any) -> NoReturn:
            pair = (text_of(other), text_of(self)) if reverse else (text_of(self), text_of(other))
            refuse_node(f" {sign} ".join(pair))

        return refused

    def prefix(sign: str) -> Callable[..., Any]:
        return lambda self: refuse_node(f"{sign}{text_of(self)}")

    def use(how: str) -> Callable[..., Any]:
        return lambda self, *_, **__: refuse(how.format(text_of(self)))

    members: dict[str, Callable[..., Any]] = {}
    for name, sign in binary.items():
        members |= {f"__{name}__": infix(sign, False), f"__r{name}__": infix(sign, True)}
        members[f"__i{name}__"] = infix(sign + "=", False)
    members |= {f"__{name}__": infix(sign, False) for name, sign in compared.items()}
    members |= {f"__{name}__": prefix(sign) for name, sign in unary.items()}
    members |= {f"__{name}__": use(how) for name, how in used.items()}
    for name, member in members.items():
        if cls.__dict__.get(name) is None:
            setattr(cls, name, member)
    return cls


@refuse_operators
class Symbol(Named):
    """A tensor of the forward: one term.

    Args:
        kind: "x", PRODUCT, ACTIVATED, HIDDEN or RESULT.
        dtype: of x, and so of every term.
        parts: names of layers and of the activation, as they were applied.
    """

    __slots__ = ("dtype", "is_used", "kind", "parts")

    def __init__(self, text: str, kind: str, dtype: torch.dtype, parts: tuple[str, ...] = ()):
        for name, value in (("text", text), ("kind", kind), ("dtype", dtype), ("parts", parts)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "is_used", False)

    def __getattribute__(self, name: str) -> Any:
        if name == "dtype":
            return object.__getattribute__(self, "dtype")
        if name in METHODS:
            return lambda *args, **kwargs: METHODS[name](self, *args, **kwargs)
        text = text_of(self) if kind_of(self) != HIDDEN else f"({text_of(self)})"
        if not name.startswith("__") and callable(getattr(Tensor, name, None)):
            return lambda *args, **kwargs: refuse_node(call_text(f"{text}.{name}", args, kwargs))
        return refuse(f"reads {text}.{name}")

    def __setattr__(self, name: str, value: object) -> None:
        refuse(f"writes {text_of(self)}.{name}")

    def __delattr__(self, name: str) -> None:
        refuse(f"writes {text_of(self)}.{name}")

    def __mul__(self, other: Any) -> Any:
        return multiply(self, other)

    def __rmul__(self, other: Any) -> Any:
        return multiply(other, self)

    def __imul__(self, other: Any) -> Any:
        return multiply_in_place(self, other)


def kind_of(value: object) -> str | None:
    """Returns the kind of a term; None: it is none."""
    return object.__getattribute__(value, "kind") if type(value) is Symbol else None


class Fields(NamedTuple):
    """The fields of a Symbol."""

    text: str
    kind: str
    dtype: torch.dtype
    parts: tuple[str, ...]
    is_used: bool


def fields_of(symbol: Any) -> Fields:
    """Returns a term's fields."""
    return Fields(*(object.__getattribute__(symbol, name) for name in Fields._fields))


def read(symbol: Any) -> Fields:
    """Returns the fields of a term that a step reads."""
    fields = fields_of(symbol)
    if fields.is_used and fields.kind != "x":
        refuse(f"reads {fields.text} more than once")
    object.__setattr__(symbol, "is_used", True)
    return fields


def pass_on(symbol: Any) -> Symbol:
    """A step that computes nothing; its result may be another tensor."""
    term = read(symbol)
    return Symbol(*term[:4])


def apply_layer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
    """A linear layer of x, or the last one, of the hidden tensor."""
    given = [*args, *kwargs.values()]
    node = call_text(name, args, kwargs)
    if len(given) != 1 or kind_of(given[0]) is None or list(kwargs) not in ([], ["input"]):
        refuse_node(node)
    x = read(given[0])
    if x.kind == "x":
        return Symbol(node, PRODUCT, x.dtype, (name,))
    if x.kind not in (ACTIVATED, HIDDEN):
        refuse_node(node)
    return Symbol(node, RESULT, x.dtype, (*x.parts, name))


def activate(activation: str, node: str, symbol: Any) -> Symbol:
    """An activation of a product."""
    if kind_of(symbol) != PRODUCT:
        refuse_node(node)
    product = read(symbol)
    return Symbol(node, ACTIVATED, product.dtype, (activation, *product.parts))


def silu(input: Any, inplace: bool = False) -> Symbol:
    return activate("silu", f"silu({text_of(input)})", input)


def gelu(input: Any, *, approximate: str = "none") -> Symbol:
    node = f"gelu({text_of(input)}, approximate={text_of(approximate)})"
    if approximate == "none":
        return activate("gelu", f"gelu({text_of(input)})", input)
    return activate("gelu_tanh", node, input) if approximate == "tanh" else refuse_node(node)


def dropout(input: Any, p: Any = 0.5, training: Any = True, inplace: bool = False) -> Any:
    """Nothing where it drops nothing."""
    node = call_text("dropout", (input,), {"p": p, "training": training})
    if kind_of(input) is None or type(training) is not bool:
        refuse_node(node)
    if type(p) in (int, float) and (p == 0 or (not training and 0 <= p <= 1)):
        return pass_on(input)
    return refuse_node(node)


def multiply(a: Any, b: Any) -> Any:
    """An activated product times another one; or a tensor times the number 1, which is the same."""
    node = f"{text_of(a)} * {text_of(b)}"
    kinds = kind_of(a), kind_of(b)
    if kinds[0] and type(b) in (int, float) and b == 1:
        return pass_on(a)
    if kinds[1] and type(a) in (int, float) and a == 1:
        return pass_on(b)
    if kinds not in ((ACTIVATED, PRODUCT), (PRODUCT, ACTIVATED)):
        refuse_node(node)
    gate, up = (read(a), read(b)) if kinds[0] == ACTIVATED else (read(b), read(a))
    return Symbol(node, HIDDEN, gate.dtype, (*gate.parts, *up.parts))


def multiply_in_place(a: Any, b: Any) -> Any:
    """The same, written to the first factor, which nothing else reads."""
    if kind_of(a) in (None, "x"):
        refuse_node(f"{text_of(a)} *= {text_of(b)}")
    return multiply(a, b)


def to(input: Symbol, *args: Any, **kwargs: Any) -> Any:
    """A cast to the dtype that the tensor has."""
    if [*args, *kwargs.values()] == [object.__getattribute__(input, "dtype")]:
        return input
    return refuse_node(call_text(f"{text_of(input)}.to", args, kwargs))


METHODS: dict[str, Callable[..., Any]] = {"mul": multiply, "mul_": multiply_in_place, "to": to}

# id of a function -> (the function, its step). The functions are those of torch as it was imported.
FUNCTIONS: dict[int, tuple[Any, Callable[..., Any]]] = {
    id(function): (function, step)
    for function, step in (
        (F.silu, silu),
        (torch._C._nn.silu, silu),
        (F.gelu, gelu),
        (F.dropout, dropout),
        (torch.mul, multiply),
        (operator.mul, multiply),
    )
}
