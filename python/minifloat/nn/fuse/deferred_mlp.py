"""A feed-forward as one op: down(silu(gate(x)) * up(x)), or down(gelu(up(x))).

    gate, up       mf.Linear -> DeferredProduct: the layer and its input, nothing is computed
    silu, gelu     of a DeferredProduct -> DeferredActivation, or DeferredHidden without a gate
    *              of a DeferredActivation and up's DeferredProduct -> DeferredHidden
    down           mf.Linear of a DeferredHidden -> ops.mlp(x, weights, …)

The op saves no hidden tensor for backward. nn/fuse/mlp_patterns.py finds the layers. Anything else
that reads one of these objects reads its plain tensor, for which each layer computes its product
once, as it does without fusion.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._native import ops
from ...spec import Spec
from ..accumulation import weight_sums
from ..cache.operand_conditions import reads_codes
from .deferred import VALUE_DTYPES, Deferred, DeferredNorm, request_of, source_of, version_of
from .other_hooks import has_other_hooks

TENSORS = (Tensor, nn.Parameter)


class FusedMlp:
    """The layers of a feed-forward.

    Args:
        gate: mf.Linear; None: the activation is of up's product.
        up, down: mf.Linear of gate's recipe.
        between: the activation's module, where it is one.
    """

    def __init__(self, gate: Any, up: Any, down: Any, between: nn.Module | None) -> None:
        self.gate = gate
        self.up = up
        self.down = down
        self.between = between

    @property
    def layers(self) -> tuple[Any, ...]:
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)

    def forward(self, layer: Any, input: Any) -> Any:
        """Returns what a layer returns instead of its product; None: its product."""
        if layer is self.down:
            is_whole = isinstance(input, DeferredHidden) and input.product.mlp is self
            return input.through_down() if is_whole and input.is_current() else None
        return DeferredProduct(self, layer, input) if self.defers(input) else None

    def defers(self, input: Any) -> bool:
        """Tells whether the op computes what the layers do of this input."""
        if type(input) not in (*TENSORS, DeferredNorm) or input.dtype not in VALUE_DTYPES:
            return False
        device, dtype = input.device, input.dtype
        if device.type == "meta" or torch.is_autocast_enabled(device.type):
            return False
        if self.between is not None and has_other_hooks(self.between):
            return False
        recipe = self.down.recipe
        for layer in self.layers:
            weight, bias = layer.weight, layer.bias
            if layer.recipe.text != recipe.text or layer.weight_gather is not None:
                return False
            if layer.accumulate != self.down.accumulate:
                return False
            if type(weight) not in TENSORS or (weight.dtype, weight.device) != (dtype, device):
                return False
            if bias is not None and (type(bias) not in TENSORS or bias.dtype != dtype):
                return False
            if has_other_hooks(layer):
                return False
        return True


def can_fuse(recipe: Any) -> bool:
    """Tells whether the two layers that read x may read the same codes, and read codes."""
    texts = (recipe.fprop.a, recipe.wgrad.b)
    return reads_codes(*texts) and not any(Spec.parse(text).is_stochastic for text in texts)


class Part(Deferred):
    """A deferred result within a feed-forward."""

    product: DeferredProduct

    @property
    def anchor(self) -> Tensor:
        return self.product.like_result()

    @property
    def requires_grad(self) -> bool:
        return self.product.has_gradient()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = None
        if func is torch.mul and len(args) == 2 and not kwargs:
            found = gated(*args)
        elif len(args) == 1 and isinstance(args[0], DeferredProduct):
            found = args[0].activated(name_of(func, kwargs or {}), func, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs) if found is None else found

    def __mul__(self, other: Any) -> Any:
        found = gated(self, other)
        return self.values() * other if found is None else found

    def mul(self, other: Any) -> Any:
        return self * other


class DeferredProduct(Part):
    """A layer's product."""

    def __init__(self, mlp: FusedMlp, layer: Any, input: Tensor | DeferredNorm) -> None:
        self._values = None
        self.mlp = mlp
        self.layer = layer
        self.input = input
        self.has_grad = torch.is_grad_enabled()
        self.version = 0 if isinstance(input, Deferred) else version_of(input)
        self.product = self

    def require_unchanged(self) -> None:
        """Raises where the product would not be that of the layer's call."""
        input = self.input
        if not isinstance(input, Deferred) and version_of(input) != self.version:
            raise RuntimeError(
                "a deferred feed-forward: expected its input unchanged until the last layer has "
                "read it, but the input was modified by an inplace operation; convert the model "
                "without fuse=True"
            )

    def compute(self) -> Tensor:
        self.require_unchanged()
        kind = self.input.device.type
        if not torch.is_autocast_enabled(kind):
            return self._multiply()
        with torch.autocast(kind, enabled=False):
            return self._multiply()

    def _multiply(self) -> Tensor:
        if torch.is_grad_enabled() == self.has_grad:
            return self.layer.multiply(self.input)
        with torch.set_grad_enabled(self.has_grad):
            return self.layer.multiply(self.input)

    def like_result(self) -> Tensor:
        """Returns a tensor of the product's shape and dtype without memory."""
        shape = (*self.input.shape[:-1], self.layer.out_features)
        like = self.input.anchor if isinstance(self.input, Deferred) else self.input
        return like.detach().new_empty(1).expand(shape)

    def has_gradient(self) -> bool:
        layer = self.layer
        parameters = (layer.weight, layer.bias)
        is_needed = any(p is not None and p.requires_grad for p in parameters)
        return self.has_grad and (is_needed or self.input.requires_grad)

    def activated(self, name: str | None, func: Any, options: dict[str, Any]) -> Any:
        """Returns an activation of the product; None: it is not known, or not that of a gate."""
        mlp = self.mlp
        if name is None or self.is_computed or self.layer is not (mlp.gate or mlp.up):
            return None
        if mlp.gate is None:
            return DeferredHidden(self, name, func, options, None)
        return DeferredActivation(self, name, func, options)


