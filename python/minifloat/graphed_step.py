"""mf.GraphedStep: a whole training step in one CUDA graph.

    call 1 to warm_ups       the step runs, on another stream: what lasts is allocated
    the next one             the step is captured, which runs nothing, and the graph is replayed
    all later ones           arguments are copied into the graph's memory, and it is replayed

A replay does on the device what the captured step did, and runs no Python. So what Python decides
must stay as it was at the capture. Each call checks what it can see of that: arguments, settings of
the optimizer, the mode of the model. A learning rate may change: the optimizer reads it from a
tensor of ours, to which each call writes the one in `param_groups`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .checks import require_int, require_module
from .distributed.handshake import meet, raise_on_all
from .moe.layer import divided_experts
from .nn.state.recipe_state import converted, histories_of
from .private_torch import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

META = torch.device("meta")
# Entries of param_groups that may change: parameters, and rates as each call reads them.
CHANGING = ("params", "lr")


class GraphedStep:
    """Runs a training step, from some call on as one CUDA graph. The host then makes one call.

    Each call is the next eager step, to the bit, on one GPU and under FSDP2, eager or compiled
    (without mode="reduce-overhead", which makes graphs of its own). The first calls run the step.
    On a CPU all calls do.

    A scheduler runs between calls, not in the step: each call reads the learning rates that are
    then in `param_groups`, and rounds them to float32.

    Args:
        step: the whole step: forward and backward of all micro-batches, optimizer.step(),
            optimizer.zero_grad(), mf.step(model). It may read other tensors than its arguments: a
            replay reads the memory that they had at the capture. Nothing in it may wait for the
            device, as loss.item() does.
        model: what it trains, in place on its device.
        optimizer: whose step() it calls, or a list of those. AdamW and others of torch that have
            the argument need capturable=True, SGD fused=True.
        warm_ups: calls that run the step before the one that captures it, at least 1. DDP needs 11.

    Calls:
        Arguments are tensors of any device and other values, in tuples, lists and dicts. They have
        the shapes, dtypes and structure of the first call's, and equal values where they are no
        tensors. On CUDA the step gets copies on the model's device. The result is what the step
        returned, copied and detached: tensors and None, in tuples, lists and dicts.

    Raises:
        TypeError, ValueError: an argument is not as described; the model's parameters are on
            several devices; the optimizer cannot be captured; experts that are divided over ranks
            have no capacity. All ranks that torch.distributed has raise it: each makes a
            GraphedStep. By a call: arguments differ from the first call's; the step returned a
            number, kept gradients, or ran a scheduler; mf.step was never called under delayed
            scaling; the optimizer or the model's mode changed after the capture.
        RuntimeError: the step waits for the device, or does something else that CUDA cannot
            capture. All ranks raise it, as ValueError where there are others. Training cannot go
            on from there: the capture ran nothing of the step.

    Example:
        >>> layer = mf.Linear(64, 32, recipe="nvfp4")
        >>> optimizer = torch.optim.AdamW(layer.parameters(), fused=True, capturable=True)
        >>> def train_step(x):
        ...     loss = layer(x).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     mf.step(layer)
        ...     return loss
        >>> step = mf.GraphedStep(train_step, layer, optimizer)
        >>> losses = [step(torch.ones(2, 64)) for _ in range(4)]
        >>> losses[0].requires_grad
        False
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        warm_ups: int = 3,
    ) -> None:
        with _agreed("made"):
            if not callable(step):
                raise TypeError(f"GraphedStep: step: expected a function, got {step!r}")
            self._step, self._model = step, require_module("GraphedStep", model)
            self._device = _device_of(model)
            self._optimizers = _list_of(optimizer)
            self._left = require_int("GraphedStep: warm_ups", warm_ups, 1)
            if self._is_graphed:
                for each in self._optimizers:
                    _require_capturable(each)
                _require_capacities(model)
        self._spec: TreeSpec | None = None
        self._arguments: list[Any] = []  # the leaves that the graph reads; on a CPU their shapes
        self._rates: list[Tensor] = []  # float32 (), one a group of the optimizers
        self._written: list[float | None] = []  # the numbers in them; None: of a tensor
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: Any = None  # what a replay writes
        # One stream, so that each warm-up takes the memory that the one before has freed.
        self._side = torch.cuda.Stream(self._device) if self._is_graphed else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_graphed:
            self._require_same_arguments(args, kwargs)
            return _own(self._run(args, kwargs))
        if self._graph is None and self._left == 0:
            with _agreed("called to be captured"):
                args, kwargs = self._received(args, kwargs)
                self._require_steps_ended()
                self._write_rates()  # not within the capture: each replay would write these
            with _agreed("captured"):
                self._capture(args, kwargs)
        else:
            args, kwargs = self._received(args, kwargs)
            if self._graph is not None:
                self._require_as_captured()
            self._write_rates()
        if self._graph is None:
            self._left -= 1
            return self._warm_up(args, kwargs)
        self._graph.replay()
        return _own(self._results)

    @property
    def _is_graphed(self) -> bool:
        return self._device.type == "cuda"

    # ---- arguments -------------------------------------------------------------------------------

    def _require_same_arguments(self, args: Any, kwargs: Any) -> list[Any]:
        """Returns the leaves of a call's arguments; ValueError where they differ from the first."""
        leaves, spec = tree_flatten((args, kwargs))
        if self._spec is None:
            device = self._device if self._is_graphed else META
            self._spec = spec
            self._arguments = [
                torch.empty_like(leaf, device=device) if isinstance(leaf, Tensor) else leaf
                for leaf in leaves
            ]
        if spec != self._spec:
            raise ValueError(
                f"GraphedStep: expected arguments of the first call's structure, {self._spec}, "
                f"got {spec}"
            )
        for i, (leaf, first) in enumerate(zip(leaves, self._arguments)):
            if not _is_like(leaf, first):
                raise ValueError(
                    f"GraphedStep: expected {_described(first)} as value {i} of the arguments, as "
                    f"in the first call, got {_described(leaf)}; pass what changes as a tensor of "
                    "one shape, or make a GraphedStep for each"
                )
        return leaves

    @torch.no_grad()
    def _received(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Copies arguments into the graph's memory, and returns them there."""
        for leaf, own in zip(self._require_same_arguments(args, kwargs), self._arguments):
            if isinstance(leaf, Tensor):
                own.copy_(leaf)
        received: tuple[Any, Any] = tree_unflatten(self._arguments, cast(TreeSpec, self._spec))
        return received

    # ---- the step --------------------------------------------------------------------------------

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Runs the step, and refuses what a graph of it could not repeat."""
        before = [(n, p, p.grad) for n, p in self._model.named_parameters() if p.grad is not None]
        with self._rates_in_place():
            results = self._step(*args, **kwargs)
        kept = [name for name, p, gradient in before if p.grad is gradient]
        if kept:
            raise ValueError(
                f"GraphedStep: expected a step without gradients of the one before, got {kept[0]} "
                "with the same .grad; call optimizer.zero_grad() at its end"
            )
        for leaf in tree_leaves(results):
            if leaf is not None and (
                not isinstance(leaf, Tensor) or leaf.device.type != self._device.type
            ):
                raise TypeError(
                    f"GraphedStep: expected a step that returns tensors on {self._device}, got "
                    f"{_described(leaf)}: a graph repeats nothing that Python computes"
                )
        return results

    def _warm_up(self, args: Any, kwargs: Any) -> Any:
        current, side = torch.cuda.current_stream(), cast(torch.cuda.Stream, self._side)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            results = self._run(args, kwargs)
        current.wait_stream(side)
        return _own(results)

    def _capture(self, args: Any, kwargs: Any) -> None:
        graph, failed = torch.cuda.CUDAGraph(), None
        try:
            # The outer context gives the stream back where a capture fails. NCCL's watchdog is a
            # thread that asks for events meanwhile, so only this thread is held to the capture.
            with (
                torch.cuda.stream(torch.cuda.current_stream()),
                torch.cuda.graph(graph, capture_error_mode="thread_local"),
            ):
                try:
                    self._results = tree_map(_detached, self._run(args, kwargs))
                except Exception as error:
                    failed = error  # the end of the capture, which it spoils, raises another
                    raise
        except Exception as error:
            cause = failed or error
            if not isinstance(cause, RuntimeError) or isinstance(cause, torch.OutOfMemoryError):
                raise cause from None
            raise RuntimeError(
                "GraphedStep: expected a step that CUDA can capture, got "
                f"{f'{cause}'.splitlines()[0]!r}; nothing in it may wait for the device, as "
                ".item(), .cpu(), print of a tensor, an optimizer that computes with lr in Python, "
                "and a GradScaler around one that is not fused do: move that behind the call, and "
                "start again"
            ) from cause
        self._graph = graph
        self._mode = self._model.training
        self._states = [optimizer.state for optimizer in self._optimizers]
        self._settings = [
            {name: value for name, value in group.items() if name not in CHANGING}
            for group in self._groups()
        ]

    # ---- what may not change, and the rates, which may -------------------------------------------

    def _require_steps_ended(self) -> None:
        """Raises ValueError where amaxes of a step wait for mf.step."""
        for fqn, _, history in histories_of(converted(self._model)):
            if history[..., 1].any():
                raise ValueError(
                    f"GraphedStep: expected mf.step(model) once a step, got none before {fqn} is "
                    "captured, which is under delayed scaling; call it behind optimizer.step()"
                )

    def _require_as_captured(self) -> None:
        if self._model.training != self._mode:
            raise ValueError(
                f"GraphedStep: expected the model with training={self._mode}, as it was captured, "
                f"got {self._model.training}"
            )
        if any(o.state is not state for o, state in zip(self._optimizers, self._states)):
            raise ValueError(
                "GraphedStep: expected the state that the optimizer had at the capture, got another"
                ", as optimizer.load_state_dict sets it; make a new GraphedStep after loading"
            )
        groups = self._groups()
        if len(groups) != len(self._settings):
            raise ValueError(
                f"GraphedStep: expected {len(self._settings)} param_groups, as at the capture, got "
                f"{len(groups)}; make a new GraphedStep"
            )
        for group, settings in zip(groups, self._settings):
            for name, value in settings.items():
                if group[name] is not value and group[name] != value:
                    raise ValueError(
                        f"GraphedStep: expected {name}={value!r} in param_groups, as at the "
                        f"capture, got {group[name]!r}; a graph can change lr alone (schedulers: "
                        "cycle_momentum=False)"
                    )

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @torch.no_grad()
    def _write_rates(self) -> None:
        """Writes the learning rates of param_groups to the tensors that the optimizers read."""
        for i, group in enumerate(self._groups()):
            if i == len(self._rates):
                self._rates.append(torch.zeros((), device=self._device))
                self._written.append(None)
            given = group.get("lr")
            if isinstance(given, Tensor):
                self._rates[i].copy_(given.reshape(()))
                self._written[i] = None
            elif given is not None and given != self._written[i]:
                self._rates[i].fill_(given)
                self._written[i] = given

    @contextmanager
    def _rates_in_place(self) -> Iterator[None]:
        """Has the optimizers read the tensors of rates; on a CPU only watches theirs.

        Raises:
            ValueError: a scheduler wrote a rate.
        """
        groups = [group for group in self._groups() if "lr" in group]
        given = [group["lr"] for group in groups]
        if self._is_graphed:
            for group, rate in zip(self._groups(), self._rates):
                if "lr" in group:
                    group["lr"] = rate
        before = [_state_of_rate(group["lr"]) for group in groups]
        try:
            yield
            if before != [_state_of_rate(group["lr"]) for group in groups]:
                raise ValueError(
                    "GraphedStep: expected a step that leaves the learning rate alone, got one "
                    "that changes it: a graph would repeat one rate; call scheduler.step() between "
                    "calls"
                )
        finally:
            if self._is_graphed:
                for group, rate in zip(groups, given):
                    group["lr"] = rate


@contextmanager
def _agreed(what: str) -> Iterator[None]:
    """Raises what one rank raises within, on all ranks.

    what: is done within.
    """
    try:
        yield
    except (TypeError, ValueError, RuntimeError) as error:
        raise_on_all(error, None)
    if dist.is_available() and dist.is_initialized():
        meet(
            "a GraphedStep",
            what,
            cast(dist.ProcessGroup, dist.group.WORLD),
            expected="GraphedStep: expected all {} ranks to have one {}",
            absent="they have made none, or called it less often",
        )


def _device_of(model: nn.Module) -> torch.device:
    """Returns the device of all parameters; ValueError where they have several."""
    devices = sorted({f"{p.device}" for p in model.parameters()})
    if len(devices) > 1:
        raise ValueError(
            f"GraphedStep: expected a model with all parameters on one device, got {devices}"
        )
    if devices == ["meta"]:
        raise ValueError(
            "GraphedStep: expected a model with parameters on its device, got meta; make one after "
            "the model is there"
        )
    return torch.device(devices[0] if devices else "cpu")


def _list_of(optimizer: object) -> list[Optimizer]:
    """Returns one optimizer or several as a list."""
    found: list[Optimizer] = []
    for each in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        if not isinstance(each, Optimizer):
            raise TypeError(
                "GraphedStep: optimizer: expected a torch.optim.Optimizer, or a list of those, got "
                f"{type(each).__name__}"
            )
        found.append(each)
    return found


def _require_capturable(optimizer: Optimizer) -> None:
    """Raises ValueError for an optimizer of torch that waits for the device, or freezes rates."""
    for group in optimizer.param_groups:
        option = next((name for name in ("capturable", "fused") if name in group), None)
        if option is not None and not group[option]:
            raise ValueError(
                f"GraphedStep: expected an optimizer that a CUDA graph can hold, got "
                f"{type(optimizer).__name__} with {option}={group[option]}; make it with "
                f"{option}=True"
            )


def _require_capacities(model: nn.Module) -> None:
    """Raises ValueError for experts whose forward copies the ranks' counts to the host."""
    for parallel in divided_experts(model.modules()).values():
        if parallel.capacity is None and parallel.dispatcher is None:
            raise ValueError(
                f"GraphedStep: expected a capacity of the divided experts {parallel.name}, got "
                "None, under which each forward waits for counts; pass capacity=… to "
                "mf.expert_parallel"
            )


def _is_like(value: object, first: object) -> bool:
    """Tells whether an argument may stand for that of the first call."""
    if isinstance(value, Tensor) and isinstance(first, Tensor):
        return value.shape == first.shape and value.dtype == first.dtype
    return type(value) is type(first) and bool(value == first)


def _described(value: object) -> str:
    """Describes an argument or a result for messages."""
    if isinstance(value, Tensor):
        return f"a tensor {value.dtype} {tuple(value.shape)} on {value.device.type}"
    return repr(value)


def _state_of_rate(rate: Any) -> tuple[Any, ...]:
    """Returns what changes when a scheduler writes a rate."""
    return (id(rate), rate._version) if isinstance(rate, Tensor) else (rate,)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _own(results: Any) -> Any:
    """Copies results, which the next replay overwrites."""
    return tree_map(lambda leaf: None if leaf is None else leaf.detach().clone(), results)
