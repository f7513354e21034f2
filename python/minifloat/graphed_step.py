"""mf.GraphedStep: a whole training step in one CUDA graph.

    call 1 to warm_ups       the step runs, on another stream: what lasts is allocated
    the next one             the step is captured, which runs nothing, and the graph is replayed
    all later ones           arguments are copied into the graph's memory, and it is replayed

A replay does on the device what the captured step did, and runs no Python. So what Python decides
must stay as it was at the capture. Each call checks what it can see of that: arguments, the
optimizer's settings and parameters (graphed_optimizers.py), the model's modes (graphed_modes.py),
tensors, submodules and recipes (graphed_members.py). A learning rate may change.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from .checks import require_int, require_module
from .distributed.handshake import meet, raise_on_all
from .graphed_members import GraphedMembers
from .graphed_modes import GraphedModes
from .graphed_optimizers import GraphedOptimizers
from .moe.layer import divided_experts
from .nn.names import unwrapped
from .nn.state.guarded_steps import guards_of
from .nn.state.recipe_state import converted, histories_of
from .private_torch import TreeSpec, tree_flatten, tree_map, tree_unflatten


class GraphedStep:
    """Runs a training step, from some call on as one CUDA graph. The host then makes one call.

    Each call is the next eager step, on one GPU and under FSDP2, eager or compiled (without
    mode="reduce-overhead", which makes graphs of its own). On a CPU all calls run it.

    A scheduler runs between calls, not in the step: each call reads the learning rates that are
    then in `param_groups`, and rounds them to float32. On CUDA weights have the bits of eager
    steps where float32 holds all rates exactly, as it does 2**-10. It does not hold 1e-3: an eager
    optimizer reads that in float64, a graph in float32, so their weights may differ.

    Args:
        step: the whole step: forward and backward of all micro-batches, optimizer.step(),
            optimizer.zero_grad(), mf.step(model). It may read other tensors than its arguments: a
            replay reads the memory that they had at the capture. Nothing in it may wait for the
            device, as loss.item() does.
        model: what it trains, in place on its device.
        optimizer: whose step() it calls, or a list of those. AdamW and others of torch that have
            the argument need capturable=True, SGD fused=True.
        warm_ups: calls that run the step before the one that captures it, at least 1. One that
            raises does not count. DDP needs 11.

    Calls:
        Arguments are tensors without requires_grad, of any device and strides, and hashable values,
        in tuples, lists and dicts. Their shapes, dtypes, values and structure are those of the
        first call. On CUDA the step gets copies on the model's device. The result is what the step
        returned, copied and detached: tensors and None, in tuples, lists and dicts.

    Raises:
        TypeError, ValueError: an argument is not as described; the model's parameters are on
            several devices; the optimizer cannot be captured; experts that are divided over ranks
            have no capacity. All ranks that torch.distributed has raise it: each makes a
            GraphedStep. By a call: arguments differ from the first call's; the step returned a
            number, kept gradients, ran a scheduler, or set another tensor as a buffer; mf.step was
            never called under delayed scaling; after the capture there was a change of the
            optimizer's settings, state or list of parameters, of `training` of a module, or of
            `requires_grad` of a parameter, or a parameter, buffer, submodule or recipe of the model
            is another, or was moved.
        RuntimeError: the step waits for the device, or does something else that CUDA cannot
            capture. All ranks raise it, as ValueError where there are others. Training cannot go
            on from there: the capture ran nothing of the step.

        The call that captures raises on all ranks. Other calls raise on the rank with the error,
        as eager steps do, and the other ranks wait for it in their collectives. NCCL's watchdog
        does not see those of a replay: let a launcher, as torchrun, end all ranks where one ends.

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
            self._left = require_int("GraphedStep: warm_ups", warm_ups, 1)
            self._device = _device_of(model)
            self._is_graphed = self._device.type == "cuda"
            rates_on = self._device if self._is_graphed else None
            self._optimizers = GraphedOptimizers(optimizer, rates_on)
            if self._is_graphed:
                _require_capacities(model)
        self._spec: TreeSpec | None = None
        self._arguments: list[Any] = []  # the leaves that the graph reads; on a CPU their shapes
        self._graph: torch.cuda.CUDAGraph | None = None
        self._results: Any = None  # what a replay writes
        # One stream, so that each warm-up takes the memory that the one before has freed.
        self._side = torch.cuda.Stream(self._device) if self._is_graphed else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_graphed:
            return _copied(self._run(*self._received(args, kwargs)))
        guards = guards_of(unwrapped(self._model))
        for guard in guards:
            guard.report()  # with the last step's batch, which this one's arguments overwrite
        if self._left > 0:
            received = self._received(args, kwargs)
            self._optimizers.write_rates()
            results = self._warm_up(*received)
            self._left -= 1
            return results
        if self._graph is None:
            with _agreed("called to be captured"):
                received = self._received(args, kwargs)
                self._require_steps_ended()
                # Not within the capture: each replay would write these.
                self._optimizers.write_rates()
            with _agreed("captured"):
                for guard in guards:
                    guard.take_captured()  # of a capture that failed
                graph = self._capture(*received)
            self._graph = graph  # where no rank has failed
            self._guards = {guard: guard.take_captured() for guard in guards}
        else:
            self._members.require()
            self._modes.require()
            self._optimizers.require_settings()
            if guards != [*self._guards]:
                raise ValueError(
                    "GraphedStep: expected the guard that the model had at the capture, or none, "
                    "got another; make a new GraphedStep after a StepGuard is made or removed"
                )
            self._received(args, kwargs)
            self._optimizers.write_rates()
        self._replay()
        return _copied(self._results)

    @torch.no_grad()
    def _received(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Copies arguments into the graph's memory, and returns them there; on a CPU as they are.

        Raises:
            TypeError, ValueError: they are not as described, or differ from the first call's.
        """
        leaves, spec = tree_flatten((args, kwargs))
        for leaf in leaves:
            if leaf.requires_grad if isinstance(leaf, Tensor) else not isinstance(leaf, Hashable):
                raise TypeError(
                    "GraphedStep: expected tensors without requires_grad and hashable values as "
                    f"arguments, in tuples, lists and dicts, got {_described(leaf)}; pass "
                    "x.detach(), and the tensors of another container as a dict"
                )
        if self._spec is None:
            device = self._device if self._is_graphed else "meta"
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
        if not self._is_graphed:
            return args, kwargs
        for leaf, own in zip(leaves, self._arguments):
            if isinstance(leaf, Tensor):
                own.copy_(leaf)
        return cast(tuple[Any, Any], tree_unflatten(self._arguments, spec))

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Runs the step, and returns its results without their autograd graph.

        Raises:
            TypeError, ValueError: a graph could not repeat the step.
        """
        before = [(n, p, p.grad) for n, p in self._model.named_parameters() if p.grad is not None]
        with self._optimizers.rates_in_place():
            results = self._step(*args, **kwargs)
        kept = [name for name, p, gradient in before if p.grad is gradient]
        if kept:
            raise ValueError(
                f"GraphedStep: expected a step without gradients of the one before, got {kept[0]} "
                "with the same .grad; call optimizer.zero_grad() at its end"
            )
        return tree_map(self._detached, results)

    def _detached(self, result: Any) -> Tensor | None:
        if isinstance(result, Tensor) and result.device.type == self._device.type:
            return result.detach()
        if result is None:
            return None
        found = f"one on {result.device}" if isinstance(result, Tensor) else _described(result)
        raise TypeError(
            f"GraphedStep: expected a step that returns tensors on {self._device}, got {found}: a "
            "graph repeats nothing that Python computes"
        )

    def _warm_up(self, args: Any, kwargs: Any) -> Any:
        current = torch.cuda.current_stream(self._device)
        side = cast(torch.cuda.Stream, self._side)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                results = self._run(args, kwargs)
        finally:
            current.wait_stream(side)
        return _copied(results)

    def _capture(self, args: Any, kwargs: Any) -> torch.cuda.CUDAGraph:
        graph, failed = torch.cuda.CUDAGraph(), None
        # Frees what FSDP2 has gathered, too: else no gather is captured.
        self._members = GraphedMembers(self._model)
        # The outer context gives the stream back where a capture fails. NCCL's watchdog is a
        # thread that asks for events meanwhile, so only this thread is held to the capture.
        outer = torch.cuda.stream(torch.cuda.current_stream(self._device))
        stream, mode = torch.cuda.Stream(self._device), "thread_local"
        try:
            with outer, torch.cuda.graph(graph, stream=stream, capture_error_mode=mode):
                try:
                    self._results = self._run(args, kwargs)
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
                "and a GradScaler around one that is not fused do: move that after the call, and "
                "start again"
            ) from cause
        self._members.require_written_in_place()
        self._modes = GraphedModes(self._model)
        self._optimizers.keep_settings()
        return graph

    def _replay(self) -> None:
        """Replays the graph, in which no guard sends its flags."""
        cast(torch.cuda.CUDAGraph, self._graph).replay()
        for guard, written in self._guards.items():
            guard.send(written)

    def _require_steps_ended(self) -> None:
        """Raises ValueError where amaxes of a step wait for mf.step."""
        for fqn, _, history in histories_of(converted(self._model)):
            if history[..., 1].any():
                raise ValueError(
                    f"GraphedStep: expected mf.step(model) once a step, got none before {fqn} is "
                    "captured, which is under delayed scaling; call it after optimizer.step()"
                )