class DeferredActivation(Part):
    """An activation of the gate's product."""

    def __init__(
        self, product: DeferredProduct, name: str, func: Any, options: dict[str, Any]
    ) -> None:
        self._values = None
        self.product = product
        self.name = name
        self.func = func
        self.options = options

    def compute(self) -> Tensor:
        return self.func(self.product.values(), **self.options)


class DeferredHidden(DeferredActivation):
    """What the last layer reads: an activation, times up's product where there is a gate."""

    def __init__(
        self,
        product: DeferredProduct,
        name: str,
        func: Any,
        options: dict[str, Any],
        up: DeferredProduct | None,
    ) -> None:
        super().__init__(product, name, func, options)
        self.up = up

    @property
    def requires_grad(self) -> bool:
        is_of_up = self.up is not None and self.up.has_gradient()
        return is_of_up or self.product.has_gradient()

    def compute(self) -> Tensor:
        activation = super().compute()
        return activation if self.up is None else activation * self.up.values()

    def is_current(self) -> bool:
        """Tells whether the op would compute what reading the plain tensor does."""
        if self.is_computed or self.product.is_computed:
            return False
        if self.up is not None and self.up.is_computed:
            return False
        is_same_mode = torch.is_grad_enabled() == self.product.has_grad
        return is_same_mode and not torch.is_autocast_enabled(self.product.input.device.type)

    def through_down(self) -> Tensor:
        """Returns the feed-forward's result."""
        product = self.product
        product.require_unchanged()
        layers = product.mlp.layers
        main_grads, accumulate, received = sums_of(layers)
        states = [layer.op_state(layer.weight.device) for layer in layers]
        rng, histories, streams = ([s[i] for s in states] for i in range(3))
        x, x_operands = self._input(states)
        reads_back = [x.requires_grad] * (len(layers) - 1) + [self.requires_grad]
        if not torch.is_grad_enabled():
            reads_back = [False] * len(layers)
        codes = [
            cached_codes(layer, x, columnwise, state[1])
            for layer, columnwise, state in zip(layers, reads_back, states)
        ]
        return mlp(
            x,
            [contiguous(layer.weight) for layer in layers],
            [layer.bias for layer in layers],
            layers[0].recipe.text,
            self.name,
            rng=None if rng[0] is None else rng,
            amax_history=None if histories[0] is None else histories,
            streams=streams,
            x_operands=x_operands,
            weight_operands=None if None in codes else [t for c in codes for t in c or ()],
            recompute=product.mlp.down.recompute,
            main_grads=main_grads,
            accumulate=accumulate,
            received=received,
        )

    def _input(self, states: list[Any]) -> tuple[Tensor, list[Tensor] | None]:
        """Returns x, or a norm's anchor and the operands of its result."""
        input = self.product.input
        if not isinstance(input, DeferredNorm):
            return input, None
        layer = self.product.layer
        source = source_of(layer, input)
        if source is None:
            return input.values(), None
        rng, history, stream = states[0]
        readers = self.product.mlp.layers[:-1]
        return source.anchor, source.operands(request_of(layer, rng, history, stream, *readers))


def contiguous(weight: Tensor) -> Tensor:
    return weight if weight.is_contiguous() else weight.contiguous()


def mlp(*args: Any, **kwargs: Any) -> Tensor:
    """Calls the op."""
    return ops.mlp(*args, **kwargs)


def sums_of(layers: tuple[Any, ...]) -> tuple[list[Tensor] | None, str, str]:
    """Returns main_grads, accumulate and received of the layers, as the op takes them."""
    if not layers[0].accumulate:
        return None, "", ""
    sums = [weight_sums(layer, layer.weight) for layer in layers]
    trained = [s for s in sums if s.accumulate]
    if not trained:
        return None, "", ""
    main_grads = None
    if trained[0].main_grad is not None:
        unread = trained[0].main_grad.new_empty(0)  # of a frozen weight
        main_grads = [unread if s.main_grad is None else s.main_grad for s in sums]
    received = {s.received for s in trained}
    return main_grads, trained[0].accumulate, received.pop() if len(received) == 1 else "zeros"


def cached_codes(
    layer: Any, x: Tensor, columnwise: bool, amax_history: Tensor | None
) -> list[Tensor] | None:
    """Returns the cached operands of a layer's weight; None where the op is to quantize it."""
    if torch.compiler.is_compiling():
        return None
    weight = layer.weight
    return layer.cached_operands(layer.weight_codes, weight, weight, x, columnwise, amax_history)


def name_of(func: Any, options: dict[str, Any]) -> str | None:
    """Returns the op's name of an activation function with these keywords; None: it has none."""
    if func is F.silu and not options.get("inplace"):
        return "silu"
    if func is F.gelu and set(options) <= {"approximate"}:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(options.get("approximate", "none"))
    return None


def gated(a: Any, b: Any) -> DeferredHidden | None:
    """Returns the product of a gate's activation and up's product; None: they are other ones."""
    if isinstance(b, DeferredActivation):
        a, b = b, a
    if type(a) is not DeferredActivation or type(b) is not DeferredProduct:
        return None
    mlp, gate = a.product.mlp, a.product
    if b.mlp is not mlp or b.layer is not mlp.up or b.input is not gate.input:
        return None
    if a.is_computed or gate.is_computed or b.is_computed or gate.version != b.version:
        return None
    return DeferredHidden(gate, a.name, a.func, a.options, b)
