"""Whether experts of another library compute what this library would compute in their place.

What a conversion replaces, for each form of experts:

    ProjectionExperts   the whole forward
    CountedExperts      the whole forward
    GroupedMmExperts    the method _grouped_mm, which the module's own forward calls
    NamedExperts        torch's matrix products, within the module's own forward

Experts of a class that known.py lists are converted without a comparison, and so are NamedExperts.
Any others are compared before they are converted. Their own code runs on a copy of the module, and
a formula in float64 on a second copy (nn/convert/same_result.py). Tests compare the formulas with
this library's ops. Compared are the results, all gradients, and the copy before and after.

Calls have token counts on both sides of 64, 128 and 1,024, and magnitudes of x from 2^-10 to 2^10,
in training and in evaluation; then other numbers of slots and shapes of arguments, bfloat16, and
autocast (calls.py). Code may refuse those by an error. The copies have small matrices, so all calls
take about a second. Code that fails or differs with these sizes runs again with the module's own
sizes, where a matrix has at most MOST_ELEMENTS / 3 elements.

Each comparison returns None where results are the same. Otherwise it returns how they differ, as
the end of a sentence that begins with "whose forward".
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.convert.foreign_code import code_of, parts_of, reason_unsafe
from ...nn.convert.reads import hook_of
from ...nn.convert.replica import CannotCopyError, replica, seeded
from ...nn.convert.same_result import Trial, isolated
from ..feed_forward import Gate
from .calls import Call
from .implementations import code_starts, own_forward
from .settings import unwatched_setting

DIM, HIDDEN, EXPERTS = 40, 24, 4  # of small replicas; D >= I: each hidden element reaches y
MOST_ELEMENTS = 2**20  # of a replica's matrices at their own widths, so that it takes seconds
COUNTS = (63, 65, 127, 129, 1023, 1025)  # of tokens
MAGNITUDES = (2.0**-10, 2.0**-5, 1.0, 2.0**5, 2.0**10, 0.0)  # of x; 0: one after the other, by row
ROUNDED_COUNTS = (31, 65)

# ---- whole forwards ------------------------------------------------------------------------------


@isolated()
def compare_forward(
    module: nn.Module,
    down: str,
    row_major: bool,
    expect: Callable[..., Tensor],
    calls: Sequence[Call],
    **settings: object,
) -> str | None:
    """Compares a module's forward on replicas of small widths, then of the module's own.

    Args:
        down: the name of the matrices (E, D, I), or (E, I, D) where they are row-major.
        expect: (replica, *arguments) -> what this library's ops return, computed in float64.
        calls: ways to call the forward. One has to fit its signature and give the same result.
        settings: attributes of the replicas.
    """
    why = reason_not_to_run(module) or unwatched_setting(module, *code_starts(module))
    if why is not None:
        return why
    weight = module.get_parameter(down)
    experts, dim, hidden = (weight.mT if row_major else weight).shape
    # From each size of the module to a small one. Equal sizes stay equal: where E equals a width,
    # both become the same.
    small = HIDDEN if dim == hidden else 2 * HIDDEN if dim == 2 * hidden else DIM
    first = {experts: min(experts, EXPERTS), dim: small, hidden: HIDDEN, 2 * hidden: 2 * HIDDEN}
    found = None
    for sizes in (first, {}):
        if not sizes and 3 * weight.numel() > MOST_ELEMENTS:
            break
        try:
            pair = [replica(module, sizes) for _ in range(2)]
        except CannotCopyError as error:
            return str(error)
        for model in pair:
            vars(model).update(settings)
            shape = tuple(model.get_parameter(down).shape)
            model._parameters[down] = one_to_one(shape, row_major)
        experts, *widths = shape
        size = widths[1 if row_major else 0], experts
        why = Comparison(pair, own_forward(module), expect, size).difference(calls)
        if why is None:
            return None
        found = found or why
    return found


@dataclass
class Comparison:
    """Two replicas: one whose forward runs, and one for what is expected of it.

    Args:
        pair: the replicas.
        run: (replica, *arguments) -> what the module's own code returns.
        expect: (replica, *arguments) -> what is expected of it.
        size: D, E.
    """

    pair: Sequence[nn.Module]
    run: Callable[..., object]
    expect: Callable[..., Tensor]
    size: tuple[int, int]

    def difference(self, calls: Sequence[Call]) -> str | None:
        """Returns how the forward differs, in any call that it takes; None: in none."""
        found = []
        for call in calls:
            arguments = call.arguments(15, 0.0, *self.size)
            if not takes(self.run, self.pair[0], *arguments):
                continue
            found.append(self.trial(arguments))
            if found[-1] is None:
                break
        else:
            ran = [text for text in found if text is not None and not is_refused(text)]
            signature = inspect.signature(partial(self.run, self.pair[0]))
            return (ran or found or [f"takes {signature}, which no known call fits"])[0]
        arguments = call.arguments(16, 0.0, *self.size)
        return (
            self.trial(arguments, needs_gradients=False)
            or compare_strangers(self.trial, arguments, self.size[1])
            or self.difference_of_sizes(call)
            or self.difference_of_calls(call)
            or self.difference_of_dtypes(call)
        )

    def trial(self, arguments: Sequence[Tensor], **options: Any) -> str | None:
        """Compares one call."""
        run = options.pop("run", self.run)
        theirs, ours = self.pair
        return Trial(theirs, ours, run, self.expect, arguments, **options).difference()

    def train(self, mode: bool) -> None:
        for model in self.pair:
            model.train(mode)

    def difference_of_sizes(self, call: Call) -> str | None:
        """Compares counts of tokens and magnitudes, in both modes."""
        in_training = [(True, *size) for size in itertools.product(COUNTS, MAGNITUDES)]
        in_evaluation = [(False, count, 0.0) for count in COUNTS]
        in_evaluation += [(False, COUNTS[1], magnitude) for magnitude in MAGNITUDES]
        for mode, count, magnitude in in_evaluation + in_training:
            self.train(mode)
            why = self.trial(call.arguments(count, magnitude, *self.size))
            if why is not None:
                return f"{why} ({count} tokens of magnitude {magnitude or 'various'})"
        return None

    def difference_of_calls(self, call: Call) -> str | None:
        """Compares other shapes of arguments, which the code may refuse."""
        for name, other in call.others(self.size[1]):
            arguments = other.arguments(16, 0.0, *self.size)
            if takes(self.run, self.pair[0], *arguments):
                why = self.trial(arguments)
                if why is not None and not is_refused(why):
                    return f"{why} (of {name})"
        return None

    def difference_of_dtypes(self, call: Call) -> str | None:
        """Compares calls under autocast, then in bfloat16, which the code may refuse.

        The result of several dtypes has one of them, which is not compared.
        """

        def run(model: nn.Module, x: Tensor, *args: Tensor) -> object:
            y = self.run(model, x, *args)
            return y.to(x.dtype) if isinstance(y, Tensor) else y

        def run_autocast(*arguments: Any) -> object:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                return run(*arguments)

        def difference(name: str, *dtypes: torch.dtype, **options: Any) -> str | None:
            for mode, count in itertools.product((False, True), ROUNDED_COUNTS):
                self.train(mode)
                x, *rest = call.arguments(count, 0.0, *self.size)
                routing = [t.to(dtypes[-1]) if t.is_floating_point() else t for t in rest]
                arguments = [x.to(dtypes[0]), *routing]
                why = self.trial(arguments, is_rounded=True, **options)
                if why is not None and not is_refused(why):
                    return f"{why} ({name})"
            return None

        why = difference("under autocast", torch.float32, run=run_autocast)
        for model in self.pair:
            for tensor in [*model.parameters(), *model.buffers()]:
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(torch.bfloat16)
        return (
            why
            or difference("in bfloat16", torch.bfloat16)
            or difference("in bfloat16, routed in float32", torch.bfloat16, torch.float32, run=run)
        )


def is_refused(why: str) -> bool:
    """Tells whether code raised an error, and so computed nothing else than expected."""
    return why.startswith("cannot run")


def compare_strangers(
    trial: Callable[..., str | None], arguments: Sequence[Tensor], experts: int
) -> str | None:
    """Compares calls in which some tokens are routed to an expert that does not exist.

    The number of such an expert is E or more. Some libraries have meanings for these numbers: such
    an expert returns its token, for example. Code that raises an error for them is not compared.
    """
    for i, indices in enumerate(arguments):
        is_index = not indices.is_floating_point() and indices.dim() > 1
        for number in (experts, experts + 1) if is_index else ():
            changed = indices.clone()
            changed.view(-1, indices.shape[-1])[::5, 0] = number
            why = trial([*arguments[:i], changed, *arguments[i + 1 :]], needs_gradients=False)
            if why is not None and not is_refused(why):
                return f"{why} (of a slot whose expert's number is {number} of {experts})"
    return None


def reason_not_to_run(module: nn.Module) -> str | None:
    """Returns why a copy of a module must not run, or why its run would not show what it reads."""
    for name, part in module.named_modules():
        if part is not module and (hook := hook_of(part)) is not None:
            return f"calls {name}, which has a {hook}"
        starts: tuple[Any, ...] = code_starts(part)
        if part is not module:
            starts = (type(part).forward, *parts_of(part.__dict__.get("forward")))
        code = code_of(type(part), *starts, attributes=part.__dict__)
        if (why := reason_unsafe(code)) is not None:
            return why
        tensors = {name for name, v in part.__dict__.items() if isinstance(v, Tensor)}
        read = (tensors | {name for name, b in part._buffers.items() if b is not None}) & code.names
        if part is module and read:
            return f"reads {', '.join(sorted(read))}, tensors that minifloat's does not read"
    return None


def one_to_one(shape: tuple[int, ...], row_major: bool) -> nn.Parameter:
    """Returns matrices (E, D, I) in which each row has one element, 1 or -1, beside zeros.

    So an output is one hidden element or its negative, and no sum is rounded. Each hidden element
    reaches an output where D is at least I.
    """
    experts, dim, hidden = (shape[0], *shape[:0:-1]) if row_major else shape
    rows = torch.arange(dim, device="cpu")
    columns = (rows * 7 + 5 * torch.arange(experts, device="cpu")[:, None]) % hidden
    matrices = torch.zeros(experts, dim, hidden, dtype=torch.float32, device="cpu")
    matrices[torch.arange(experts, device="cpu")[:, None], rows, columns] = 1 - 2 * (rows % 2).to(
        matrices.dtype
    )
    return nn.Parameter(matrices.mT.contiguous() if row_major else matrices, requires_grad=False)


def takes(forward: Callable[..., object], *arguments: object) -> bool:
    """Tells whether a function takes these arguments."""
    try:
        inspect.signature(forward).bind(*arguments)
    except TypeError:
        return False
    return True


# ---- formulas ------------------------------------------------------------------------------------


def expected_sum(
    x_TD: Tensor,
    matrices: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: Callable[[Tensor], Tensor],
    indices_Tk: Tensor,
    weights_Tk: Tensor,
) -> Tensor:
    """Returns each token's weighted sum of its experts, (T, D), in float64.

    Args:
        x_TD: tokens.
        matrices: (E, D, 2I) of gate and up, (E, I, D).
        biases: (E, 2I) and (E, D), or None each.
        activation: (rows, 2I) -> (rows, I), in float32.
        indices_Tk: experts; one of another number than 0 to E - 1 adds nothing.
        weights_Tk: routing weights.
    """
    x, (w13, w2) = x_TD.double(), (w.double() for w in matrices)
    b13, b2 = (None if b is None else b.double() for b in biases)
    slots = [torch.where(indices_Tk == e) for e in range(w13.shape[0])]
    rows = [x[token] @ w13[e] for e, (token, _) in enumerate(slots)]
    rows = [r if b13 is None else r + b13[e] for e, r in enumerate(rows)]
    # At once, as in a conversion: an activation that reads other rows has another result then.
    hidden = activation(torch.cat(rows).float()).double().split([len(r) for r in rows])
    y = torch.zeros_like(x)
    for e, (token, slot) in enumerate(slots):
        out = hidden[e] @ w2[e]
        out = out if b2 is None else out + b2[e]
        y = y.index_add(0, token, out * weights_Tk[token, slot, None].double())
    return y


def expected_counted(module: nn.Module, x: Tensor, counts: Tensor) -> Tensor:
    """Returns what CountedExperts return, in float64."""
    w1, w3, w2 = (module.get_parameter(name).mT for name in ("w1", "w3", "w2"))
    experts, of_all = w1.shape[0], torch.full(x.shape[:1], w1.shape[0])
    of_rows = torch.repeat_interleave(torch.arange(experts), counts)
    indices = torch.cat([of_rows, of_all[len(of_rows) :]])[:, None]
    ones = torch.ones_like(indices, dtype=torch.float32)
    w13, activation = torch.cat([w1, w3], -1), partial(swiglu, form=Gate())
    return expected_sum(x, (w13, w2), (None, None), activation, indices, ones)


def swiglu(gate_up: Tensor, form: Gate) -> Tensor:
    """Returns SwiGLU by torch's ops."""
    pair = (gate_up[..., ::2], gate_up[..., 1::2]) if form.interleaved else gate_up.chunk(2, -1)
    gate, up = pair
    if form.limit is None:
        return nn.functional.silu(gate) * up
    gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    return (up + 1) * gate * torch.sigmoid(gate * form.alpha)


