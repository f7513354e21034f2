"""The optimizers of mf.GraphedStep: their learning rates change between replays, the rest may not.

An optimizer reads a rate in Python, so a graph would repeat the one of the capture. Instead it gets
a tensor of ours while the step runs. Before each call the rate in `param_groups` is written there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

NO_SETTINGS = ("params", "lr")  # entries of param_groups that are none; the rest may not change


class GraphedOptimizers:
    """The optimizers that one step calls.

    Args:
        optimizer: a torch.optim.Optimizer, or a list of those.
        device: of the tensors for rates. None: no step is captured, so rates are only watched.

    Raises:
        TypeError: one is no optimizer.
        ValueError: one waits for the device, or would freeze its rates.
    """

    def __init__(self, optimizer: object, device: torch.device | None) -> None:
        self._optimizers: list[Optimizer] = []
        for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
            if not isinstance(each, Optimizer):
                raise TypeError(
                    "GraphedStep: optimizer: expected a torch.optim.Optimizer, or a list of those, "
                    f"got {type(each).__name__}"
                )
            self._optimizers.append(each)
        self._device = device
        self._rates: list[Tensor] = []  # float32 (), one a group
        for group in self._groups() if device is not None else ():
            option = next((name for name in ("capturable", "fused") if name in group), None)
            if option is not None and not group[option]:
                raise ValueError(
                    "GraphedStep: expected an optimizer that a CUDA graph can hold, got one with "
                    f"{option}={group[option]}; make it with {option}=True"
                )

    @torch.no_grad()
    def write_rates(self) -> None:
        """Writes the rates of param_groups to the tensors that the optimizers read."""
        for group, rate in self._rated():
            given = group["lr"]
            rate.copy_(given.reshape(())) if isinstance(given, Tensor) else rate.fill_(given)

    @contextmanager
    def rates_in_place(self) -> Iterator[None]:
        """Has the optimizers read our tensors; without a device only watches their rates.

        Raises:
            ValueError: a scheduler wrote a rate.
        """
        rated = self._rated()
        given = [group["lr"] for group, _ in rated]
        if self._device is not None:
            for group, rate in rated:
                group["lr"] = rate
        before = [_state_of_rate(group["lr"]) for group, _ in rated]
        try:
            yield
            if before != [_state_of_rate(group["lr"]) for group, _ in rated]:
                raise ValueError(
                    "GraphedStep: expected a step that leaves the learning rate alone, got one that"
                    " changes it: a graph would repeat one; call scheduler.step() between calls"
                )
        finally:
            for (group, _), rate in zip(rated, given):
                group["lr"] = rate

    def keep_settings(self) -> None:
        """Keeps what a graph has captured, for require_settings."""
        self._states = [optimizer.state for optimizer in self._optimizers]
        self._settings = self._read_settings()
        self._parameters = [[*group["params"]] for group in self._groups()]

    def require_settings(self) -> None:
        """Raises ValueError where states, settings or parameters are not those of the capture."""
        if any(o.state is not state for o, state in zip(self._optimizers, self._states)):
            raise ValueError(
                "GraphedStep: expected the state that the optimizer had at the capture, got another"
                ", as optimizer.load_state_dict sets it; make a new GraphedStep after loading"
            )
        settings = self._read_settings()
        for name, value in self._settings.items():
            now = settings.get(name)
            if now is not value and now != value:
                raise ValueError(
                    f"GraphedStep: expected {name}={value!r}, as at the capture, got {now!r}: a "
                    "graph follows lr alone; set it back (schedulers: cycle_momentum=False), or "
                    "make a new GraphedStep"
                )
        for i, (group, kept) in enumerate(zip(self._groups(), self._parameters)):
            given = group["params"]
            if len(given) != len(kept) or not all(map(is_, given, kept)):
                found = len(given) if len(given) != len(kept) else "others"
                raise ValueError(
                    f"GraphedStep: expected the {len(kept)} parameters that param_groups[{i}] had "
                    f"at the capture, got {found}: a graph updates those alone; make a new "
                    "GraphedStep"
                )

    def _read_settings(self) -> dict[str, Any]:
        groups = self._groups()
        settings: dict[str, Any] = {"len(param_groups)": len(groups)}
        for i, group in enumerate(groups):
            for name in group.keys() - NO_SETTINGS:
                settings[f"param_groups[{i}][{name!r}]"] = group[name]
        return settings

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def _rated(self) -> list[tuple[dict[str, Any], Tensor]]:
        """Returns the param_groups that have a rate, each with our tensor for it."""
        groups = self._groups()
        self._rates += [torch.zeros((), device=self._device) for _ in groups[len(self._rates) :]]
        pairs = zip(groups, self._rates)
        return [(group, rate) for group, rate in pairs if group.get("lr") is not None]


def _state_of_rate(rate: Any) -> tuple[Any, ...]:
    """Returns what changes when a scheduler writes a rate."""
    return (id(rate), rate._version) if isinstance(rate, Tensor) else (rate,)
