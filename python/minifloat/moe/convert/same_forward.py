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
in training and in evaluation. The copies have small matrices, so all calls take about a second.
Code that fails or differs with these sizes runs again with the module's own sizes, where a matrix
has at most MOST_ELEMENTS / 3 elements.

Each comparison returns None where results are the same. Otherwise it returns how they differ, as
the end of a sentence that begins with "whose forward".
"""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.convert.foreign_code import code_of, parts_of, reason_unsafe
from ...nn.convert.reads import hook_of
from ...nn.convert.replica import CannotCopyError, replica, seeded
from ...nn.convert.same_result import Trial, isolated

INTERFACE = "transformers.integrations.moe"
OWN = ("transformers", "minifloat")  # implementations of these packages stand for the eager forward

SLOTS = 2
DIM, HIDDEN, EXPERTS = 40, 24, 4  # of small replicas; D >= I: each hidden element reaches y
MOST_ELEMENTS = 2**20  # of a replica's matrices at their own widths, so that it takes seconds
COUNTS = (63, 65, 127, 129, 1023, 1025)  # of tokens
MAGNITUDES = (2.0**-10, 2.0**-5, 1.0, 2.0**5, 2.0**10, 0.0)  # of x; 0: one after the other, by row

# (count of tokens, magnitude, D, E) -> arguments of a call
Arguments = Callable[[int, float, int, int], tuple[Tensor, ...]]

# ---- whole forwards ------------------------------------------------------------------------------


@isolated()
def compare_forward(
    module: nn.Module,
    down: str,
    row_major: bool,
    expect: Callable[..., Tensor],
    kinds: Sequence[Arguments],
) -> str | None:
    """Compares a module's forward on replicas of small widths, then of the module's own.

    Args:
        down: the name of the matrices (E, D, I), or (E, I, D) where they are row-major.
        expect: (replica, *arguments) -> what this library's ops return, computed in float64.
        kinds: ways to call the forward. One has to fit its signature and give the same result.
    """
    why = reason_not_to_run(module)
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
            model.use_grouped_mm = False  # of torchtitan: products in float32, not in bf16
            shape = tuple(model.get_parameter(down).shape)
            model._parameters[down] = one_to_one(shape, row_major)
        why = compare_replicas(pair, down, row_major, expect, kinds)
        if why is None:
            return None
        found = found or why
    return found


def compare_replicas(
    pair: Sequence[nn.Module],
    down: str,
    row_major: bool,
    expect: Callable[..., Tensor],
    kinds: Sequence[Arguments],
) -> str | None:
    """Compares the forward of one replica with what is expected of the other."""
    theirs, ours = pair
    experts, *sizes = theirs.get_parameter(down).shape
    dim, run, found = sizes[1 if row_major else 0], own_forward(theirs), []

    def trial(arguments: tuple[Tensor, ...], gradients: bool = True) -> str | None:
        call = Trial(theirs, ours, run, expect, arguments, needs_gradients=gradients)
        return call.difference()

    for kind in kinds:
        arguments = kind(16, 0.0, dim, experts)
        if not takes(run, theirs, *arguments):
            continue
        found.append(trial(arguments))
        if found[-1] is None:
            break
    else:
        ran = [text for text in found if text is not None and not text.startswith("cannot")]
        signature = inspect.signature(partial(run, theirs))
        return (ran or found or [f"takes {signature}, which no known call fits"])[0]
    why = trial(arguments, gradients=False) or compare_strangers(trial, arguments, experts)
    if why is not None:
        return why
    in_training = [(True, *size) for size in itertools.product(COUNTS, MAGNITUDES)]
    sizes_in_evaluation = [(count, 0.0) for count in COUNTS] + [(COUNTS[1], m) for m in MAGNITUDES]
    for mode, count, magnitude in [(False, *size) for size in sizes_in_evaluation] + in_training:
        for model in pair:
            model.train(mode)
        why = trial(kind(count, magnitude, dim, experts))
        if why is not None:
            return f"{why} ({count} tokens of magnitude {magnitude or 'various'})"
    return None


def compare_strangers(
    trial: Callable[..., str | None], arguments: tuple[Tensor, ...], experts: int
) -> str | None:
    """Compares calls in which some tokens are routed to an expert that does not exist.

    The number of such an expert is E or more. Some libraries have meanings for these numbers: such
    an expert returns its token, for example. Code that raises an error for them is not compared.
    """
    for i, indices in enumerate(arguments):
        is_index = not indices.is_floating_point() and indices.dim() == 2
        is_dense = any(a.shape[-1] == experts != indices.shape[-1] for a in arguments[1:])
        for number in (experts, experts + 1) if is_index and not is_dense else ():
            changed = indices.clone()
            changed[::5, 0] = number
            why = trial((*arguments[:i], changed, *arguments[i + 1 :]), gradients=False)
            if why is not None and not why.startswith("cannot"):
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


def own_forward(module: nn.Module) -> Callable[..., object]:
    """Returns the forward of the module's class.

    transformers has several implementations of one forward, from which a model chooses. All of its
    own compute the same, so the eager one is returned. Where the model has chosen one of another
    package, that one is returned.
    """
    forward: Any = class_of(module).forward
    if getattr(forward, "__globals__", {}).get("__name__") != INTERFACE:
        return forward
    chosen = foreign_implementation(getattr(module.config, "_experts_implementation", None))
    return forward.__wrapped__ if chosen is None else chosen


def class_of(module: nn.Module) -> type[nn.Module]:
    """Returns a module's class, before a conversion of the module."""
    return getattr(type(module), "original", type(module))


