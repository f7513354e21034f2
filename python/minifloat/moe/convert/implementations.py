"""Which function a module of another library runs, where a model of transformers chooses it.

transformers' decorator use_experts_implementation puts a choice in place of a class's forward: of
the functions in ALL_EXPERTS_FUNCTIONS, the one that the model's config names; else the class's own,
called eager. All of transformers' own compute what the eager one does, so a conversion stands for
each of them. A function of another package may compute anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from ...nn.convert.reads import contents_of
from ...private_torch import constant_in_graphs

INTERFACE = "transformers.integrations.moe"
GATE = "_apply_gate"  # a method that a conversion calls in place of act_fn
OWN = ("transformers", "minifloat")


def class_of(module: nn.Module) -> type[nn.Module]:
    """Returns a module's class, before a conversion of the module."""
    return getattr(type(module), "original", type(module))


def own_forward(module: nn.Module) -> Callable[..., object]:
    """Returns the forward of the module's class.

    transformers has several implementations of one forward, from which a model chooses. All of its
    own compute the same, so the eager one is returned.
    """
    forward: Any = class_of(module).forward
    return variables_of(forward)["original_forward"] if is_dispatched(module) else forward


def code_starts(module: nn.Module) -> tuple[Callable[..., object], ...]:
    """Returns the functions of a class that its conversion replaces or calls."""
    gate = getattr(class_of(module), GATE, None)
    return (own_forward(module), *([gate] if callable(gate) else []))


def variables_of(function: Any) -> dict[str, Any]:
    """Returns the variables of enclosing functions that a function reads, by name."""
    return {
        name: contents_of(cell)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())
    }


def is_dispatched(module: nn.Module) -> bool:
    """Tells whether the forward of a module's class is transformers' choice of an implementation.

    Its decorator use_experts_implementation replaces the class's own forward.
    """
    forward = class_of(module).forward
    is_theirs = getattr(forward, "__globals__", {}).get("__name__") == INTERFACE
    return is_theirs and {"experts_interface", "original_forward"} <= {*variables_of(forward)}


def reason_of_choice(module: nn.Module) -> str | None:
    """Returns why a model's choice of an implementation is none that a conversion stands for."""
    if not is_dispatched(module):
        return None
    variables = variables_of(class_of(module).forward)
    if variables["experts_interface"] is not sys.modules[INTERFACE].ALL_EXPERTS_FUNCTIONS:
        return "chooses its implementation from another registry than transformers'"
    return reason_of_implementation(module)


def reason_of_implementation(module: Any) -> str | None:
    """Returns why the implementation that a model of transformers chooses now is another one's."""
    name = getattr(module.config, "_experts_implementation", None)
    chosen = sys.modules[INTERFACE].ALL_EXPERTS_FUNCTIONS.get(name)
    if chosen is None or is_own(chosen):
        return None
    return f"runs the experts implementation {name!r} of another package than transformers"


@constant_in_graphs  # a graph has a guard of the function that is chosen
def is_own(function: Any) -> bool:
    """Tells whether a function is one that a file of transformers or of minifloat defines.

    Decorators can change its name, but neither its globals nor where its code was compiled.
    """
    if not isinstance(function, FunctionType):
        return False
    code, scope = function.__code__, function.__globals__
    package = scope["__name__"].partition(".")[0]
    is_defined = scope.get(code.co_name) is function and code.co_filename == scope.get("__file__")
    return package in OWN and is_defined
