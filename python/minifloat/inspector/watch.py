"""What surrounds the forward and backward of an inspection: generators, and weights that are read.

Both classes are modes of torch, which act on the thread that enters them alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from ..private_torch import OpOverload, TorchDispatchMode, tree_leaves

Op = OpOverload[..., Any]


# ---- random numbers ------------------------------------------------------------------------------


class KeptGenerators(TorchDispatchMode):
    """Leaves torch's generators as they are: each op draws from a copy of one, as it was at first.

    So a block that backward runs again draws what it drew before, and ops of one shape draw the
    same numbers. An op that takes no generator draws from torch's own, whose state is put back
    after the op.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[torch.Generator, Tensor] = {}  # the state of each at its first use

    def __torch_dispatch__(
        self, func: Op, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        given = next((leaf for leaf in leaves if isinstance(leaf, torch.Generator)), None)
        generator = given or default_generator(leaves)
        if generator is None:
            return func(*args, **kwargs)
        if generator not in self.first:
            self.first[generator] = generator.get_state()
        first = self.first[generator]
        takes = form_with_generator(func)
        if given is None and takes is not None:
            own = torch.Generator(generator.device)
            own.set_state(first)
            return takes(*args, **kwargs, generator=own)
        now = generator.get_state()
        generator.set_state(first)
        try:
            return func(*args, **kwargs)
        finally:
            generator.set_state(now)


def default_generator(leaves: Sequence[Any]) -> torch.Generator | None:
    """Returns torch's generator of an op's device; None: the device has none, such as meta."""
    device = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    device = device or next((t.device for t in leaves if isinstance(t, Tensor)), None)
    if device is None or device.type == "cpu":
        return torch.default_generator
    if device.type != "cuda":
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def form_with_generator(func: Op) -> Op | None:
    """Returns the form of a random op that takes a generator as a keyword; None: there is none."""
    if func._overloadname == "default":
        func = getattr(func._overloadpacket, "generator", func)
    has_one = any(a.name == "generator" and a.kwarg_only for a in func._schema.arguments)
    return func if has_one else None


# ---- layers whose calls are not seen -------------------------------------------------------------


class WeightReads(TorchFunctionMode):
    """Notes which function reads a module's parameter while the module is not called.

    Args:
        modules: those to watch.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.modules = modules
        self.called: list[nn.Module] = []  # those that run now
        self.readers: dict[nn.Module, str] = {}  # module -> the name of a function

    def __torch_function__(
        self, func: Any, types: object, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            for value in (*args, *(kwargs or {}).values()):
                if isinstance(value, nn.Parameter) and value is not out:
                    self.note(value, getattr(func, "__name__", str(func)))
        return out

    def note(self, parameter: nn.Parameter, reader: str) -> None:
        """Notes a read of a parameter, unless a module that has it runs."""
        if any(has(module, parameter) for module in self.called):
            return
        for module in self.modules:
            if has(module, parameter):
                self.readers.setdefault(module, reader)


def has(module: nn.Module, parameter: nn.Parameter) -> bool:
    return any(p is parameter for p in module._parameters.values())


def function_that_hides() -> str | None:
    """Returns the name of the torch.autograd.Function in whose forward this is called; None: none.

    Without gradients: so a reentrant checkpoint calls what it wraps.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount > 0:
            first = frame.f_locals.get(code.co_varnames[0])
            if isinstance(first, FunctionCtx):
                return type(first).__name__.removesuffix("Backward")
        frame = frame.f_back
    return None
