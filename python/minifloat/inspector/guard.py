"""Leaves a step out before gradients that are not finite are applied: StepGuard.

    before optimizer.step()    one read of the gradients: a flag each, and one of all, on the device
    ranks                      one all-reduce of that one flag, so that all of them decide alike
    optimizer.step()           fused AdamW and SGD of torch read the flag themselves: nothing waits.
                               Any other one waits for the flag, and gets no gradients if it is set
    mf.step(model)             reads the flag: neither amax histories nor balance biases change
    the next step              reads the flags of the one before, which are on the host by then

Names and ranks are looked up only for a step that was left out.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..checks import require_module, require_one_of
from ..distributed.handshake import has_others, meet, raise_different, raise_on_all
from ..nn.names import unwrapped
from ..nn.state.guarded_steps import guard_of, guards
from ..nn.state.model_state import drop_counts
from .guard_report import described, find, of_all_ranks
from .guarded_optimizers import (
    gradient_of,
    hooked_optimizers,
    make_momentum,
    parameters_of,
    reads_flag,
    zero_or_nan,
)

RAISE, SKIP = "raise", "skip"
WAITS = ", of an optimizer that waits"
Loss = Callable[[nn.Module, Any], Tensor]


class Sent(NamedTuple):
    """A step whose flags were sent to the host, and whom nobody was told of.

    Args:
        step: its number.
        parameters: those with a gradient.
        batches: its micro-batches.
    """

    step: int
    parameters: list[Tensor]
    batches: tuple[Any, ...]


class StepGuard:
    """Stops, or skips, a step with a gradient that is Inf or NaN, before it is applied.

    The guard acts in optimizer.step(), from now until `remove`, or the end of a `with` block. Of a
    step that is left out, parameters, the optimizer's state, amax histories and balance biases stay
    as they were. Random counters have moved on, and a scheduler counts the step.

    AdamW, Adam and SGD of torch with fused=True read the guard's flag on the device, and nothing
    waits: the step is reported in the next one, or by `remove`. With another optimizer each step
    waits for the flag once, and is reported at once.

    Args:
        model: what is trained, converted or not, or an nn.ModuleList of a rank's pipeline stages.
        optimizer: whose step() is guarded, or a list of those that step on one backward pass.
        on_nonfinite: "raise": FloatingPointError, with the same text on all ranks. "skip": a
            warning on the first rank, and training goes on.
        loss: (model, batch) -> a tensor of one element, for `check`; None: no batch is repeated.
        group: the ranks that train the model, which decide alike; None: all of them.

    Raises:
        TypeError: `model` is no module, or `optimizer` no optimizer. Where there are other ranks it
            is a ValueError.
        ValueError: `on_nonfinite` is another, the model has a guard already, or ranks differ in
            these arguments, or one is missing. Every rank raises it. By optimizer.step(): the
            optimizer evaluates its closure again, reads a main_grad, or waits while a CUDA graph is
            captured.

    Example:
        >>> layer = mf.Linear(64, 32, recipe="mxfp8")
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> guard = mf.inspector.StepGuard(layer, optimizer, on_nonfinite="raise")
        >>> layer(torch.full((2, 64), torch.inf)).sum().backward()
        >>> try:
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
            self._model = unwrapped(require_module("StepGuard", model))
            self._optimizers = [*dict.fromkeys(hooked_optimizers(optimizer))]  # hooked once each
            self._ranks = ranks_of(group)
            require_one_of("StepGuard: on_nonfinite", on_nonfinite, (RAISE, SKIP))
            if guard_of(self._model) is not None:
                raise ValueError(
                    "StepGuard: expected a model without a guard, got one that has one; call "
                    "remove() of that one, or pass it all optimizers in a list"
                )
        except (TypeError, ValueError) as error:
            raise_on_all(error, group)
        self._raises, self._loss = on_nonfinite == RAISE, loss
        self._waits_always = agree(
            f"on_nonfinite={on_nonfinite!r}, {'a' if loss else 'no'} loss",
            not all(map(reads_flag, self._optimizers)),
            self._ranks,
        )
        self.steps = 0  # steps until now; assign it where a run is resumed
        self.left_out: Tensor | None = None  # what mf.step reads
        self._device = next((p.device for p in self._parameters()), torch.device("cpu"))
        self._flags = torch.zeros(1, device=self._device)  # of all gradients, then one of each
        self._flag = self._flags[0]
        self._host, self._event = torch.zeros(1), None
        if self._device.type == "cuda":
            self._event = torch.cuda.Event()
        self._looked: list[Tensor] = []  # parameters whose gradients have flags
        self._gradients: dict[int, weakref.ref[Tensor]] = {}  # what was looked at, by its id
        self._batches: tuple[Any, ...] = ()
        self._sent: Sent | None = None
        self._stepped: set[int] | None = None  # optimizers since the gradients were read
        self._waits = self._is_left_out = False
        self._held: list[tuple[Tensor, Tensor]] = []  # parameters, and gradients out of their reach
        self._handles = []
        # Not traced in a compiled optimizer.step().
        before, after = torch.compiler.disable(self._before), torch.compiler.disable(self._after)
        for each in self._optimizers:
            self._handles.append(each.register_step_pre_hook(before))
            self._handles.append(each.register_step_post_hook(after))
        for module in self._model.modules():
            guards[module] = weakref.ref(self)

    def check(self, *batches: Any) -> None:
        """Reads the gradients now. Call it after the last backward, before they are clipped.

        Clipping makes all gradients NaN where their norm is, and none would be named. Without this
        call optimizer.step() reads the gradients.

        Args:
            batches: this step's micro-batches, which the guard keeps until its report. A step that
                is left out is repeated with them by find_nonfinite, which names module and operand.

        Raises:
            ValueError: there are batches, and no loss.
            FloatingPointError: as by optimizer.step().
        """
        if batches and self._loss is None:
            raise ValueError(
                "StepGuard: expected a loss to repeat a batch with, got None; pass loss= to the "
                "guard, or call check() without a batch"
            )
        self._begin(batches)

    def remove(self) -> None:
        """Ends the guard, after a report of the last step."""
        try:
            self.report()
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
        for optimizer in self._optimizers:
            self._after(optimizer)
        for handle in self._handles:
            handle.remove()
        for module in self._model.modules():
            if guards.get(module) == weakref.ref(self):  # else it was removed before
                del guards[module]

    # ---- an optimizer's step ---------------------------------------------------------------------

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Decides before optimizer.step(), or after its closure, which makes the gradients."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._decide(optimizer)
            return None
        is_called = False

        def closed() -> Any:
            nonlocal is_called
            if is_called:
                raise ValueError(
                    "StepGuard: expected an optimizer that calls its closure once a step, got "
                    f"{type(optimizer).__name__}, which has changed parameters between two calls"
                )
            result, is_called = closure(), True
            self._decide(optimizer)
            return result

        if len(args) > 1:
            return (args[0], closed, *args[2:]), kwargs
        return args, {**kwargs, "closure": closed}

    def _decide(self, optimizer: Optimizer) -> None:
        self._after(optimizer)  # of a step that raised
        if getattr(optimizer, "found_inf", None) is not None:  # a GradScaler decides itself
            self.left_out = self._sent = self._stepped = None
            return
        stepped = self._stepped
        if stepped is None or id(optimizer) in stepped or not self._has_looked_at(optimizer):
            self._begin(())
        self._stepped = {*(self._stepped or ()), id(optimizer)}
        if not self._waits:
            make_momentum(optimizer)
            optimizer.found_inf = self._flag  # type: ignore[attr-defined]
        elif self._is_left_out:
            self._held = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
            for parameter, _ in self._held:
                parameter.grad = None

    def _after(self, optimizer: Optimizer, *_: object) -> None:
        """Takes the flag away, and gives gradients back, which zero_grad() is to clear."""
        if getattr(optimizer, "found_inf", None) is self._flag:
            del optimizer.found_inf  # type: ignore[attr-defined]
        for parameter, gradient in self._held:
            if parameter.grad is None:  # else it is of a backward after a step that raised
                parameter.grad = gradient
        self._held = []

    # ---- the flags -------------------------------------------------------------------------------

    def _begin(self, batches: tuple[Any, ...]) -> None:
        """Reads the gradients of a new step, after the report of the last one."""
        self._stepped = None  # until nothing has raised: else the next step begins anew
        for optimizer in self._optimizers:  # of a step that raised, before the flag is another
            self._after(optimizer)
        is_captured = self._event is not None and torch.cuda.is_current_stream_capturing()
        if not is_captured:
            self.report()
        self._batches, self._is_left_out = batches, False
        self._waits = self._waits_always or not all(map(reads_flag, self._optimizers))
        if is_captured and self._waits:
            raise ValueError(
                "StepGuard: expected optimizers that a CUDA graph can leave a step out of, got "
                f"{', '.join(type(o).__name__ for o in self._optimizers)}, of which one is not "
                "fused; make it with fused=True"
            )
        self._look()
        self.left_out = self._flag
        if not is_captured:
            self.send()
            self._batches = ()  # else each replay sends them
        if self._waits:
            self._is_left_out = self.report()
            self.left_out = self._flag if self._is_left_out else None
        self._stepped = set()

    @torch.no_grad()
    def _look(self) -> None:
        """Writes the flags, by kernels alone."""
        self._looked = []
        lists: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for parameter in self._parameters():
            gradient = gradient_of(parameter)
            if gradient is not None:
                key = gradient.device, gradient.dtype
                parameters, gradients = lists.setdefault(key, ([], []))
                parameters.append(parameter)
                gradients.append(gradient)
        all_gradients = [p.grad for p in self._parameters() if p.grad is not None]
        self._gradients = {id(gradient): weakref.ref(gradient) for gradient in all_gradients}
        found = []
        for parameters, gradients in lists.values():
            self._looked += parameters
            found.append(zero_or_nan(gradients).to(self._device, torch.float32, non_blocking=True))
        if self._flags.numel() != 1 + len(self._looked):
            self._flags = torch.zeros(1 + len(self._looked), device=self._device)
            self._flag = self._flags[0]
        if found:
            each = self._flags[1:]
            torch.ne(torch.cat(found), 0, out=each)
            torch.amax(each, 0, out=self._flag)
        else:
            self._flags.zero_()
        if self._ranks is not None:
            dist.all_reduce(self._flags[:1], op=dist.ReduceOp.MAX, group=self._ranks)

    def _has_looked_at(self, optimizer: Optimizer) -> bool:
        """Tells whether no gradient of an optimizer is a new one; clipping writes in place."""
        gradients = [p.grad for p in parameters_of(optimizer) if p.grad is not None]
        known = [self._gradients.get(id(gradient)) for gradient in gradients]
        return all(ref is not None and ref() is g for ref, g in zip(known, gradients))

    def _parameters(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            yield from parameters_of(optimizer)

    # ---- the report ------------------------------------------------------------------------------

    def send(self) -> None:
        """Counts a step, and copies its flags to the host. Nothing waits for the copy."""
        self.steps += 1
        if self._host.numel() != self._flags.numel():
            is_cuda = self._event is not None
            self._host = torch.zeros(self._flags.numel(), pin_memory=is_cuda)
        self._host.copy_(self._flags, non_blocking=True)
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
        self._sent = Sent(self.steps, self._looked, self._batches)

    def report(self) -> bool:
        """Reports the last step that was sent, where it was left out and nobody was told.

        Returns:
            Whether it was left out.

        Raises:
            FloatingPointError: it was, under "raise".
        """
        sent, self._sent = self._sent, None
        if sent is None:
            return False
        if self._event is not None:
            self._event.synchronize()  # of the flags alone, which are a step old or waited for
        if self._host[0] == 0:
            return False
        is_wrong = self._host[1:].tolist()
        found = find(self._model, sent.parameters, is_wrong, sent.batches, self._loss, self._ranks)
        text = described(sent.step, of_all_ranks(sent.step, found, self._ranks))
        if self._raises:
            drop_counts(self._model)
            raise FloatingPointError(f"{text}. The step was left out")
        if self._ranks is None or dist.get_rank(self._ranks) == 0:
            warnings.warn(f"minifloat: {text}. The step is skipped", stacklevel=2)
        return True


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
