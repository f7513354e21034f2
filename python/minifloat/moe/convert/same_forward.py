"""Whether experts of another library compute what this library would compute in their place.

    ProjectionExperts   the whole forward is replaced
    CountedExperts      the whole forward is replaced
    GroupedMmExperts    the method _grouped_mm is replaced; the module's own forward calls it
    NamedExperts        torch's products alone are replaced, within the module's own forward

The first three are compared on a small seeded input (nn/convert/same_result.py), by a replica of
small widths. Where the code needs its own widths, it is compared with those.

Each comparison returns None where results are the same, else a clause about the module's forward.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...nn.convert.same_result import difference, isolated, replica, seeded

INTERFACE = "transformers.integrations.moe"
OWN = ("transformers", "minifloat")  # implementations of these packages stand for the eager forward

TOKENS, SLOTS = 16, 2
DIM, HIDDEN = 40, 24  # of small replicas; D >= I, so that each hidden element reaches the output
MOST_ELEMENTS = 2**27  # of a replica's matrices at their own widths: 512 MB of float32

# ---- whole forwards ------------------------------------------------------------------------------


@isolated()
def compare_forward(
    module: nn.Module,
    down: str,
    row_major: bool,
    ours: Callable[..., Tensor],
    calls: Callable[[int, int], Iterator[tuple[Tensor, ...]]],
) -> str | None:
    """Compares a module's forward on replicas of small widths, then of the module's own.

    Args:
        down: the name of the matrices (E, D, I), or (E, I, D) where they are row-major.
        ours: (replica, *arguments) -> result.
        calls: (D, E) -> arguments of calls, of which one has to fit and to give the same.
    """

    def compare(model: nn.Module) -> str | None:
        forward, found = own_forward(model), []
        experts, *sizes = model.get_parameter(down).shape
        for arguments in calls(sizes[1 if row_major else 0], experts):
            if not takes(forward, model, *arguments):
                continue
            call = partial(forward, model, *arguments)
            found.append(difference(call, partial(ours, model, *arguments)))
            if found[-1] is None:
                return None
        ran = [text for text in found if text is not None and not text.startswith("cannot")]
        signature = inspect.signature(partial(forward, model))
        return (ran or found or [f"takes {signature}, which no known call fits"])[0]

    weight = module.get_parameter(down)
    _, dim, hidden = (weight.mT if row_major else weight).shape
    # Small sizes of D, I and 2I. An E that equals one of these is changed with it.
    small = HIDDEN if dim == hidden else 2 * HIDDEN if dim == 2 * hidden else DIM
    found = None
    for sizes in ({dim: small, hidden: HIDDEN, 2 * hidden: 2 * HIDDEN}, {}):
        if not sizes and 3 * weight.numel() > MOST_ELEMENTS:
            break
        model = replica(module, sizes)
        model.use_grouped_mm = False  # of torchtitan: products in float32, not in bf16
        model._parameters[down] = one_to_one(tuple(model.get_parameter(down).shape), row_major)
        texts = [compare(model.train(mode)) for mode in (True, False)]
        if texts == [None, None]:
            return None
        found = texts[0] or texts[1]
    return found


def one_to_one(shape: tuple[int, ...], row_major: bool) -> nn.Parameter:
    """Returns matrices (E, D, I) whose rows have one element that is not zero, so sums are exact.

    Each hidden element reaches the output where D is at least I.
    """
    experts, dim, hidden = (shape[0], *shape[:0:-1]) if row_major else shape
    rows = torch.arange(dim, device="cpu")
    columns = (rows * 7 + 5 * torch.arange(experts, device="cpu")[:, None]) % hidden
    matrices = torch.zeros(experts, dim, hidden, dtype=torch.float32, device="cpu")
    matrices[torch.arange(experts, device="cpu")[:, None], rows, columns] = 1.0 - rows % 2 * 2
    return nn.Parameter(matrices.mT.contiguous() if row_major else matrices, requires_grad=False)


def own_forward(module: nn.Module) -> Callable[..., object]:
    """Returns the forward of the module's class: transformers' eager one where that has several."""
    forward: Any = type(module).forward
    if getattr(forward, "__globals__", {}).get("__name__") != INTERFACE:
        return forward
    functions = importlib.import_module(INTERFACE).ALL_EXPERTS_FUNCTIONS
    chosen = functions.get(getattr(module.config, "_experts_implementation", None))
    is_own = chosen is None or chosen.__module__.partition(".")[0] in OWN
    return forward.__wrapped__ if is_own else forward


def takes(forward: Callable[..., object], *arguments: object) -> bool:
    """Tells whether a function takes these arguments."""
    try:
        inspect.signature(forward).bind(*arguments)
    except TypeError:
        return False
    return True


def tokens(count: int, dim: int) -> Tensor:
    """Returns tokens (T, D) of four magnitudes, so that some pass the bounds of clamped gates."""
    return seeded((count, dim), 1) * 4.0 ** (torch.arange(count, device="cpu") % 4 - 1)[:, None]


def counted_calls(dim: int, experts: int) -> Iterator[tuple[Tensor, ...]]:
    """Yields arguments of torchtitan's experts: rows, some of no expert, and each expert's count"""
    counts = torch.arange(experts, device="cpu") % 4
    yield tokens(int(counts.sum()) + 3, dim), counts


def projection_calls(dim: int, experts: int) -> Iterator[tuple[Tensor, ...]]:
    """Yields arguments of Hugging Face's experts: routing in either order, or rows in even groups.

    Routing weights are (T, k), or (T, E) with zeros. Tokens are (T, D) or (1, T, D).
    """
    numbers, slots = torch.arange(TOKENS, device="cpu"), min(SLOTS, experts)
    first = numbers * 3 % experts
    second = (first + 1 + numbers % max(experts - 1, 1)) % experts
    indices = torch.stack([first, second], 1)[:, :slots]
    weights = (seeded((TOKENS, slots), 2).abs() + 1) / 4
    dense = torch.zeros(TOKENS, experts, dtype=torch.float32, device="cpu")
    dense.scatter_(1, indices, weights)
    x = tokens(TOKENS, dim)
    for routing in ((indices, weights), (weights, indices), (indices, dense), (dense, indices)):
        for rows in (x, x[None]):
            yield rows, *routing
    yield (tokens(4 * experts, dim),)


# ---- products alone ------------------------------------------------------------------------------


@isolated()
def compare_grouped_mm(module: nn.Module, ours: Callable[..., Tensor]) -> str | None:
    """Compares torchtitan's method _grouped_mm: products of bf16 values that are exact in bf16.

    Args:
        ours: (A, B_t, offs) -> products.
    """
    model: Any = object.__new__(type(module))
    model.__dict__.update(module.__dict__)
    a = seeded((16, 16), 1).bfloat16()
    b = seeded((2, 32, 16), 2).bfloat16().transpose(-2, -1)
    offs = torch.tensor([8, 16], dtype=torch.int32, device="cpu")
    theirs = partial(model._grouped_mm, A=a, B_t=b, offs=offs)
    text = difference(theirs, partial(ours, a, b, offs))
    return None if text is None else f"calls _grouped_mm, which {text}"