def foreign_implementation(name: object) -> Callable[..., object] | None:
    """Returns an implementation of experts by its name; None for transformers' and minifloat's."""
    chosen = importlib.import_module(INTERFACE).ALL_EXPERTS_FUNCTIONS.get(name)
    is_own = chosen is None or chosen.__module__.partition(".")[0] in OWN
    return None if is_own else chosen


def code_starts(module: nn.Module) -> tuple[Callable[..., object], ...]:
    """Returns the functions of a class that its conversion replaces or calls."""
    gate = getattr(class_of(module), "_apply_gate", None)
    return (own_forward(module), *([gate] if callable(gate) else []))


def takes(forward: Callable[..., object], *arguments: object) -> bool:
    """Tells whether a function takes these arguments."""
    try:
        inspect.signature(forward).bind(*arguments)
    except TypeError:
        return False
    return True


def tokens(count: int, dim: int, magnitude: float) -> Tensor:
    """Returns tokens (T, D) of one magnitude; for 0, of six magnitudes in turn.

    The large ones reach the limits of activations that clamp.
    """
    x = seeded((count, dim), 1)
    if magnitude:
        return x * magnitude
    scales = torch.tensor([2.0**-10, 0.25, 1.0, 4.0, 16.0, 2.0**10], dtype=torch.float32)
    return x * scales[torch.arange(count) % len(scales)][:, None]


def counted_call(count: int, magnitude: float, dim: int, experts: int) -> tuple[Tensor, ...]:
    """Returns arguments of torchtitan's experts: rows, and how many of them each expert has.

    The last three rows belong to no expert. The second expert has none.
    """
    counts = torch.full((experts,), count // experts)
    counts[1:2] = 0
    counts[0] += count - int(counts.sum())
    return tokens(count + 3, dim, magnitude), counts


def projection_kinds() -> Iterator[Arguments]:
    """Yields the ways to call Hugging Face's experts.

    Tokens are (T, D) or (1, T, D). The experts of each token and their weights follow, in either
    order; weights are (T, k), or (T, E) with zeros. The last way has tokens alone, of which each
    expert has equally many, one expert after the other.
    """

    def call(
        count: int,
        magnitude: float,
        dim: int,
        experts: int,
        *,
        swap: bool,
        dense: bool,
        batch: bool,
    ) -> tuple[Tensor, ...]:
        numbers, slots = torch.arange(count), min(SLOTS, experts)
        first = numbers * 3 % experts
        second = (first + 1 + numbers % max(experts - 1, 1)) % experts
        indices = torch.stack([first, second], 1)[:, :slots]
        weights = (seeded((count, slots), 2).abs() + 1) / 4
        if dense:
            zeros = torch.zeros(count, experts, dtype=torch.float32)
            weights = zeros.scatter_(1, indices, weights)
        x = tokens(count, dim, magnitude)
        routing = (weights, indices) if swap else (indices, weights)
        return (x[None] if batch else x, *routing)

    for dense, swap, batch in itertools.product((False, True), (False, True), (False, True)):
        yield partial(call, swap=swap, dense=dense, batch=batch)
    yield lambda count, scale, dim, experts: (tokens(-(-count // experts) * experts, dim, scale),)


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

    def swiglu(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return nn.functional.silu(gate) * up

    w13 = torch.cat([w1, w3], -1)
    return expected_sum(x, (w13, w2), (None, None), swiglu, indices, ones)


# ---- products alone ------------------------------------------------------------------------------


@isolated()
def compare_grouped_mm(module: nn.Module) -> str | None:
    """Compares torchtitan's method _grouped_mm, which multiplies values of bf16.

    The float64 sums are exact. Both sides round each of them once, to bf16.
    """
    method = type(module)._grouped_mm  # type: ignore[attr-defined]
    code = code_of(type(module), method, attributes=module.__dict__)
    if (why := reason_unsafe(code)) is not None:
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
