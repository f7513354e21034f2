"""What a guard says of a step whose gradients are not finite: where, and which operand.

Each rank says what it knows: its gradients, its parameters, and what a repetition of the batch has
found. Ranks exchange that on the host, so all of them have the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from ..distributed.handshake import meet
from ..nn.names import join
from ..nn.registry import named_modules
from .nonfinite import find_nonfinite, first_of

Loss = Callable[[nn.Module, Any], Tensor]

# Which operand the gradients alone point to.
OF_ALL = (
    "no gradient is finite, so a value of the forward pass, the loss or its gradient is not, or "
    "clipping has multiplied all gradients by a norm that is not; call check() before clipping"
)
OF_ONE = (
    "no other is wrong, so wgrad's product of g and x is not finite there, or g itself where no "
    "layer lies before"
)
OF_SOME = "none behind it is wrong: look at g of dgrad and wgrad there and just behind"
LAST = "the last in the model, where backward begins"
FINITE = ". Repeated, the batch has finite values alone: random casts and dropout draw anew"
NOT_FOUND = 2**31  # of a repetition that found nothing: after every place


class Written(NamedTuple):
    """What a check writes, and of what.

    Args:
        flags: float32, 1 where a value is Inf or NaN: of all gradients of all ranks, then of each.
        parameters: those with a gradient, of the optimizers.
        batches: the micro-batches of that step.
    """

    flags: Tensor
    parameters: list[Tensor]
    batches: tuple[Any, ...]


class Found(NamedTuple):
    """What one rank knows of a step.

    Args:
        place: of the last gradient in the model that is not finite, in the order in which
            parameters are registered: backward comes there first where modules are called in that
            order; -1: all of this rank's are finite.
        name: of its parameter.
        wrong: gradients of this rank that are not finite.
        gradients: of this rank.
        weight: the first parameter with a value that is not finite; "": none has.
        batches: micro-batches of this rank.
        fault: why this rank could not guard the step; None: it could.
        repeated: what repeating them found: (place, sentence), or (NOT_FOUND, an error or "");
            None: they were not repeated.
    """

    place: int
    name: str
    wrong: int
    gradients: int
    weight: str
    batches: int
    fault: str | None
    repeated: tuple[int, str] | None = None


def find(
    model: nn.Module,
    step: int,
    written: Written,
    fault: str | None,
    loss: Loss | None,
    ranks: dist.ProcessGroup | None,
) -> list[Found]:
    """Looks for the origin, and returns what each rank has found.

    Args:
        model: with the parameters of that step.
        step: its number.
        written: what its check has found, on the host. Its micro-batches are repeated.
        fault: why this rank could not guard the step; None: it could.
        loss: (model, batch) -> a tensor of one element.
        ranks: those that look together; None: this one is alone.

    Raises:
        ValueError: a rank has a fault, or is missing; on every rank.
    """
    flags, parameters, batches = written
    named = [
        (join(fqn, name), parameter)
        for fqn, module in named_modules(model)
        for name, parameter in module.named_parameters(recurse=False)
    ]
    known = {id(parameter): (place, name) for place, (name, parameter) in enumerate(named)}
    places = [
        known.get(id(p), (i, f"parameter {i} of the optimizer {tuple(p.shape)}"))
        for i, p in enumerate(parameters)
    ]
    wrong = [place for place, flag in zip(places, flags[1:].tolist()) if flag]
    masters = [(name, p) for (_, name), p in zip(places, parameters) if id(p) not in known]
    bad = first_of([*named, *masters])
    found = Found(
        *max(wrong, default=(-1, "")),
        len(wrong),
        len(parameters),
        "" if bad is None else bad.where,
        len(batches),
        fault,
    )
    of_ranks = [Found(*each) for each in exchanged(step, "gradients", found, ranks)]
    faults = dict.fromkeys(each.fault for each in of_ranks if each.fault is not None)
    if faults:
        listed = (f"{text}{_on([f.fault == text for f in of_ranks])}" for text in faults)
        raise ValueError("; ".join(listed))
    counts = [each.batches for each in of_ranks]
    if not any(counts):
        return of_ranks
    assert loss is not None  # else a rank with batches has a fault
    if len(set(counts)) > 1:  # ranks would wait for each other in a gather
        error = f"ValueError: expected as many batches on all ranks, got {counts}"
        return [each._replace(repeated=(NOT_FOUND, error)) for each in of_ranks]
    try:
        repeated = exchanged(step, "repeated batches", repeat(model, batches, loss), ranks)
    except ValueError as error:  # a rank's own waits for others: what gradients say is not lost
        repeated = [(NOT_FOUND, f"ValueError: {error}")] * len(of_ranks)
    return [each._replace(repeated=tuple(r)) for each, r in zip(of_ranks, repeated)]


def repeat(model: nn.Module, batches: Sequence[Any], loss: Loss) -> tuple[int, str]:
    """Repeats every micro-batch, as the other ranks do, and returns the first value it finds."""
    found = []
    for i, batch in enumerate(batches):
        try:
            first = find_nonfinite(model, batch, loss)
        except Exception as error:  # other ranks wait for the report
            return NOT_FOUND, f"{type(error).__name__}: {error}"
        if first is not None:
            of = f" of micro-batch {i}" if len(batches) > 1 else ""
            found.append((first.place, f"{first}{of}"))
    return min(found, default=(NOT_FOUND, ""))


def exchanged(step: int, what: str, found: Any, ranks: dist.ProcessGroup | None) -> list[Any]:
    """Returns what each rank has found, as JSON carries it.

    Raises:
        ValueError: a rank is missing; on every other.
    """
    text = json.dumps(found)
    if ranks is None:
        return [json.loads(text)]
    texts = meet(
        f"a StepGuard's report of step {step}, its {what}:",
        text,
        ranks,
        expected=f"StepGuard: expected all {{}} ranks to report step {step}",
        absent="they have not come to check()",
    )
    return [json.loads(each) for each in texts or [text] * dist.get_world_size(ranks)]


def described(step: int, of_ranks: Sequence[Found]) -> str:
    """Returns the sentences on a step, from what all ranks have found."""
    kinds = dict.fromkeys((f.wrong, f.gradients, f.name) for f in of_ranks if f.wrong)
    texts = []
    for kind in kinds:
        on = _on([(f.wrong, f.gradients, f.name) == kind for f in of_ranks])
        texts.append(
            f"{kind[0]} of {kind[1]} gradients are not finite, {LAST}, that of {kind[2]}{on}"
        )
    operand = _of_repeated(of_ranks) or _of_weights(of_ranks) or _of_gradients(of_ranks)
    errors = [f.repeated[1] for f in of_ranks if f.repeated is not None]
    if errors and _of_repeated(of_ranks) == "":
        error = next(filter(None, errors), "")
        operand += f". Repeating the batch raised {error}" if error else FINITE
    return f"step {step}: {'; '.join(texts)}{f'; {operand}' if operand else ''}"


def _of_repeated(of_ranks: Sequence[Found]) -> str:
    repeated = [f.repeated for f in of_ranks if f.repeated is not None]
    place, sentence = min(repeated, default=(NOT_FOUND, ""))
    if place == NOT_FOUND:
        return ""
    on = _on([each[1] == sentence for each in repeated])
    return f"repeated, the batch has the first such value in {sentence}{on}"


def _of_weights(of_ranks: Sequence[Found]) -> str:
    weight = next((f.weight for f in of_ranks if f.weight), "")
    return weight and f"W is not finite: {weight}{_on([f.weight == weight for f in of_ranks])}"


def _of_gradients(of_ranks: Sequence[Found]) -> str:
    """Returns which operand the gradients point to; "" where ranks have other wrong ones."""
    if all(f.wrong == f.gradients for f in of_ranks):
        return OF_ALL
    kinds = {(f.wrong, f.name) for f in of_ranks if f.wrong}
    if len(kinds) > 1:
        return ""
    return OF_ONE if max(f.wrong for f in of_ranks) == 1 else OF_SOME


def _on(holds: Sequence[object]) -> str:
    """Returns the words for the ranks on which something holds; "" where there is one rank."""
    return f" on ranks {[i for i, does in enumerate(holds) if does]}" if len(holds) > 1 else ""
