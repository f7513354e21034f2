"""The layers that mf.inspect reads, found and called: their x, W and g in one forward and backward.

    linear     x (M, K), W (N, K), g (M, N)         the module's input, weight and output's gradient
    experts    the same for each expert and matrix: rows of x by expert, then of the hidden layer

The model is evaluated, uncompiled, and nothing is written to: neither gradients, nor random states,
nor amax histories, nor torch's generators.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._native import ops
from ..moe.convert.experts import ROUTER_REASON, parameters_of
from ..moe.convert.experts import products_of as products_in
from ..moe.feed_forward import order_rows, take_rows
from ..moe.layer import Experts
from ..moe.router import Router
from ..nn.cache.operand_cache import compute_dtype
from ..nn.convert.filters import Filters
from ..nn.convert.selection import select
from ..nn.grouped_product import product_of
from ..nn.linear import Linear
from ..nn.names import clean_name, is_scripted, join, own_parameter
from ..nn.registry import expert_functions, is_distributed
from ..nn.state.recipe_state import WEIGHT_DTYPES, RecipeState
from ..private_torch import tree_leaves
from ..recipe import Recipe, RecipeMap
from ..tensor.quantized_tensor import QuantizedTensor
from .watch import KeptGenerators, WeightReads, function_that_hides

Skipped = list[tuple[str, str]]

# Why the calls of a layer are not seen.
NO_GRAD = "called without gradients, as under torch.no_grad"
HIDDEN = (
    "called in the forward of {}, which hides its gradient; of a checkpoint, use_reentrant=False "
    "does not"
)
READ_ELSEWHERE = "not called: {} reads its weight, which no recipe reaches"


@dataclass
class Layer:
    """One weight to inspect.

    Args:
        name: of its row.
        module: the name of its module.
        weight: the parameter, before FSDP2 gathers it.
        recipes: to try.
        state: of a converted layer.
    """

    name: str
    module: str
    weight: Tensor
    recipes: tuple[Recipe, ...]
    state: RecipeState | None

    def matrix(self, dtype: torch.dtype) -> Tensor:
        """Returns the whole weight in the compute dtype; all ranks call it together."""
        return whole(self.weight).to(dtype)


def whole(parameter: Tensor) -> Tensor:
    """Returns the values of a parameter that FSDP2 may have sharded, on all ranks together."""
    values = parameter.detach()
    return values.full_tensor() if is_distributed(values) else values


@dataclass(frozen=True)
class Call:
    """A forward of one module: the input and what backward gives for its output.

    Args:
        module: the module.
        inputs: its arguments, with those of keywords last.
        output: what it returned; of several tensors the first.
        edge: the place of the output in autograd's graph, before writes in place; None: it has
            none.
        dtype: of its products.
        is_cut: whether tensor parallelism cuts a parameter, which is a DTensor during the forward.
        versions: of the inputs, by which a write in place is noticed.
        parameters: the ids of the module's parameters during the forward.
    """

    module: nn.Module
    inputs: tuple[Any, ...]
    output: Tensor
    edge: GradientEdge | None
    dtype: torch.dtype
    is_cut: bool
    versions: tuple[int, ...]
    parameters: frozenset[int]


@dataclass(frozen=True)
class ProductMatrices:
    """The matrices of one product: x (M, K), W (N, K), g (M, N), of one compute dtype."""

    layer: Layer
    x: Tensor
    weight: Tensor
    g: Tensor
    tokens: int  # T, which the loss is a mean over


# ---- which layers --------------------------------------------------------------------------------


def find_layers(
    model: nn.Module, recipes: Sequence[Recipe], kept_own: bool
) -> tuple[dict[nn.Module, list[Layer]], Skipped]:
    """Finds the weights to inspect, by their module, and (name, reason) of the others.

    Args:
        model: the model.
        recipes: to try in each layer.
        kept_own: whether converted layers have their own recipe instead, and others none.
    """
    found: dict[nn.Module, list[Layer]] = {}
    filters = Filters(model, RecipeMap("mxfp8"), (), None, "nothing")
    selection = select(model, filters, expert_functions.select(model, filters, None, False), False)
    chosen = {choice.module: choice.names for choice in selection.chosen}
    # Reasons against a conversion, except where a layer is converted already.
    reasons = dict(selection.skipped)
    for raw_name, module in model.named_modules():
        name = clean_name(raw_name)
        if isinstance(module, Linear):
            names: tuple[str, ...] = ("weight",)
        elif isinstance(module, Experts):
            names = module.weight_names
        else:
            is_converted = next(products_in(module), None) is not None
            names = chosen.get(module, parameters_of(module, 3) if is_converted else ())
        if isinstance(module, Router):
            reasons.setdefault(name, ROUTER_REASON)
        computed = any(own_parameter(module, name) is None for name in names)
        for weight_name in names:
            row = name if isinstance(module, nn.Linear) else join(name, weight_name)
            state = module if isinstance(module, RecipeState) else product_of(module, weight_name)
            if isinstance(module, Experts) and state is None and module not in chosen:
                continue
            weight = own_parameter(module, weight_name)
            if weight is None:  # of a converted layer
                reasons[row] = "its weight is computed in each forward"
                continue
            if computed:
                reasons[row] = "another weight of its module is computed in each forward"
                continue
            reasons.pop(row, None)
            if (why := reason_against(module, weight, state is None and kept_own)) is not None:
                reasons[row] = why
                continue
            tried = (state.recipe,) if state is not None and kept_own else tuple(recipes)
            found.setdefault(module, []).append(Layer(row, name, weight, tried, state))
    return found, list(reasons.items())


def reason_against(module: nn.Module, weight: Tensor, is_plain: bool) -> str | None:
    """Returns why a weight is not inspected; None where it is."""
    if isinstance(getattr(weight, "_local_tensor", weight), QuantizedTensor):
        return "its weight is codes (primary), and has no other values to compare them with"
    if not isinstance(module, nn.Linear | Experts):
        return f"experts in a {type(module).__name__}; those of mf.MoE are inspected"
    if isinstance(module, Experts) and module.parallel is not None:
        return "ranks divide its experts"
    return "not converted; name recipes to inspect it" if is_plain else None


# ---- one forward and backward --------------------------------------------------------------------


def call_with(model: nn.Module, batch: Any) -> Any:
    """Calls the model: with a mapping's keywords, a tuple's arguments, or the batch itself."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Returns what the model computes of a batch, or its loss."""
    out = call_with(model, batch)
    return cast(Tensor, getattr(out, "loss", out))


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluates the model uncompiled inside, and adds no gradient to main_grad.

    Buffers that the forward writes get their values back, and those that it makes go.
    """
    modes = [(module, module.training) for module in model.modules()]
    registered = [
        (m, dict(m._buffers), {*m._non_persistent_buffers_set})
        for m in model.modules()
        if not is_scripted(m)  # whose buffers have fixed names
    ]
    buffers = [KeptBuffer.of(b) for b in model.buffers() if not b.is_inference()]
    sums = [(m, m.accumulate) for m in model.modules() if isinstance(m, Linear) and m.accumulate]
    with ExitStack() as undo:
        if (
            "torch._dynamo" in sys.modules
        ):  # else nothing is compiled, and importing it takes seconds
            undo.enter_context(torch.compiler.set_stance("force_eager"))
        for layer, accumulate in sums:
            undo.callback(setattr, layer, "accumulate", accumulate)
            layer.accumulate = ""
        undo.callback(put_back, modes, registered, buffers)
        model.eval()
        yield


class KeptBuffer(NamedTuple):
    """A buffer, and its values of before."""

    buffer: Tensor
    version: int
    values: Tensor

    @classmethod
    def of(cls, buffer: Tensor) -> KeptBuffer:
        return cls(buffer, buffer._version, buffer.detach().clone())


@torch.no_grad()
def put_back(
    modes: Sequence[tuple[nn.Module, bool]],
    registered: Sequence[tuple[nn.Module, Mapping[str, Tensor | None], set[str]]],
    buffers: Sequence[KeptBuffer],
) -> None:
    """Puts modes and buffers back. A module's own train may do more than to set its mode.

    registered: the buffers that each module had, by name, and the names that no checkpoint has.
    """
    for module, mode in modes:
        module.train(mode)
    for module, mode in modes:  # of a module in two others, its own
        module.training = mode
    for module, before, not_persistent in registered:
        module._buffers.clear()
        module._buffers.update(before)
        module._non_persistent_buffers_set = not_persistent
    for buffer, version, values in buffers:
        if buffer._version != version:
            if buffer.requires_grad:  # the forward put it into its graph
                buffer.detach_()
            buffer.copy_(values)


class Run(NamedTuple):
    """A forward and backward pass.

    Args:
        loss: of the batch.
        calls: in their order.
        gradients: of each call's output, then of other parameters. None: the loss does not depend
            on it, or it needs none.
        unseen: module without a call -> why.
    """

    loss: Tensor
    calls: list[Call]
    gradients: list[Tensor | None]
    unseen: dict[nn.Module, str]


def require_autograd(model: nn.Module, batch: Any) -> None:
    """Raises ValueError where autograd records nothing, or tensors that it cannot save."""
    what = "a call under torch.inference_mode" if torch.is_inference_mode_enabled() else ""
    tensors: list[tuple[str, Tensor]] = []
    tensors += [(f"{name} of the model", p) for name, p in model.named_parameters()]
    tensors += [("a tensor of the batch", t) for t in tree_leaves(batch) if isinstance(t, Tensor)]
    for name, tensor in tensors:
        if tensor.is_inference():
            what = what or f"{name} that was made under it"
    if what:
        raise ValueError(
            f"inspect: expected gradients, which torch.inference_mode excludes, got {what}; call "
            "inspect outside of it, with clones of what was made there"
        )


def run(
    model: nn.Module,
    modules: Sequence[nn.Module],
    batch: Any,
    loss: Callable[[nn.Module, Any], Tensor],
    also: Sequence[Tensor] = (),
) -> Run:
    """Runs one forward and one backward pass. torch's generators do not move.

    Args:
        model: evaluated by `loss`.
        modules: whose calls are recorded.
        batch: the argument of `loss`.
        loss: (model, batch) -> a scalar.
        also: parameters whose gradients are computed too.

    Raises:
        ValueError: the loss is no scalar, the pass has no gradients, or a reentrant checkpoint lies
            between the loss and a call.
    """
    require_autograd(model, batch)
    calls: list[Call] = []
    reads, unseen = WeightReads(modules), dict[nn.Module, str]()
    cut: set[nn.Module] = set()  # seen before a call: after it FSDP2 may have sharded anew
    is_forward = True

    def begin(module: nn.Module, args: Any) -> None:
        reads.called.append(module)
        if any(is_distributed(p) for p in module.parameters(recurse=False)):
            cut.add(module)

    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        reads.called.remove(module)
        values = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
        value = next((t for t in values if t.is_floating_point()), None)
        if not is_forward or value is None:
            return None
        if not torch.is_grad_enabled():
            unseen[module] = reason_without_gradient()
            return None
        returned = None
        # Of frozen parameters: no layer before needs a gradient.
        if value is output and not output.requires_grad:
            value = output.detach().requires_grad_()
            returned = value.clone()  # which may be written to
        calls.append(call_of(module, (*args, *kwargs.values()), value, module in cut))
        return returned

    with ExitStack() as undo:
        undo.enter_context(undisturbed(model))
        for module in modules:
            undo.callback(module.register_forward_pre_hook(begin).remove)
            # Before the user's hooks, which may return another output.
            hook = module.register_forward_hook(record, prepend=True, with_kwargs=True)
            undo.callback(hook.remove)
        undo.enter_context(KeptGenerators())
        with torch.enable_grad():
            with reads:
                value = loss(model, batch)
            require_loss(value)
            is_forward = False
            gradients = gradients_of(value, [*(call.edge for call in calls), *also])
    for module, reader in reads.readers.items():
        unseen.setdefault(module, READ_ELSEWHERE.format(reader))
    return Run(value.detach(), calls, gradients, unseen)


def call_of(module: nn.Module, inputs: tuple[Any, ...], output: Tensor, is_cut: bool) -> Call:
    """Returns a call that ends now."""
    values = [x for x in inputs if isinstance(x, Tensor)]
    dtype = compute_dtype(values[0]) if values else output.dtype
    versions = tuple(x._version for x in values)
    edge = get_gradient_edge(output) if output.requires_grad else None
    parameters = frozenset(map(id, module.parameters(recurse=False)))
    return Call(module, inputs, output, edge, dtype, is_cut, versions, parameters)


def require_loss(value: object) -> None:
    """Raises ValueError where a loss is no tensor of one element."""
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            "inspect: expected a loss, a tensor of one element, from the model or from "
            f"loss(model, batch), got {got}"
        )


def reason_without_gradient() -> str:
    """Returns why a call that runs now has no gradient."""
    function = function_that_hides()
    return NO_GRAD if function is None else HIDDEN.format(function)


def gradients_of(value: Tensor, wanted: Sequence[Any]) -> list[Tensor | None]:
    """Returns the gradients of a loss; None of None, and of what it does not depend on."""
    places = [i for i, each in enumerate(wanted) if each is not None]
    found: list[Tensor | None] = [None] * len(wanted)
    if not places or not value.requires_grad:
        return found
    try:
        gradients = torch.autograd.grad(value.sum(), [wanted[i] for i in places], allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise ValueError(
            "inspect: expected checkpoints that gradients of layers pass, got one with "
            "use_reentrant=True between the loss and a layer; pass it use_reentrant=False"
        ) from error
    for i, gradient in zip(places, gradients):
        found[i] = gradient
    return found


# ---- the products of a call ----------------------------------------------------------------------


def products_of(call: Call, layers: Sequence[Layer], g: Tensor) -> Iterator[ProductMatrices]:
    """Yields the products of a call."""
    x, g = (
        t.reshape(-1, t.shape[-1]).to(call.dtype).contiguous() for t in (call.inputs[0].detach(), g)
    )
    if isinstance(call.module, Experts):
        yield from products_of_experts(call, layers, x, g)
    else:
        yield ProductMatrices(layers[0], x, layers[0].matrix(call.dtype), g, x.shape[0])


def products_of_experts(
    call: Call, layers: Sequence[Layer], x_TD: Tensor, g_TD: Tensor
) -> Iterator[ProductMatrices]:
    """Yields the products of each expert with rows, whose hidden layer is computed again."""
    experts = cast(Experts, call.module)
    indices, weights = (t.detach() for t in call.inputs[1:3])
    order = order_rows(indices, experts.experts)
    x, g = take_rows(x_TD, order), take_rows(g_TD.contiguous(), order)
    weights_M = weights.float().reshape(-1).index_select(0, order.pairs)
    matrices = [layer.matrix(call.dtype) for layer in layers]
    biases = [getattr(experts, name) for name in experts.bias_names]
    biases = [None if bias is None else whole(bias).to(call.dtype) for bias in biases]
    gate, begin = experts.gate._asdict(), 0
    for expert, end in enumerate(order.offs.tolist()):
        rows, begin = slice(begin, end), end
        if rows.start == end:
            continue
        *inputs, w2 = (matrix[expert] for matrix in matrices)
        outputs = [x[rows] @ w.t() for w in inputs]
        for bias, output in zip(biases, outputs):
            if bias is not None:
                output += bias[expert]
        gated = (outputs[0], outputs[1] if len(outputs) > 1 else None, weights_M[rows])
        h, dh = ops.swiglu(*gated, **gate), g[rows] @ w2
        gradients = ops.swiglu_backward(dh, *gated, **gate)
        for layer, w, dy in zip(layers, inputs, gradients):
            yield ProductMatrices(layer, x[rows], w, dy, x_TD.shape[0])
        yield ProductMatrices(layers[-1], h, w2, g[rows], x_TD.shape[0])


def reason_against_call(call: Call, layers: Sequence[Layer], g: Tensor | None) -> str | None:
    """Returns why the products of a call cannot be inspected; None where they can."""
    own = (layer.weight for layer in layers if not is_distributed(layer.weight))
    if any(id(weight) not in call.parameters for weight in own):
        return "called with another weight than its own, as by torch.func.functional_call"
    if call.is_cut or is_distributed(call.inputs[0]):
        return "tensor parallelism cuts its weight"
    if call.dtype not in WEIGHT_DTYPES:
        return f"its products are in {call.dtype}; expected float32 or bfloat16"
    if call.versions != tuple(x._version for x in call.inputs if isinstance(x, Tensor)):
        return "its input is written to in place"
    return "the loss does not depend on it" if g is None else None