@contextmanager
def _agreed(done: str) -> Iterator[None]:
    """Raises what one rank raises within, on all ranks; `done` says what is done there."""
    try:
        yield
    except Exception as error:
        raise_on_all(error, None)
    if dist.is_available() and dist.is_initialized():
        meet(
            "a GraphedStep",
            done,
            cast(dist.ProcessGroup, dist.group.WORLD),
            expected="GraphedStep: expected all {} ranks to have one {}",
            absent="they have made none, or called it less often",
        )


def _device_of(model: nn.Module) -> torch.device:
    """Returns the device of all parameters; ValueError where they have several, or are on meta."""
    devices = sorted({f"{p.device}" for p in model.parameters()}) or ["cpu"]
    if len(devices) > 1 or devices == ["meta"]:
        raise ValueError(
            "GraphedStep: expected a model with all parameters on one device, in memory, got "
            f"{devices}"
        )
    return torch.device(devices[0])


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
    return value is first or (type(value) is type(first) and bool(value == first))


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        requires = " with requires_grad" if value.requires_grad else ""
        return f"a tensor {value.dtype} {tuple(value.shape)}{requires}"
    return f"{value!r:.80}"


def _copied(results: Any) -> Any:
    """Copies results, which the next replay overwrites."""
    return tree_map(lambda leaf: None if leaf is None else leaf.clone(), results)