# ---- products alone ------------------------------------------------------------------------------


@isolated()
def compare_grouped_mm(module: nn.Module) -> str | None:
    """Compares torchtitan's method _grouped_mm, which multiplies values of bf16.

    The float64 sums are exact. Both sides round each of them once, to bf16.
    """
    method = type(module)._grouped_mm  # type: ignore[attr-defined]
    code = code_of(type(module), method, attributes=module.__dict__)
    if (why := reason_unsafe(code) or unwatched_setting(module, method)) is not None:
        return f"calls _grouped_mm, which {why}"
    try:
        theirs, ours = (replica(module) for _ in range(2))
    except CannotCopyError as error:
        return str(error)

    def run(model: Any, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return method(model, A=a, B_t=b.transpose(-2, -1), offs=offs)

    def expect(model: object, a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        ends = [0, *offs.tolist()]
        parts = [a[i:j].double() @ b[e].mT.double() for e, (i, j) in enumerate(pairwise(ends))]
        return torch.cat(parts).bfloat16()

    for count, magnitude, mode in itertools.product(COUNTS, MAGNITUDES[:5], (True, False)):
        theirs.train(mode)
        a = (seeded((count, 16), 1) * magnitude).bfloat16()
        b = seeded((2, 32, 16), 2).bfloat16()
        offs = torch.tensor([count // 2, count], dtype=torch.int32)
        why = Trial(theirs, ours, run, expect, (a, b, offs)).difference()
        if why is not None:
            return f"calls _grouped_mm, which {why}"
    return None
