"""Returns the auxiliary loss that balances experts, for the caller to add to the task's loss.

    loss = task(model(x)) + mf.moe.balance_loss(model)
    (loss / micro_batches).backward()

Each training forward of a router with balance="loss" keeps its loss and the loss's graph.
balance_loss returns their sum and drops them. The balance loss is a part of the caller's loss,
so its gradient gets the same factors: those of micro-batches and of loss scaling.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from ..checks import require_module
from ..nn.names import clean_name
from .router import Router


def balance_loss(model: nn.Module) -> Tensor:
    """Takes the auxiliary losses of the training forwards since the last call, and adds them up.

    Add the result to the task's loss before backward, once for each forward of the model. After a
    forward whose loss is given up, call it once and ignore the result. Call it within a function
    that a checkpoint with use_reentrant=True runs, or that is a stage of a pipeline, and return the
    result beside the output.

    Args:
        model: an mf.MoE, or a module that may have some.

    Returns:
        A float32 scalar: over the layers with balance="loss" and their training forwards, the sum
        of balance_loss · E · Σ (share of slots) · (mean share of scores). 0 where there are none.

    Raises:
        TypeError: `model` is no module.
        ValueError: a forward ran without gradients, and the result is read with them.

    Source: Switch Transformer (arXiv 2101.03961, equation 4).

    Example:
        >>> moe = mf.MoE(64, 32, experts=4, top_k=2, balance="loss", balance_loss=0.01)
        >>> loss = moe(torch.ones(3, 64)).square().mean() + mf.moe.balance_loss(moe)
        >>> loss.backward()
    """
    modules = require_module("balance_loss", model).named_modules()
    routers = list(routers_with_losses(modules))
    for name, router in routers:
        require_graph(name, router)
    total = None
    for _, router in routers:
        loss, router.loss = router.loss, None
        total = loss if total is None or loss is None else total + loss.to(total.device)
    if total is None:
        parameter = next(model.parameters(), None)
        return torch.zeros((), device=None if parameter is None else parameter.device)
    return total


def routers_with_losses(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Router]]:
    """Yields the routers whose losses are kept, and the names of the layers that have them."""
    for name, module in modules:
        if isinstance(module, Router) and module.loss is not None:
            yield clean_name(name).removesuffix("router").rstrip(".") or "the mf.MoE", module


def require_graph(name: str, router: Router) -> None:
    """Raises ValueError where a loss that is read with gradients has none."""
    is_constant = router.loss is not None and not router.loss.requires_grad
    if is_constant and torch.is_grad_enabled() and router.weight.requires_grad:
        raise ValueError(
            f"balance_loss: {name}: expected a forward with gradients, got one without, such as "
            "that of checkpoint(use_reentrant=True): call mf.moe.balance_loss within the "
            "checkpointed function, and return its result beside the output"
        )


def unread_losses(modules: Iterable[tuple[str, nn.Module]]) -> str | None:
    """Returns mf.step's error where forwards of a step kept losses that nobody read; else None.

    modules: (name, module) of the model.
    """
    kept = [(name, router.loss) for name, router in routers_with_losses(modules)]
    unread = [name for name, loss in kept if loss is not None and loss.requires_grad]
    if not unread:
        return None
    return (
        'step: expected mf.moe.balance_loss(model) in the loss of each forward, got balance="loss" '
        f"and forwards whose balance loss nobody read in {', '.join(unread)}; where a forward is "
        "given up, call mf.moe.balance_loss(model) and ignore its result"
    )
