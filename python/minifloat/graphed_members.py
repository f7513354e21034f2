"""The members of a model in mf.GraphedStep: a replay works on the memory that its tensors had."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from .distributed.fsdp.weight_tensors import ShardedWeight
from .distributed.reshard import reshard
from .nn.state.recipe_state import RecipeState
from .private_torch import WithoutTorchFunction, is_wrapper


class GraphedMembers:
    """Which parameters, buffers, submodules and recipes a model has, and where its tensors are.

    They are listed once, as modes are. Of FSDP2's parameters the sharded ones count: what it has
    gathered between steps, as for an evaluation, is freed.
    """

    def __init__(self, model: nn.Module) -> None:
        reshard(model)
        self._model = model
        self._names: list[str] = []
        self._tables: list[dict[str, Any]] = []  # of modules: the one with the member of that name
        self._keys: list[str] = []
        for fqn, module in model.named_modules():
            tables = module._parameters, module._buffers, module._modules
            places = [(table, key) for table in tables for key in table]
            if isinstance(module, RecipeState):  # each conversion sets another recipe
                places.append((vars(module), "recipe"))
            for table, key in places:
                self._names.append(f"{fqn}.{key}".lstrip("."))
                self._tables.append(table)
                self._keys.append(key)
        self._members = [*self._read_members()]
        self._plain: dict[str, Tensor] = {}
        self._wrapped: dict[str, tuple[attrgetter[Tensor], Tensor]] = {}
        for name, member in zip(self._names, self._members):
            if isinstance(member, Tensor):
                path, inner = _memory(member)
                if path:
                    self._wrapped[name] = attrgetter(path), member
                elif inner.layout == torch.strided:
                    self._plain[name] = member
        self._addresses = self._read_addresses()

    def require(self) -> None:
        """Raises ValueError where a member or its memory is another."""
        for name in self._changed():
            raise ValueError(
                f"GraphedStep: expected {name} as at the capture, got another, or one in other "
                "memory, as .to(), load_state_dict(assign=True) and mf.restore_ leave it: a graph "
                "works on the memory of the capture; make a new GraphedStep after those"
            )

    def require_written_in_place(self) -> None:
        """Raises ValueError where the step that was captured since has set another member."""
        for name in self._changed():
            raise ValueError(
                f"GraphedStep: expected a step that writes into {name}, got one that sets another: "
                "each replay would read the one before the capture again; write "
                f"self.{name.rpartition('.')[2]}.copy_(…) in the module, and start again"
            )

    def _changed(self) -> Iterator[str]:
        """Yields the names of members that are others, or in other memory."""
        if not all(map(is_, self._read_members(), self._members)):
            reshard(self._model)
            now = self._read_members()
            yield from (n for n, a, b in zip(self._names, now, self._members) if a is not b)
        addresses = self._read_addresses()
        if addresses != self._addresses:
            names = (*self._plain, *self._wrapped)
            yield from (n for n, a, b in zip(names, addresses, self._addresses) if a != b)

    def _read_members(self) -> Iterator[Any]:
        return map(dict.get, self._tables, self._keys)

    def _read_addresses(self) -> list[int]:
        with WithoutTorchFunction():  # a wrapper's would take microseconds
            inner = [read(member) for read, member in self._wrapped.values()]
            return [*map(Tensor.data_ptr, (*self._plain.values(), *inner))]


def _memory(t: Tensor) -> tuple[str, Tensor]:
    """Finds the first tensor with memory in a wrapper, and its attribute, dotted; "": t itself."""
    path: list[str] = []
    while is_wrapper(t) and hasattr(t, "__tensor_flatten__"):
        # The __tensor_flatten__ of a ShardedWeight would note that it is traced.
        path.append("shard" if isinstance(t, ShardedWeight) else t.__tensor_flatten__()[0][0])
        t = getattr(t, path[-1])
    return ".".join(path), t
