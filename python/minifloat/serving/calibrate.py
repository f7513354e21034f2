"""mf.calibrate records the largest input of each layer that servers cast by one scale of all x.

A linear layer's input is seen by a hook. The hidden layer of experts is not: it is made and cast
within one op. So the ops within an experts module's forward are watched: the products of codes,
which come in the order of the module's matrices and have the amax of their first operand, and
SwiGLU, or the module's own activation. There h is computed without the routing weights, by which
training multiplies h, and servers the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._native import ops
from ..checks import require_module
from ..distributed.handshake import raise_on_all
from ..inspector.layers import call_with, undisturbed
from ..moe.convert.projections import (
    FORMULA,
    Formula,
    ProjectionExperts,
    activate,
    biases_of,
    gate_of,
)
from ..nn.grouped_product import products_by_weight
from ..nn.linear import Linear
from ..nn.names import clean_name, join, unwrapped
from ..nn.registry import require_layers_of_torch
from ..nn.state.recipe_state import RecipeState
from ..private_torch import TorchDispatchMode
from ..spec import Spec
from .ranks import first_difference, of_all_ranks, wait_for_all
from .schemes import is_nvfp4_row

FORM = ("limit", "alpha", "interleaved", "pairs", "groups")  # arguments of the op swiglu


def calibrate(model: nn.Module, batches: Iterable[Any]) -> dict[str, Tensor]:
    """Runs batches through a converted model, and records the amax of inputs for mf.export.

    Only layers whose forward casts x by one amax of the whole tensor have one, `nvfp4` and
    `e4m3/tensor`, and those of `nvfp4/row`, whose x servers may cast so. The model is evaluated
    without gradients, and keeps its state.

    All ranks of torch.distributed call it together, each with as many batches of its own, and
    receive the largest amaxes of all. What one rank raises, every rank raises, once all have run
    their batches. Where a forward has collectives, as under FSDP2, others may wait in one for the
    rank that has failed, until the group's timeout is over.

    Args:
        model: one that mf.quantize_ converted.
        batches: arguments of the model: a mapping of keywords, a tuple or a list of positions, or
            one value.

    Returns:
        The name of each layer, or of each 3D parameter of experts -> float32 ().

    Raises:
        TypeError: `model` is no module, or `batches` is no iterable of them. Where there are other
            ranks it is a ValueError, as is what a forward raises.
        ValueError: there is no such layer or no batch, a layer was not called, an input has Inf or
            NaN, or ranks have other layers.

    Source: docs/serve.md.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8))
        >>> report = mf.quantize_(model, "*: nvfp4; 1: bf16")
        >>> mf.calibrate(model, [torch.ones(2, 64), torch.full((2, 64), -3.0)])
        {'0': tensor(3.)}
    """
    try:
        layers, found = run(model, batches)
    except Exception as error:
        raise_on_all(error, None)
    wait_for_all("calibrate")
    return joined(layers, found)


def run(
    model: nn.Module, batches: Iterable[Any]
) -> tuple[dict[str, RecipeState], dict[str, Tensor]]:
    """Runs this rank's batches; returns the layers, and the amaxes of those that were called."""
    inner = unwrapped(require_module("calibrate", model))
    require_layers_of_torch("calibrate", inner)
    if isinstance(batches, (Mapping, str)) or not isinstance(batches, Iterable):
        raise TypeError(f"calibrate: expected an iterable of batches, got {type(batches).__name__}")
    layers = dict(layers_of(inner))
    if not layers:
        raise ValueError(
            "calibrate: expected layers whose x has one amax, such as those of nvfp4 and "
            "fp8_tensorwise, got none; mf.export needs none of this model"
        )
    found: dict[str, Tensor] = {}
    with ExitStack() as undo, torch.no_grad():
        undo.enter_context(undisturbed(inner))
        experts = watch(inner, layers, found, undo)
        for batch in batches:
            call_with(model, batch)
            for products in experts:
                products.require_known()
    return layers, found


def layers_of(model: nn.Module) -> Iterable[tuple[str, RecipeState]]:
    """Yields (name, state) of the layers whose x a server may cast by one amax."""
    for raw_fqn, module in model.named_modules():
        fqn = clean_name(raw_fqn)
        states: dict[str, RecipeState] = {fqn: module} if isinstance(module, Linear) else {}
        states |= {join(fqn, name): p for name, p in products_by_weight(module).items()}
        for name, state in states.items():
            x = Spec.parse(state.recipe.fprop.a)
            if (x.amax_of == "tensor" and not x.transform) or is_nvfp4_row(x):
                yield name, state


