"""mf.inspect: one forward and backward of a model, and each cast that a recipe does on the way.

All numbers of a layer are two native ops' (torch/ops/statistics.cpp), and stay on the device until
the last layer. Layers of one shape share a call. The layers' results are those of mf.linear on the
same x, W and g.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._native import ops
from ..checks import require_module
from ..distributed.reshard import reshard
from ..moe.layer import Experts
from ..nn.convert.heads import heads_of
from ..nn.names import unwrapped
from ..nn.registry import require_layers_of_torch
from ..nn.state.recipe_state import converted
from ..recipe import Recipe, operand_names
from ..spec import Spec
from .inspection import NOT_CALLED, Inspection, LayerRow, OperandRow
from .layers import (
    Layer,
    ProductMatrices,
    default_loss,
    find_layers,
    products_of,
    reason_against_call,
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
    (`eval`), uncompiled, and is left as it was, its gradients and random states included, and so
    are torch's generators. Stochastic casts draw bits of their own. docs/inspector.md defines the
    numbers.

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
        ValueError: a text is no recipe, there is no layer or no recipe, the loss is no scalar, the
            model is Megatron-Core's, or autograd gives no gradients: under inference_mode, through
            a reentrant checkpoint.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> model, loss = torch.nn.Linear(64, 64), lambda model, x: model(x).square().mean()
        >>> found = mf.inspect(model, torch.randn(128, 64), ["mxfp8", "nvfp4"], loss=loss)
        >>> [(row.recipe, f"{row.y_error:.0%}") for row in found.rows]
        [('mxfp8', '4%'), ('nvfp4', '15%')]
    """
    model = unwrapped(require_module("inspect", model))
    require_layers_of_torch("inspect", model)
    reshard(model)
    own = recipes is None and bool(converted(model))
    if isinstance(recipes, (str, Recipe)):
        recipes = (recipes,)
    tried = [Recipe(recipe) for recipe in (RECIPES if recipes is None else recipes)]
    layers, skipped = find_layers(model, list(dict.fromkeys(tried)), own)
    if not tried or not (layers or skipped):
        what = "linear layer" if tried else "recipe"
        raise ValueError(f"inspect: expected a model and recipes to inspect, got no {what}")
    value, calls, gradients, unseen = run(model, list(layers), batch, loss or default_loss)
    numbers = Numbers()
    why_not = {module: unseen.get(module, NOT_CALLED) for module in layers}
    with torch.no_grad():
        while calls:  # a call's tensors are freed when its products are measured
            call, g = calls.pop(0), gradients.pop(0)
            why = reason_against_call(call, layers[call.module], g)
            if why is None and g is not None:
                for product in products_of(call, layers[call.module], g):
                    why_not.pop(call.module, None)
                    numbers.add(product)
                if isinstance(call.module, Experts):
                    numbers.finish()  # few have equally many rows, and each keeps the whole weight
            elif call.module in why_not and why is not None:
                why_not[call.module] = why
        numbers.finish()
    skipped += [(layers[module][0].module, why) for module, why in why_not.items()]
    rows = rows_of([layer for each in layers.values() for layer in each], numbers)
    tokens = max(numbers.tokens.values(), default=0)
    heads = tuple(heads_of(model))
    return Inspection(tuple(rows), tuple(skipped), heads, value.item(), tokens)


# ---- the numbers of a layer ----------------------------------------------------------------------


class Numbers:
    """The numbers of all products.

    keys: the (layer, recipe) of each vector, in their order.
    vectors: matrices, a row a product: the statistics of the six operands, zeros of one in high
        precision, then four sums for each of y, dx and dW.
    operations, tokens: by layer.
    """

    def __init__(self) -> None:
        self.keys: list[tuple[str, str]] = []
        self.vectors: list[Tensor] = []
        self.operations: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        # Products of one shape and dtype under the same recipes, which wait for others of theirs.
        self.waiting: dict[tuple[object, ...], list[ProductMatrices]] = {}
        self.elements = 0  # of what they will compute

    def add(self, product: ProductMatrices) -> None:
        """Adds a product under each recipe of its layer."""
        layer, x, weight = product.layer, product.x, product.weight
        name = layer.name
        self.operations[name] = self.operations.get(name, 0) + x.shape[0] * weight.numel()
        self.tokens[name] = max(self.tokens.get(name, 0), product.tokens)
        key = layer.recipes, x.shape, weight.shape, x.dtype
        self.waiting.setdefault(key, []).append(product)
        of_one = x.numel() + weight.numel() + product.g.numel()  # y, dx and dW
        self.elements += 2 * len(layer.recipes) * of_one
        if self.elements >= MOST_ELEMENTS[x.device.type]:
            self.finish()

    def finish(self) -> None:
        """Measures what waits."""
        while self.waiting:
            self.measure(self.waiting.popitem()[1])
        self.elements = 0

    def measure(self, products: Sequence[ProductMatrices]) -> None:
        """Measures products of one shape, each under the same recipes, in their dtype."""
        gradients = [p.g for p in products]
        with torch.autocast(gradients[0].device.type, enabled=False):  # the caller may be in one
            self.vectors += self.compute(products, gradients)
        self.keys += [(p.layer.name, r.text) for r in products[0].layer.recipes for p in products]

    def compute(
        self, products: Sequence[ProductMatrices], gradients: Sequence[Tensor]
    ) -> Iterable[Tensor]:
        """Yields a matrix a recipe: the vectors of all products under it."""
        exact = (
            [F.linear(p.x, p.weight) for p in products],
            [p.g @ p.weight for p in products],
            [p.g.t() @ p.x for p in products],
        )
        for recipe in products[0].layer.recipes:
            draws = recipe.is_stochastic
            rng = torch.zeros(2, dtype=torch.int64, device=gradients[0].device) if draws else None
            histories = [history_of(p) for p in products] if recipe.is_delayed else None
            results = results_of(products, recipe, histories, rng)
            found = [statistics(products, name, recipe, histories, rng) for name in operand_names()]
            found.append(ops.result_error(results[0], exact[0], gradients))
            found += [ops.result_error(results[i], exact[i]) for i in (1, 2)]
            yield torch.cat(found, 1)


