"""mf.inspect: one forward and backward of a model, and each cast that a recipe does on the way.

All numbers of a layer are two native ops' (torch/ops/statistics.cpp), and stay on the device until
the last layer. Layers of one shape share a call. The layers' results are those of mf.linear on the
same x, W and g.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._native import ops
from ..checks import require_module
from ..moe.layer import Experts
from ..nn.convert.filters import heads_of
from ..nn.names import unwrapped
from ..nn.state.recipe_state import converted
from ..recipe import Recipe, operand_names
from ..spec import Spec
from .inspection import NOT_CALLED, Inspection, LayerRow, OperandRow
from .layers import (
    Layer,
    Product,
    default_loss,
    find_layers,
    products_of,
    reason_against_call,
    reshard,
    run,
)

RECIPES = ("fp8_rowwise", "mxfp8", "nvfp4")  # that are tried in a model without a recipe
# Operand -> its matrix, whether it is read columnwise, and its place in a recipe.
READS = {
    "x/fprop": ("x", False, "fprop", "a"),
    "w/fprop": ("weight", False, "fprop", "b"),
    "g/dgrad": ("g", False, "dgrad", "a"),
    "w/dgrad": ("weight", True, "dgrad", "b"),
    "g/wgrad": ("g", True, "wgrad", "a"),
    "x/wgrad": ("x", True, "wgrad", "b"),
}
RESULTS = 3  # y, dx and dW, of four sums each
SUMS = 4
# Elements of results that wait for others of their shape. A GPU takes longer to launch a small
# reduction than to compute it; on a CPU larger temporaries are slower.
MOST_ELEMENTS = {"cpu": 1 << 23, "cuda": 1 << 27}


def inspect(
    model: nn.Module,
    batch: Any,
    recipes: Iterable[str | Recipe] | None = None,
    *,
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
) -> Inspection:
    """Measures what each operand of each layer loses under recipes, and what the loss gains.

    One forward and one backward pass of the batch give x, W and g of every linear layer and of the
    experts of every mf.MoE. Each is then cast and multiplied under each recipe alone, so a layer's
    numbers do not depend on those of others, but for the roundings of sums. The model is evaluated
    (`eval`), uncompiled, and is left as it was, its gradients and random states included.
    Stochastic casts draw bits of their own. docs/inspector.md defines the numbers.

    The effect on the loss: with d = y_q - y, the error of a layer's output, and g = dL/dy,
        first order     Σ_t g_t · d_t
        second order    T/2 Σ_t (g_t · d_t)²
    The second is d's form in the empirical Fisher matrix, T Σ_t g_t g_tᵀ, which stands for the
    Hessian of a mean over T tokens (Kunstner et al., arXiv 1905.12558, section 2). It is no
    difference of losses for a loss that is a sum.

    Args:
        model: on any device; FSDP2 may have sharded it. All its ranks call this together, and each
            returns the numbers of its own batch.
        batch: what `loss` takes.
        recipes: to try in every layer; None: each converted layer's own, or in a model without one
            fp8_rowwise, mxfp8 and nvfp4.
        loss: (model, batch) -> a tensor of one element, a mean over tokens; None: what the model
            returns for the batch, or its attribute `loss`. A mapping is passed as keywords, a tuple
            or list as arguments.

    Returns:
        The rows, in the order of the model, and what was not inspected, with reasons.

    Raises:
        TypeError: `model` is no module, or a recipe is no text.
        ValueError: a text is no recipe, there is no layer or no recipe, or the loss is no scalar.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model, loss = torch.nn.Linear(64, 64), lambda model, x: model(x).square().mean()
        >>> found = mf.inspect(model, torch.randn(128, 64), ["mxfp8", "nvfp4"], loss=loss)
        >>> [(row.recipe, f"{row.y_error:.0%}") for row in found.rows]
        [('mxfp8', '4%'), ('nvfp4', '15%')]
    """
    model = unwrapped(require_module("inspect", model))
    reshard(model)
    own = recipes is None and bool(converted(model))
    if isinstance(recipes, (str, Recipe)):
        recipes = (recipes,)
    tried = [Recipe(recipe) for recipe in (RECIPES if recipes is None else recipes)]
    layers, skipped = find_layers(model, list(dict.fromkeys(tried)), own)
    if not tried or not (layers or skipped):
        what = "linear layer" if tried else "recipe"
        raise ValueError(f"inspect: expected a model and recipes to inspect, got no {what}")
    value, calls, gradients = run(model, list(layers), batch, loss or default_loss)
    numbers = Numbers()
    why_not = dict.fromkeys(layers, NOT_CALLED)
    with torch.no_grad():
        while calls:  # a call's tensors are freed when its products are measured
            call, g = calls.pop(0), gradients.pop(0)
            why = reason_against_call(call, g)
            if why is None and g is not None:
                why_not.pop(call.module, None)
                for product in products_of(call, layers[call.module], g):
                    numbers.add(product)
                if isinstance(call.module, Experts):
                    numbers.finish()  # few have equally many rows, and each keeps the whole weight
            elif call.module in why_not and why is not None:
                why_not[call.module] = why
        numbers.finish()
    for module, why in why_not.items():
        skipped += [(layer.name, why) for layer in layers[module]]
    rows = rows_of([layer for each in layers.values() for layer in each], numbers)
    tokens = max(numbers.tokens.values(), default=0)
    heads = tuple(heads_of(model, lambda name: []))
    return Inspection(tuple(rows), tuple(skipped), heads, value.item(), tokens)


# ---- the numbers of a layer ----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A product under one recipe, and what it computes: y, dx and dW."""

    product: Product
    history: Tensor | None
    results: Sequence[Tensor]
    exact: Sequence[Tensor]