def watch(
    model: nn.Module, layers: Mapping[str, RecipeState], found: dict[str, Tensor], undo: ExitStack
) -> list[Products]:
    """Records the amaxes of inputs in `found` until `undo` is closed; returns those of experts."""
    experts = []
    for raw_fqn, module in model.named_modules():
        fqn = clean_name(raw_fqn)
        if fqn in layers:
            see = partial(see_input, found, fqn)
            undo.callback(module.register_forward_hook(see, with_kwargs=True).remove)
        names = [join(fqn, name) for name in products_by_weight(module)]
        if any(name in layers for name in names):
            products = Products(module, names, found)
            enter = module.register_forward_pre_hook(lambda *_, of=products: of.begin())
            leave = module.register_forward_hook(lambda *_, of=products: of.end(), always_call=True)
            undo.callback(enter.remove)
            undo.callback(leave.remove)
            experts.append(products)
    return experts


def see_input(
    found: dict[str, Tensor],
    name: str,
    module: nn.Module,
    args: Any,
    kwargs: dict[str, Any],
    output: object,
) -> None:
    """Records a linear layer's input, which its forward has checked and read."""
    x = args[0] if args else kwargs["input"]
    note(found, name, amax_of(getattr(x, "_local_tensor", x)))


def note(found: dict[str, Tensor], name: str, amax: Tensor) -> None:
    amax = amax.float()
    found[name] = torch.maximum(found[name], amax) if name in found else amax


class Products(TorchDispatchMode):
    """Records the amaxes of the first operands of a module's products of codes, in their order."""

    def __init__(self, module: nn.Module, names: list[str], found: dict[str, Tensor]) -> None:
        super().__init__()
        self.module, self.names, self.found = module, names, found
        self.amaxes: list[Tensor] = []
        self.hidden: list[Tensor] = []

    def begin(self) -> None:
        self.amaxes, self.hidden = [], []
        self.__enter__()

    def end(self) -> None:
        self.__exit__(None, None, None)
        if self.is_known():
            for name, amax in zip(self.names, [*self.amaxes[:-1], *self.hidden]):
                note(self.found, name, amax)

    def is_known(self) -> bool:
        """Tells whether the last forward was that of experts, with one hidden layer."""
        return len(self.amaxes) == len(self.names) and len(self.hidden) == 1

    def require_known(self) -> None:
        if not self.is_known():
            raise ValueError(
                f"calibrate: {', '.join(self.names)}: expected {len(self.names)} products and one "
                f"activation in a forward, got {len(self.amaxes)} and {len(self.hidden)}; pass "
                "weight_only=True to mf.export instead of amaxes"
            )

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is ops.scaled_mm.default and args[2].numel():
            self.amaxes.append(args[2].amax())
            if len(self.amaxes) == 1 and self.activates_itself:
                self.hidden.append(amax_of(activate(self.module, cast(Tensor, out))))
        if func in (ops.swiglu.default, ops.quantize_swiglu.default):
            product, other, weights = args[:3]
            form = {k: v for k, v in kwargs.items() if k in FORM}
            h = ops.swiglu.default(product, other, torch.ones_like(weights), **form)
            self.hidden.append(amax_of(h))
        return out

    @property
    def activates_itself(self) -> bool:
        """Whether a module of transformers computes h of the first product, which has no bias."""
        module = self.module
        if not isinstance(module, ProjectionExperts):
            return False
        form: Formula = module.__dict__[FORMULA]
        return gate_of(module, form) is None and biases_of(module, form) == (None, None)


def amax_of(values: Tensor) -> Tensor:
    """Returns the largest magnitude, 0 of no values."""
    return values.detach().abs().amax() if values.numel() else values.new_zeros(())


def joined(layers: Mapping[str, RecipeState], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the largest amax of all ranks of each layer."""
    own = {name: float(amax) for name, amax in found.items()}
    described = [f"{name} of {state.recipe.fprop.a}" for name, state in layers.items()]
    lists, every = zip(*of_all_ranks((described, own)))
    if difference := first_difference(lists):
        raise ValueError(f"calibrate: expected the same layers on every rank, got {difference}")
    amaxes = {}
    for name in layers:
        values = [amaxes_of_rank[name] for amaxes_of_rank in every if name in amaxes_of_rank]
        if not values:
            raise ValueError(
                f"calibrate: expected batches that reach every layer, got none that {name} "
                "computed; pass batches that the model runs on"
            )
        amax = torch.tensor(values).amax()
        if not torch.isfinite(amax):
            raise ValueError(f"calibrate: {name}: expected finite inputs, got an amax of {amax}")
        amaxes[name] = amax
    return amaxes