def spec_of(name: str, recipe: Recipe) -> str:
    """Returns the spec of an operand of a recipe."""
    _, _, product, side = READS[name]
    return str(getattr(getattr(recipe, product), side))


def statistics(
    products: Sequence[ProductMatrices],
    name: str,
    recipe: Recipe,
    histories: Sequence[Tensor] | None,
    rng: Tensor | None,
) -> Tensor:
    """Returns the statistics of an operand, a row a product; zeros of one in high precision."""
    matrix, columnwise, *_ = READS[name]
    x = [getattr(product, matrix) for product in products]
    spec = Spec.parse(spec_of(name, recipe))
    if spec.is_bf16:
        return torch.zeros(len(x), length(), dtype=torch.float64, device=x[0].device)
    amax = None
    if spec.is_delayed and histories is not None:
        amax = [history[operand_names().index(name), 0] for history in histories]
    return ops.operand_statistics(x, spec.text, columnwise, amax=amax, rng=rng)


@lru_cache(maxsize=1)
def length() -> int:
    """Returns the length of the vector of one operand."""
    return ops.operand_statistics([torch.empty(0, 0, device="meta")], "mxfp8").shape[1]


@lru_cache(maxsize=1)
def statistic_names() -> tuple[str, ...]:
    return tuple(ops.statistic_names())


def history_of(product: ProductMatrices) -> Tensor:
    """Returns the amax history that delayed scaling reads: the layer's, else of the matrices.

    A layer has none of operands that its own recipe does not scale so.
    """
    state = product.layer.state
    amaxes = [getattr(product, READS[name][0]).abs().amax().float() for name in operand_names()]
    of_matrices = torch.stack([torch.stack(amaxes)] * 2, 1)
    if state is None or state.amax_history is None or state.amax_history.dim() != 2:
        return of_matrices
    history = state.amax_history
    return torch.where(history[:, :1] > 0, history, of_matrices[:, :1])


def results_of(
    products: Sequence[ProductMatrices],
    recipe: Recipe,
    histories: Sequence[Tensor] | None,
    rng: Tensor | None,
) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """Returns y, dx and dW of the products under a recipe, as a layer computes them."""
    x = [p.x.detach().requires_grad_() for p in products]
    weights = [p.weight.detach().requires_grad_() for p in products]
    with torch.enable_grad():
        outputs = [
            ops.linear(*matrices, None, recipe.text, rng=rng, amax_history=history)
            for *matrices, history in zip(x, weights, histories or repeat(None))
        ]
        # One call for all: on a GPU each hands its work to another thread, and waits for it.
        found = torch.autograd.grad(outputs, [*x, *weights], [p.g for p in products])
    return [y.detach() for y in outputs], found[: len(x)], found[len(x) :]


# ---- rows ----------------------------------------------------------------------------------------


def rows_of(layers: Iterable[Layer], numbers: Numbers) -> Iterable[LayerRow]:
    """Yields the rows, after one copy from the device."""
    if not numbers.vectors:
        return
    places: dict[tuple[str, str], list[int]] = {}
    for place, key in enumerate(numbers.keys):
        places.setdefault(key, []).append(place)
    flat = torch.cat(numbers.vectors).cpu()
    for layer in layers:
        operations, tokens = (of.get(layer.name, 0) for of in (numbers.operations, numbers.tokens))
        for recipe in layer.recipes:
            if (found := places.get((layer.name, recipe.text))) is not None:
                yield row_of(layer, recipe, flat[found], operations, tokens)


def row_of(layer: Layer, recipe: Recipe, vectors: Tensor, operations: int, tokens: int) -> LayerRow:
    """Returns the row of a layer from the vectors of its products."""
    end = len(operand_names()) * length()
    parts = zip(operand_names(), statistics_of_all(vectors[:, :end]))
    operands = [operand_row(name, spec_of(name, recipe), part) for name, part in parts if part[0]]
    sums = vectors[:, end:].sum(0).view(RESULTS, SUMS).tolist()
    y, dx, dw = (ratio(error, whole) ** 0.5 for error, whole, *_ in sums)
    first, second = sums[0][2:]
    second *= tokens / 2
    where = layer.name, layer.module, recipe.text
    return LayerRow(*where, operations, y, dx, dw, first, second, tuple(operands))


def statistics_of_all(vectors: Tensor) -> list[list[float]]:
    """Returns the numbers of each operand: sums over its products, but the largest amax."""
    parts, amax = vectors.unflatten(1, (-1, length())), statistic_names().index("amax")
    added = parts.sum(0)
    added[:, amax] = parts[:, :, amax].amax(0)
    return added.tolist()


def operand_row(name: str, spec: str, numbers: Sequence[float]) -> OperandRow:
    """Returns the row of an operand from its numbers; what is NaN there is not known."""
    names = statistic_names()
    n = dict(zip(names, numbers))
    noise = ratio(n["noise"], n["signal"])
    counts = {i - 127: int(c) for i, c in enumerate(numbers[len(names) :]) if c}
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
        amax=n["amax"],
        scales=counts,
    )


def ratio(part: float, whole: float) -> float:
    """Returns part / whole, and 0 of nothing."""
    return part / whole if whole else math.inf if part else 0.0
