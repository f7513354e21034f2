"""Replicas: copies of a module's code and settings that share nothing which code could change.

replica     seeded parameters on the CPU; containers and other objects have copies
state_of    what code could change in a replica, by name; `changed_part` compares two states
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ...private_torch import FakeTensor

SHARED = (
    type,
    ModuleType,
    FunctionType,
    BuiltinFunctionType,
    Enum,
    str,
    bytes,
    int,
    float,
    complex,
)


class CannotCopyError(TypeError):
    """A replica cannot have an attribute of its own."""


def seeded(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> Tensor:
    """Returns integers from -3 to 3, times `scale`: float32, on the CPU. No generator is used."""
    count = torch.Size(shape).numel()
    # A multiplicative hash of the element's number, of 31 bits; its upper bits are the best ones.
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device="cpu") + 0x9E3779B1 * (seed + 1)
    for factor in (0x45D9F3B, 0x45D9F3B):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & 0x7FFFFFFF
    return ((mixed ^ (mixed >> 16)) % 7 - 3).to(torch.float32).view(shape) * scale


def replica(module: nn.Module, sizes: Mapping[int, int] | None = None) -> Any:
    """Returns a module of the same code and settings whose parameters are seeded values on the CPU.

    Args:
        module: it is not changed. The replica shares nothing with it that code could change:
            modules, tensors, containers and other objects among its attributes have copies, and
            containers that are attributes of its class. Modules that contain `module` are shared,
            and what is of torch but no tensor, such as a process group.
        sizes: size -> another one, for dimensions of parameters and for attributes that are ints.
            Floating parameters and buffers become float32.

    Raises:
        CannotCopyError: an attribute is of a class that cannot be copied.
    """
    made: dict[int, Any] = {}
    kept: list[object] = []  # originals whose ids are keys of `made`
    map_size = (sizes or {}).get

    def tensor(value: Tensor, scale: float, is_parameter: bool) -> Any:
        if id(value) not in made:
            shape = tuple(map_size(size, size) for size in value.shape)
            if is_parameter or value.is_meta or isinstance(value, FakeTensor):
                new = seeded(shape, len(made), scale)
            else:
                new = value.detach().to("cpu", copy=True)
            new = new.float() if value.is_floating_point() else new.to(value.dtype)
            made[id(value)] = nn.Parameter(new, requires_grad=False) if is_parameter else new
        return made[id(value)]

    def setting(value: Any) -> Any:
        if isinstance(value, SHARED) or value is None:
            return value
        if id(value) in made:
            return made[id(value)]
        kept.append(value)
        if isinstance(value, Tensor):
            return tensor(value, 1.0, is_parameter=False)
        if isinstance(value, nn.Module):
            contains = value is not module and any(part is module for part in value.modules())
            return value if contains else build(value)
        if isinstance(value, torch.Generator):
            return made.setdefault(id(value), value.clone_state())
        if isinstance(value, MethodType):
            return MethodType(value.__func__, setting(value.__self__))
        if type(value).__module__.partition(".")[0] == "torch":
            return value
        if type(value) is tuple:
            return tuple(map(setting, value))
        return copied(value)

    def copied(value: Any) -> Any:
        """Copies an object by the protocol of pickles, whose parts have copies too."""
        if type(value) in (list, set, dict):
            new = made[id(value)] = type(value)()
            if type(value) is set:
                new.update(map(setting, value))
            elif type(value) is list:
                new.extend(map(setting, value))
            else:
                new.update((setting(k), setting(v)) for k, v in value.items())
            return new
        found = value.__reduce_ex__(4)
        if isinstance(found, str):
            return value
        function, args, state, items, pairs = (*found, None, None, None, None)[:5]
        new = made[id(value)] = function(*map(setting, args))
        if state is not None and hasattr(new, "__setstate__"):
            new.__setstate__(setting(state))
        elif state is not None:
            for part in state if isinstance(state, tuple) else (state,):
                for name, attribute in (part or {}).items():
                    object.__setattr__(new, name, setting(attribute))
        for item in items or ():
            new.append(setting(item))
        for key, item in pairs or ():
            new[setting(key)] = setting(item)
        return new

    def attribute(name: str, value: object) -> object:
        try:
            return map_size(value, value) if type(value) is int else setting(value)
        except CannotCopyError:
            raise
        except Exception as error:  # whatever foreign code raises
            kind = type(value).__name__
            raise CannotCopyError(f"has an attribute {name}, a {kind}, without a copy") from error

    def build(source: nn.Module) -> Any:
        if id(source) in made:
            return made[id(source)]
        new = made[id(source)] = object.__new__(type(source))
        empty = nn.Module().__dict__  # its keys are torch's own state: tensors, children, hooks
        settings = {k: v for k, v in source.__dict__.items() if k not in empty}
        settings.pop("_compiled_call_impl", None)
        new.__dict__.update(empty, training=source.training)
        for name, value in (containers_of(type(source)) | settings).items():
            new.__dict__[name] = attribute(name, value)
        for name, p in source._parameters.items():
            new._parameters[name] = None if p is None else tensor(p, 2.0**-3, is_parameter=True)
        for name, b in source._buffers.items():
            new._buffers[name] = None if b is None else tensor(b, 1.0, is_parameter=False)
        for name, child in source._modules.items():
            new._modules[name] = None if child is None else build(child)
        return new

    return build(module)


def containers_of(cls: type) -> dict[str, object]:
    """Returns the lists, sets and dicts among a class's attributes, but not torch's own."""
    bases = [b for b in reversed(cls.__mro__) if b.__module__.partition(".")[0] != "torch"]
    found: dict[str, object] = {}
    for base in bases:
        members = vars(base).items()
        is_own = {k: v for k, v in members if isinstance(v, (list, set, dict)) and k[:2] != "__"}
        found |= is_own
    return found


# ---- state ---------------------------------------------------------------------------------------


def state_of(module: nn.Module) -> dict[str, object]:
    """Returns everything that code could change in a replica, by name: values and tensors."""
    found: dict[str, object] = {}
    seen: dict[int, str] = {}
    kept: list[object] = []  # what `seen` has ids of: parts of pickles are made for this call

    def visit(value: Any, name: str) -> None:
        if isinstance(value, SHARED) or value is None:
            found[name] = value
            return
        if id(value) in seen:
            found[name] = f"the same as {seen[id(value)]}"
            return
        seen[id(value)] = name
        kept.append(value)
        found[name] = type(value)
        if isinstance(value, Tensor):
            found[name] = value.detach().clone()
        elif isinstance(value, nn.Module):
            for part_of in (value.__dict__, value._parameters, value._buffers, value._modules):
                for attribute, part in list(part_of.items()):
                    if attribute not in ("_parameters", "_buffers", "_modules"):
                        visit(part, f"{name}.{attribute}" if name else attribute)
        elif isinstance(value, torch.Generator):
            found[name] = value.get_state()
        elif isinstance(value, Mapping):
            for key, part in list(value.items()):
                visit(part, f"{name}[{key!r}]")
        elif isinstance(value, (list, tuple)):
            for i, part in enumerate(value):
                visit(part, f"{name}[{i}]")
        elif isinstance(value, (set, frozenset)):
            found[name] = {p if isinstance(p, SHARED) else id(p) for p in value}
        elif type(value).__module__.partition(".")[0] != "torch":
            for key, part in parts_of(value):
                visit(part, f"{name}.{key}")

    visit(module, "")
    return found


def parts_of(value: Any) -> list[tuple[object, Any]]:
    """Returns what the protocol of pickles says that an object consists of, by name."""
    try:
        found = value.__reduce_ex__(4)
    except Exception:  # whatever foreign code raises
        return []
    if isinstance(found, str):
        return []
    _, args, state, items, pairs = (*found, None, None, None, None)[:5]
    parts: list[tuple[object, Any]] = list(enumerate(args))
    for part in state if isinstance(state, tuple) else (state,):
        parts += part.items() if isinstance(part, dict) else [("state", part)]
    return [*parts, *enumerate(items or ()), *(pairs or ())]


def changed_part(before: dict[str, object], after: dict[str, object]) -> str | None:
    """Returns the name of what differs between two states; None where nothing does."""
    for name in [*before, *after]:
        old, new = before.get(name, before), after.get(name, after)  # which no state contains
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            is_same = old.dtype == new.dtype and torch.equal(old.isnan(), new.isnan())
            is_same = is_same and torch.equal(old.nan_to_num(), new.nan_to_num())
        else:
            is_same = old is new or (type(old) is type(new) and bool(old == new))
        if not is_same:
            return name
    return None
