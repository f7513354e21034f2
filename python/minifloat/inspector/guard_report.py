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
NOT_FOUND = 2**31  # of a repetition that found nothing: after every place


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
        repeated: what repeating them found: (place, sentence), or (NOT_FOUND, an error or "");
            None: they were not repeated.
    """

    place: int
    name: str
    wrong: int
    gradients: int
    weight: str
    batches: int
    repeated: tuple[int, str] | None = None


def find(
    model: nn.Module,
    step: int,
    parameters: Sequence[Tensor],
    batches: Sequence[Any],
    is_wrong: Sequence[bool],
    loss: Loss | None,
    ranks: dist.ProcessGroup | None,
) -> list[Found]:
    """Looks for the origin, and returns what each rank has found.

    Args:
        model: with the parameters of that step.
        step: its number.
        parameters: those with a gradient, of the optimizers.
        batches: the micro-batches of that step, which are repeated; none: nothing is.
        is_wrong: whether the gradient of each parameter is not finite.
        loss: (model, batch) -> a tensor of one element.
        ranks: those that look together; None: this one is alone.

    Raises:
        ValueError: a rank has batches without a loss, or is missing; on every rank.
    """
    known = {
        id(parameter): join(fqn, name)
        for fqn, module in named_modules(model)
        for name, parameter in module.named_parameters(recurse=False)
    }
    places = {name: place for place, name in enumerate(known.values())}
    own = [f"parameter {i} of the optimizer {tuple(p.shape)}" for i, p in enumerate(parameters)]
    names = [known.get(id(p), name) for p, name in zip(parameters, own)]
    wrong = [(places.get(names[i], i), names[i]) for i, is_one in enumerate(is_wrong) if is_one]
    bad = first_of([*zip(names, parameters)])
    found = Found(
        *max(wrong, default=(-1, "")),
        len(wrong),
        len(parameters),
        "" if bad is None else bad.where,
        len(batches),
    )
    of_ranks = [Found(*each) for each in exchanged(step, "gradients", found, ranks)]
    counts = [each.batches for each in of_ranks]
    if loss is None and any(counts):
        raise ValueError(
            "StepGuard: expected a loss to repeat a batch with, got None; pass loss= to the "
            f"guard, or call check() without a batch{_on(counts)}"
        )
    if not any(counts):
        return of_ranks
    if loss is None or len(set(counts)) > 1:  # ranks would wait for each other in a gather
        error = f"ValueError: expected as many batches on all ranks, got {counts}"
        return [each._replace(repeated=(NOT_FOUND, error)) for each in of_ranks]
    repeated = exchanged(step, "repeated batches", repeat(model, batches, loss), ranks)
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
    last = max(of_ranks, key=lambda found: found.place)
    first = f"that of {last.name}{_on([f.name == last.name for f in of_ranks])}"
    if any(f.name and f.name != last.name for f in of_ranks):
        others = sorted({f.name for f in of_ranks if f.name} - {last.name})
        first += f" (elsewhere that of {', '.join(others)})"
    text = (
        f"step {step}: {last.wrong} of {last.gradients} gradients are not finite, the last in the "
        f"model, where backward begins, {first}"
    )
    return f"{text}; {_operand(of_ranks, last)}"


def _operand(of_ranks: Sequence[Found], last: Found) -> str:
    repeated = [f.repeated for f in of_ranks if f.repeated is not None]
    place, sentence = min(repeated, default=(NOT_FOUND, ""))
    if place != NOT_FOUND:
        on = _on([each[1] == sentence for each in repeated])
        return f"repeated, the batch has the first such value in {sentence}{on}"
    weight = next((f.weight for f in of_ranks if f.weight), "")
    if weight:
        return f"W is not finite: {weight}{_on([f.weight == weight for f in of_ranks])}"
    text = OF_ALL if last.wrong == last.gradients else OF_SOME
    if last.wrong == 1:
        text = OF_ONE
    errors = [sentence for _, sentence in repeated if sentence]
    if errors:
        text += f". Repeating the batch raised {errors[0]}"
    elif repeated:
        text += ". Repeated, the batch has finite values alone: random casts and dropout draw anew"
    return text


def _on(holds: Sequence[object]) -> str:
    """Returns the words for the ranks on which something holds; "" where there is one rank."""
    return f" on ranks {[i for i, does in enumerate(holds) if does]}" if len(holds) > 1 else ""