class Numbers:
    """The numbers of all products.

    vectors: (layer, recipe) -> a vector a product: the statistics of the six operands, zeros of
        one in high precision, then four sums for each of y, dx and dW.
    operations, tokens: by layer.
    """

    def __init__(self) -> None:
        self.vectors: dict[tuple[str, str], list[Tensor]] = {}
        self.operations: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        # Cases of one recipe, shape and dtype, which wait for others of theirs.
        self.waiting: dict[tuple[object, ...], tuple[Recipe, list[Case]]] = {}
        self.elements = 0  # of what they computed

    def add(self, product: Product) -> None:
        """Adds a product under each recipe of its layer."""
        layer, x, weight, g = product.layer, product.x, product.weight, product.g
        exact = F.linear(x, weight), g @ weight, g.t() @ x
        name = layer.name
        self.operations[name] = self.operations.get(name, 0) + x.shape[0] * weight.numel()
        self.tokens[name] = max(self.tokens.get(name, 0), product.tokens)
        for recipe in layer.recipes:
            history = history_of(layer, recipe, product)
            results = results_of(product, recipe, history, rng_of(recipe, x))
            key = recipe.text, x.shape, weight.shape, x.dtype
            _, cases = self.waiting.setdefault(key, (recipe, []))
            cases.append(Case(product, history, results, exact))
            self.elements += sum(t.numel() for t in (*results, *exact))
            if self.elements >= MOST_ELEMENTS[x.device.type]:
                self.finish()

    def finish(self) -> None:
        """Measures what waits."""
        while self.waiting:
            self.measure(*self.waiting.popitem()[1])
        self.elements = 0

    def measure(self, recipe: Recipe, cases: Sequence[Case]) -> None:
        rng = rng_of(recipe, cases[0].product.x)
        found = [statistics(cases, row, recipe, rng) for row in range(len(operand_names()))]
        for number in range(RESULTS):
            results, exact = [c.results[number] for c in cases], [c.exact[number] for c in cases]
            gradients = [c.product.g for c in cases] if number == 0 else None
            found.append(ops.result_error(results, exact, gradients))
        for case, vector in zip(cases, torch.cat(found, 1)):
            key = case.product.layer.name, recipe.text
            self.vectors.setdefault(key, []).append(vector)


def rng_of(recipe: Recipe, like: Tensor) -> Tensor | None:
    return torch.zeros(2, dtype=torch.int64, device=like.device) if recipe.is_stochastic else None


def spec_of(name: str, recipe: Recipe) -> str:
    """Returns the spec of an operand of a recipe."""
    _, _, product, side = READS[name]
    return str(getattr(getattr(recipe, product), side))


