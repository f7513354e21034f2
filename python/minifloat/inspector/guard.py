"""Leaves a step out before gradients that are not finite are applied: StepGuard.

    guard.check()       reports the step before, whose flags are on the host by now
                        reads the gradients: a flag each, and one of all, on the device
                        ranks: one all-reduce of that one flag, so that all of them decide alike
    optimizer.step()    fused Adam, AdamW and SGD of torch read the flag themselves: nothing waits.
                        For any other, check waits for the flag, and drops gradients if it is set
    mf.step(model)      reads the flag: neither amax histories nor balance biases change

Names and ranks are looked up only for a step that was left out.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checks import require_module, require_one_of
from ..distributed.handshake import has_others, meet, raise_different, raise_on_all
from ..nn.names import unwrapped
from ..nn.state.guarded_steps import guards, guards_of
from ..nn.state.model_state import drop_counts
from ..nn.state.random_state import as_normal
from .guard_report import Loss, Written, described, find
from .guarded_optimizers import (
    flags_of,
    local_gradients,
    make_momentum,
    parameters_of,
    reads_flag,
    require_optimizers,
    zero_gradients,
)

RAISE, SKIP = "raise", "skip"
WAITS = ", of an optimizer that waits"


class StepGuard:
    """Stops, or skips, a step with a gradient that is Inf or NaN, before it is applied.

    Call `check` once a step, until `remove`, or the end of a `with` block; a model's new guard ends
    the one before. Of a step that is left
    out, parameters, the optimizer's state, amax histories and balance biases stay as they were.
    Random counters have moved on, and a scheduler counts the step.

    AdamW, Adam and SGD of torch with fused=True read the guard's flag on the device, and nothing
    waits: the step is reported by the next `check`, or by `remove`. With another optimizer `check`
    waits for the flag, and reports the step at once.

    Args:
        model: what is trained, converted or not, or an nn.ModuleList of a rank's pipeline stages.
        optimizer: whose gradients are read, or a list of those that step on one backward pass.
        on_nonfinite: "raise": FloatingPointError, with the same text on all ranks. "skip": a
            warning on the first rank, and training goes on.
        loss: (model, batch) -> a tensor of one element, by which `check` repeats a batch; None: no
            batch is repeated.
        group: the ranks that train the model, which decide alike; None: all of them.

    Raises:
        TypeError: `model` is no module, `optimizer` no optimizer, or `loss` no function. Where
            there are other ranks it is a ValueError.
        ValueError: `on_nonfinite` is another, or ranks differ in these arguments, or one is
            missing. Every rank raises it.
        FloatingPointError: by the guard before, of a step that it has not reported yet.

    Example:
        >>> layer = mf.Linear(64, 32, recipe="mxfp8")
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> guard = mf.inspector.StepGuard(layer, optimizer, on_nonfinite="raise")
        >>> layer(torch.full((2, 64), torch.inf)).sum().backward()
        >>> try:
        ...     guard.check()
        ...     optimizer.step()
        ... except FloatingPointError as error:
        ...     print(f"{error}"[:40])
        step 1: 1 of 2 gradients are not finite,
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        on_nonfinite: str,
        loss: Loss | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        try:
            self.model = unwrapped(require_module("StepGuard", model))
            self._optimizers = require_optimizers(optimizer)
            self._ranks = ranks_of(group)
            require_one_of("StepGuard: on_nonfinite", on_nonfinite, (RAISE, SKIP))
            if not (loss is None or callable(loss)):
                raise TypeError(f"StepGuard: loss: expected a function or None, got {loss!r}")
        except (TypeError, ValueError) as error:
            raise_on_all(error, group)
        self._raises, self._loss = on_nonfinite == RAISE, loss
        self._waits = agree(
            f"on_nonfinite={on_nonfinite!r}, {'a' if loss else 'no'} loss",
            not all(map(reads_flag, self._optimizers)),
            self._ranks,
        )
        for former in guards_of(self.model):
            former.remove()
        self.steps = 0  # steps until now; assign it where a run is resumed
        self.left_out: Tensor | None = None  # what mf.step reads
        self.stepped: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        devices = [p.device for o in self._optimizers for p in parameters_of(o)]
        devices.sort(key=lambda device: device.type != "cuda")
        self._device = devices[0] if devices else torch.device("cpu")
        self._event = torch.cuda.Event() if self._device.type == "cuda" else None
        self._flags = as_normal(torch.zeros(1, dtype=torch.float32, device=self._device))
        self._flag = self._flags[0]
        self._fault: str | None = None  # of this rank's call, which the report raises on all ranks
        self._captured: list[Written] = []
        self._sent: list[tuple[int, Written]] = []  # steps to report, their flags on the host
        # Neither is traced where a step is compiled.
        self._check, end = map(torch.compiler.disable, (self._check_eagerly, self._end_step))
        self._handles = [o.register_step_post_hook(end) for o in self._optimizers]
        guards[self] = None

    def check(self, *batches: Any) -> None:
        """Reads the gradients, and has each optimizer's next step left out if one is not finite.

        Call it once a step, on all ranks: after the last backward, before gradients are clipped and
        before any of the optimizers steps. Clipping makes all gradients NaN where their norm is.
        An optimizer that calls a closure has it at the closure's end.

        Args:
            batches: this step's micro-batches, as many on all ranks, which the guard keeps until
                its report. A step that is left out is repeated with them by find_nonfinite, which
                names module and operand.

        Raises:
            FloatingPointError: under "raise", a gradient is not finite: of this step with an
                optimizer that waits, of the one before with the others.
            ValueError: there are batches and no loss, an optimizer no longer reads the flag, as
                after load_state_dict of one that is not fused, or the guard has ended. Of several
                ranks all raise the first two, when they would raise that error. An optimizer waits
                while a CUDA graph is captured.
        """
        if not self._handles:
            raise ValueError("StepGuard: expected a guard in use, got one that has ended")
        self._check(batches)

    @torch.inference_mode(False)  # flags are written again outside of it
    def _check_eagerly(self, batches: tuple[Any, ...]) -> None:
        is_captured = self._event is not None and torch.cuda.is_current_stream_capturing()
        if is_captured and self._waits:
            raise ValueError(
                "StepGuard: expected optimizers that a CUDA graph can leave a step out of, got "
                f"{', '.join(type(o).__name__ for o in self._optimizers)}, of which one is not "
                "fused; make it with fused=True"
            )
        if not is_captured:
            self.report()
        self._fault = self._fault_of(batches)
        if self._fault is not None and self._ranks is None:
            raise ValueError(self._fault)
        # A graph's first check begins anew: what it would read is not the graph's memory.
        is_first = bool(self.stepped) or (is_captured and not self._captured)
        before = None if self.left_out is None or is_first else self.left_out.clone()
        self.stepped.clear()
        written = self._read_gradients(batches, is_captured)
        self.left_out = self._flag if before is None else torch.maximum(before, self._flag)
        if is_captured:
            self._captured.append(written)
        else:
            self.send([written])
        if self._fault is not None:
            self._drop_gradients()
        elif self._waits:
            if not self._raises and any(self._left_out()):
                self._drop_gradients()  # before the report, whose warning may be an error
        else:
            for optimizer in self._optimizers:
                make_momentum(optimizer)
                optimizer.found_inf = self._flag  # type: ignore[attr-defined]
        if self._waits:
            self.report()

    def _fault_of(self, batches: tuple[Any, ...]) -> str | None:
        """Returns why this rank cannot guard a step; None: it can."""
        if batches and self._loss is None:
            return (
                "StepGuard: expected a loss to repeat a batch with, got None; pass loss= to the "
                "guard, or call check() without a batch"
            )
        if not (self._waits or all(map(reads_flag, self._optimizers))):
            return (
                "StepGuard: expected optimizers that are fused, as when the guard was made, got "
                f"{', '.join(type(o).__name__ for o in self._optimizers)}, of which one is not; "
                "make a new guard after load_state_dict or add_param_group"
            )
        return None

    def _drop_gradients(self) -> None:
        for optimizer in self._optimizers:
            for parameter in parameters_of(optimizer):
                parameter.grad = None

    def remove(self) -> None:
        """Ends the guard, after a report of the last step."""
        try:
            self.report()
            if self.left_out is not None and not self.stepped and self.left_out > 0:
                drop_counts(self.model)  # of a step that no mf.step has ended
        finally:
            self._detach()

    def __enter__(self) -> StepGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.remove()
        else:
            self._detach()

    def _detach(self) -> None:
        for optimizer, handle in zip(self._optimizers, self._handles):
            self._take_back(optimizer)
            handle.remove()
        self._handles, self._sent, self._captured = [], [], []
        guards.pop(self, None)

    def _end_step(self, optimizer: Optimizer, *_: object) -> None:
        """Takes the flag back after a step, and under "skip" zeroes the gradients of one left out.

        The checks of other optimizers' steps read all gradients, and would find them again.
        """
        if self._take_back(optimizer) and not self._raises and len(self._optimizers) > 1:
            zero_gradients(optimizer, self._flag)

    def _take_back(self, optimizer: Optimizer) -> bool:
        """Takes the flag from an optimizer that has it: its next step may have no check."""
        has_flag = getattr(optimizer, "found_inf", None) is self._flag
        if has_flag:
            del optimizer.found_inf  # type: ignore[attr-defined]
        return has_flag

    @torch.no_grad()
    def _read_gradients(self, batches: tuple[Any, ...], is_captured: bool) -> Written:
        """Writes the flags, by kernels alone."""
        read, found, is_cuda = [], [], self._device.type == "cuda"
        for parameters, gradients in local_gradients(self._optimizers):
            read += parameters
            found.append(flags_of(gradients).to(self._device, non_blocking=is_cuda))
        flags = self._flags
        if is_captured or flags.numel() != 1 + len(read):  # a graph's checks have their own each
            flags = flags.new_zeros(1 + len(read))
        self._flag = flags[0]
        if found:
            torch.cat(found, out=flags[1:])
            torch.amax(flags[1:], 0, out=self._flag)
        else:
            flags.zero_()
        if self._fault is not None:
            self._flag.fill_(1)
        if self._ranks is not None:
            dist.all_reduce(flags[:1], op=dist.ReduceOp.MAX, group=self._ranks)
        if not is_captured:
            self._flags = flags
        return Written(flags, read, batches)

    # ---- the report ------------------------------------------------------------------------------

    def take_captured(self) -> list[Written]:
        """Returns what checks write in each replay of a graph that was just captured."""
        captured, self._captured = self._captured, []
        return captured

    def send(self, written: Sequence[Written]) -> None:
        """Counts steps, and copies their flags to the host. Nothing waits for the copies."""
        self.stepped.clear()
        for each in written:
            self.steps += 1
            is_cuda = self._event is not None
            host = torch.empty_like(each.flags, device="cpu", pin_memory=is_cuda)
            host.copy_(each.flags, non_blocking=True)
            self._sent.append((self.steps, each._replace(flags=host)))
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def report(self) -> bool:
        """Reports steps that were sent, where they were left out and nobody was told.

        Returns:
            Whether one was left out.

        Raises:
            FloatingPointError: it was, under "raise".
            ValueError: a rank could not guard the step, on every rank.
        """
        left_out = self._left_out()
        sent, self._sent = self._sent, []
        for is_one, (step, written) in zip(left_out, sent):
            if not is_one:
                continue
            found = find(self.model, step, written, self._fault, self._loss, self._ranks)
            text = described(step, found)
            if self._raises:
                drop_counts(self.model)
                self.left_out = None  # no mf.step ends it
                raise FloatingPointError(f"{text}. The step was left out")
            if self._ranks is None or dist.get_rank(self._ranks) == 0:
                warnings.warn(f"minifloat: {text}. The step is skipped", stacklevel=2)
        return any(left_out)

    def _left_out(self) -> list[bool]:
        """Tells which of the steps that were sent are left out; their flags are a step old."""
        if self._sent and self._event is not None:
            self._event.synchronize()
        return [bool(written.flags[0] != 0) for _, written in self._sent]


def ranks_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the ranks that decide together; None: this one is alone.

    Raises:
        TypeError: `group` is no process group that has this rank.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "StepGuard: group: expected a process group that this rank is in, or None, "
            f"got {group!r} ({type(group).__name__})"
        )
    if not (dist.is_available() and dist.is_initialized()):
        return None
    ranks = cast(dist.ProcessGroup, dist.group.WORLD if group is None else group)
    return ranks if has_others(ranks) else None


def agree(arguments: str, waits: bool, ranks: dist.ProcessGroup | None) -> bool:
    """Returns whether an optimizer of any rank waits for the flag: all report at the same time.

    Raises:
        ValueError: ranks have other arguments, or one is missing; on every rank.
    """
    if ranks is None:
        return waits
    texts = meet(
        "a StepGuard",
        f"{arguments}{WAITS if waits else ''}",
        ranks,
        expected="StepGuard: expected all {} ranks to make one of {}",
        absent="they have made none",
    )
    if texts is None:
        return waits
    given = [text.removesuffix(WAITS) for text in texts]
    if len(set(given)) > 1:
        raise_different(given, "StepGuard: expected the same arguments on all ranks")
    return True
