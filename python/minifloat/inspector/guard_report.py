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

from ..distributed.handshake import meet, require_same
from ..nn.names import join
from ..nn.registry import named_modules
from .nonfinite import find_nonfinite, first_of

CALLED = "StepGuard: expected all {} ranks to report {}"
ABSENT = "they have not come to optimizer.step()"

# Which operand the gradients alone point to.
OF_ALL = (
    "no gradient is finite, so a value of the forward pass, the loss or its gradient is not, or "
    "clipping has multiplied all gradients by a norm that is not; call check() before clipping"
)
OF_ONE = (
    "no other is wrong, so wgrad's product of g and x is not finite there, or g itself where no "
    "layer lies before"
)
OF_SOME = "none behind it is wrong, so g of dgrad and wgrad is not finite there or just behind"


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
        repeated: what repeating the batches found: (place, sentence), or (NOT_FOUND, an error);
            None: they were not repeated.
    """

    place: int
    name: str
    wrong: int
    gradients: int
    weight: str
    repeated: tuple[int, str] | None


NOT_FOUND = 2**31  # of a repetition that found nothing: after every place


def names_of(model: nn.Module) -> dict[int, str]:
    """Returns the names of a model's parameters by their id."""
    return {
        id(parameter): join(fqn, name)
        for fqn, module in named_modules(model)
        for name, parameter in module.named_parameters(recurse=False)
    }


def find(
    model: nn.Module,
    parameters: Sequence[Tensor],
    is_wrong: Sequence[bool],
    batches: Sequence[Any],
    loss: Callable[[nn.Module, Any], Tensor] | None,
    ranks: dist.ProcessGroup | None,
) -> Found:
    """Looks for the origin on this rank.

    Args:
        model: with the parameters of that step.
        parameters: those with a gradient, of the optimizers.
        is_wrong: whether the gradient of each is not finite.
        batches: the micro-batches of that step, which are repeated; none: nothing is.
        loss: (model, batch) -> a tensor of one element.
        ranks: those that repeat as many batches; None: this one is alone.
    """
    known = names_of(model)
    places = {name: place for place, name in enumerate(known.values())}
    named = []
    for i, parameter in enumerate(parameters):
        own = f"parameter {i} of the optimizer {tuple(parameter.shape)}"
        named.append((known.get(id(parameter), own), parameter))
    wrong = [
        (places.get(name, i), name)
        for i, ((name, _), is_one) in enumerate(zip(named, is_wrong))
        if is_one
    ]
    place, name = max(wrong, default=(-1, ""))
    bad = first_of([*named])
    repeated = None
    if loss is not None:
        try:
            if ranks is not None:
                require_as_many(batches, ranks)
            repeated = repeat(model, batches, loss) if batches else None
        except Exception as error:  # other ranks wait for the report
            repeated = (NOT_FOUND, f"{type(error).__name__}: {error}")
    weight = "" if bad is None else bad.where
    return Found(place, name, len(wrong), len(parameters), weight, repeated)


def require_as_many(batches: Sequence[Any], ranks: dist.ProcessGroup) -> None:
    """Raises ValueError on all ranks where one has more batches: others would wait for it."""
    require_same(
        "a StepGuard's batches:",
        f"{len(batches)}",
        ranks,
        expected=CALLED,
        absent=ABSENT,
        differs="expected as many batches on all ranks",
    )


def repeat(
    model: nn.Module, batches: Sequence[Any], loss: Callable[[nn.Module, Any], Tensor]
) -> tuple[int, str]:
    """Repeats every micro-batch, as the other ranks do, and returns the first value it finds."""
    found = []
    for i, batch in enumerate(batches):
        first = find_nonfinite(model, batch, loss)
        if first is not None:
            of = f" of micro-batch {i}" if len(batches) > 1 else ""
            found.append((first.place, f"{first}{of}"))
    return min(found, default=(NOT_FOUND, ""))


def of_all_ranks(step: int, found: Found, ranks: dist.ProcessGroup | None) -> list[Found]:
    """Returns what each rank has found, on every one.

    Raises:
        ValueError: a rank is missing; on every other.
    """
    if ranks is None:
        return [found]
    texts = meet(
        "a StepGuard's report of",
        f"step {step}\n{json.dumps(found)}",
        ranks,
        expected=CALLED,
        absent=ABSENT,
    )
    if texts is None:
        return [found] * dist.get_world_size(ranks)
    return [Found(*json.loads(text.partition("\n")[2])) for text in texts]


def described(step: int, of_ranks: Sequence[Found]) -> str:
    """Returns the sentences on a step, from what all ranks have found."""
    last = max(of_ranks, key=lambda found: found.place)
    first = f"that of {last.name}{_on(of_ranks, lambda f: f.name == last.name)}"
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
    if repeated:
        place, sentence = min((*each,) for each in repeated)
        if place != NOT_FOUND:
            on = _on(of_ranks, lambda f: f.repeated is not None and f.repeated[1] == sentence)
            return f"repeated, the batch has the first such value in {sentence}{on}"
    weights = [f.weight for f in of_ranks if f.weight]
    if weights:
        return f"W is not finite: {weights[0]}{_on(of_ranks, lambda f: f.weight == weights[0])}"
    text = OF_ALL if last.wrong == last.gradients else OF_SOME
    if last.wrong == 1:
        text = OF_ONE
    errors = [sentence for _, sentence in repeated if sentence]
    if errors:
        text += f". Repeating the batch raised {errors[0]}"
    elif repeated:
        text += ". Repeated, the batch has finite values alone: random casts and dropout draw anew"
    return text


def _on(of_ranks: Sequence[Found], holds: Callable[[Found], bool]) -> str:
    """Returns the words for the ranks on which something holds; "" where there is one rank."""
    if len(of_ranks) == 1:
        return ""
    return f" on ranks {[rank for rank, found in enumerate(of_ranks) if holds(found)]}"