def statistics(cases: Sequence[Case], row: int, recipe: Recipe, rng: Tensor | None) -> Tensor:
    """Returns the statistics of an operand, a row a case; zeros of one in high precision.

    row: the operand's, in the order of operand_names.
    """
    name = operand_names()[row]
    matrix, columnwise, *_ = READS[name]
    x = [getattr(case.product, matrix) for case in cases]
    spec = Spec.parse(spec_of(name, recipe))
    if spec.is_bf16:
        return torch.zeros(len(x), length(), dtype=torch.float64, device=x[0].device)
    histories = [case.history for case in cases]
    amax = [cast(Tensor, history)[row, 0] for history in histories] if spec.is_delayed else None
    return ops.operand_statistics(x, spec.text, columnwise, amax=amax, rng=rng)


def length() -> int:
    """Returns the length of the vector of one operand."""
    return ops.operand_statistics([torch.empty(0, 0, device="meta")], "mxfp8").shape[1]


def history_of(layer: Layer, recipe: Recipe, product: Product) -> Tensor | None:
    """Returns the amax history that delayed scaling reads: the layer's, else of the matrices."""
    if not recipe.is_delayed:
        return None
    state = layer.state
    if state is not None and state.amax_history is not None and state.amax_history.dim() == 2:
        return state.amax_history.clone()
    amaxes = [getattr(product, READS[name][0]).abs().amax().float() for name in operand_names()]
    return torch.stack([torch.stack(amaxes)] * 2, 1)


def results_of(
    product: Product, recipe: Recipe, history: Tensor | None, rng: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y, dx and dW under a recipe, as a layer computes them."""
    x, weight = (t.detach().requires_grad_() for t in (product.x, product.weight))
    with torch.enable_grad():
        y = ops.linear(x, weight, None, recipe.text, rng=rng, amax_history=history)
        dx, dw = torch.autograd.grad(y, (x, weight), product.g)
    return y.detach(), dx, dw


# ---- rows ----------------------------------------------------------------------------------------


def rows_of(layers: Iterable[Layer], numbers: Numbers) -> Iterable[LayerRow]:
    """Yields the rows, after one copy from the device."""
    if not numbers.vectors:
        return
    lengths = [len(vectors) for vectors in numbers.vectors.values()]
    flat = torch.stack([v for vectors in numbers.vectors.values() for v in vectors]).cpu()
    by_key = dict(zip(numbers.vectors, flat.split(lengths)))
    for layer in layers:
        operations, tokens = (of.get(layer.name, 0) for of in (numbers.operations, numbers.tokens))
        for recipe in layer.recipes:
            if (vectors := by_key.get((layer.name, recipe.text))) is not None:
                yield row_of(layer, recipe, vectors, operations, tokens)


def row_of(layer: Layer, recipe: Recipe, vectors: Tensor, operations: int, tokens: int) -> LayerRow:
    """Returns the row of a layer from the vectors of its products."""
    names, size = operand_names(), length()
    operands = []
    for number, name in enumerate(names):
        part = vectors[:, number * size : (number + 1) * size]
        if part[:, 0].any():
            operands.append(operand_row(name, spec_of(name, recipe), part))
    sums = vectors[:, len(names) * size :].sum(0).view(RESULTS, SUMS).tolist()
    y, dx, dw = (ratio(error, whole) ** 0.5 for error, whole, *_ in sums)
    first, second = sums[0][2:]
    second *= tokens / 2
    where = layer.name, layer.module, recipe.text
    return LayerRow(*where, operations, y, dx, dw, first, second, tuple(operands))


def operand_row(name: str, spec: str, part: Tensor) -> OperandRow:
    """Returns the row of an operand from a vector a product; what is NaN there is not known."""
    names, added = ops.statistic_names(), part.sum(0).tolist()
    n = dict(zip(names, added))
    noise = ratio(n["noise"], n["signal"])
    counts = {i - 127: int(c) for i, c in enumerate(added[len(names) :]) if c}
    return OperandRow(
        operand=name,
        spec=spec,
        elements=int(n["elements"]),
        snr_db=-10 * math.log10(noise) if noise else math.inf,
        saturated=n["saturated"] / n["elements"],
        flushed=n["flushed"] / n["elements"],
        zero_scales=ratio(n["zero_scales"], n["scales"]),
        channels=int(n["channels"]),
        outlier_channels=int(n["outlier_channels"]),
        nonfinite=int(n["nonfinite"]),
        amax=part[:, names.index("amax")].max().item(),
        scales=counts,
    )


def ratio(part: float, whole: float) -> float:
    """Returns part / whole, and 0 of nothing."""
    return part / whole if whole else math.inf if part else 0.0
