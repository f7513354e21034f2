"""A feed-forward as one op: down(act(gate(x)) * up(x)), or down(act(up(x))).

The op casts the hidden tensor as it computes it, and saves none for backward. MLP calls it, and so
do modules that mf.quantize_(…, fuse=True) has converted to a class derived from MLP in place
(nn/fuse/find_mlps.py): object, parameters, hooks and state-dict keys stay.

Where the op would not compute what the layers do, forward calls them one by one; `can_be_one_op`
lists these cases. The bits differ by the activation alone, which the op rounds once.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..._native import ops
from ...checks import require_bool, require_int, require_one_of
from ...tensor.quantized_tensor import QuantizedTensor
from ..accumulation import weight_sums
from ..convert.fast_paths import prevent_fast_path
from ..linear import Linear, rebased, weight_operands
from ..state.random_state import AdvanceRng

TENSORS = (Tensor, nn.Parameter)
VALUE_DTYPES = (torch.float32, torch.bfloat16)  # of the op's x
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by the op's names
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_ALL_MODULES = tuple("_global" + name for name in HOOKS)  # attributes of torch's module


class Parts(NamedTuple):
    """What a module's feed-forward consists of.

    Args:
        gate: the name of a child, a linear layer; None: the activation is of up's product.
        up, down: names of linear layers.
        activation: "silu", "gelu" or "gelu_tanh".
        recipe: the text of the layers' recipe; "": the layers are called one by one.
    """

    gate: str | None
    up: str
    down: str
    activation: str
    recipe: str = ""

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers, in the op's order."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


class MLP(nn.Module):
    """A feed-forward, down(act(gate(x)) * up(x)), which is one op once mf.quantize_ converts it.

    All three layers need one recipe then, which reads x as codes without `+sr`.

    Args:
        dim: K, of x (…, K) and of the result.
        hidden: the width of the hidden layer.
        gated: whether there is a gate; without one the result is down(act(up(x))).
        activation: "silu", "gelu" or "gelu_tanh".
        bias: whether the layers have biases.
        device, dtype: of the parameters, as those of nn.Linear.

    Raises:
        TypeError, ValueError: an argument is not as expected.

    Example:
        >>> mlp = mf.MLP(64, 128)
        >>> print(mf.quantize_(mlp, "mxfp8", verbose=False))
        minifloat: 3 converted, 0 not; the head: none found
          + gate                mxfp8
          + up                  mxfp8
          + down                mxfp8
          * (the model itself)  gate, up, down and silu are one op
        >>> mlp(torch.ones(2, 64)).shape
        torch.Size([2, 64])
    """

    mlp_parts: Parts | None = None
    class_before: type[nn.Module] | None = None  # of a module that convert_mlps has made one

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        gated: bool = True,
        activation: str = "silu",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        require_int("dim", dim, 0)
        require_int("hidden", hidden, 0)
        require_bool("gated", gated)
        require_one_of("activation", activation, ACTIVATIONS)
        super().__init__()
        linear = partial(nn.Linear, bias=bias, device=device, dtype=dtype)
        if gated:
            self.gate = linear(dim, hidden)
        self.up = linear(dim, hidden)
        self.down = linear(hidden, dim)
        self.mlp_parts = Parts("gate" if gated else None, "up", "down", activation)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the feed-forward of one tensor x: (…, K) -> (…, K).

        A converted module passes other arguments on to its own forward.
        """
        if len(args) == 1 and not kwargs and can_be_one_op(self, args[0]):
            return one_op(self, args[0])
        return self._layer_by_layer(*args, **kwargs)

    def _layer_by_layer(self, x: Tensor) -> Tensor:
        parts = cast(Parts, self.mlp_parts)
        h = self.up(x)
        activation = ACTIVATIONS[parts.activation]
        return self.down(activation(h) if parts.gate is None else activation(self.gate(x)) * h)


# ---- modules of other classes --------------------------------------------------------------------

CLASSES: dict[type, type[MLP]] = {}  # one for all blocks of a model, which share a compiled graph


def mlp_class(before: type) -> type[MLP]:
    """Returns a class whose modules are an MLP, and of the class that they had before."""

    def reduce(self: MLP, protocol: Any) -> Any:
        made = nn.Module.__reduce_ex__(self, max(2, protocol))
        return (new_mlp, (before,), *made[2:]) if type(self) is CLASSES[before] else made

    if before not in CLASSES:
        members = {n: getattr(before, n) for n in ("__module__", "__qualname__", "__doc__")}
        members |= {"__init__": before.__init__, "__reduce_ex__": reduce}  # type: ignore[misc]
        members |= {"_layer_by_layer": cast(Any, before).forward, "class_before": before}
        bases = (MLP, before)
        CLASSES[before] = types.new_class(before.__name__, bases, {}, lambda d: d.update(members))
    return CLASSES[before]


def new_mlp(before: type) -> MLP:
    """Makes an empty module, for copies and pickles of a converted one."""
    made = mlp_class(before)
    return made.__new__(made)


def restore_mlp(module: MLP) -> None:
    """Undoes convert_mlps in place; an MLP that the user has built stays one."""
    before = module.class_before
    if before is not None:
        del module.mlp_parts
        module.__class__ = rebased(type(module), CLASSES[before], before)


# ---- the op --------------------------------------------------------------------------------------


def has_other_hooks(module: nn.Module) -> bool:
    """Tells whether hooks of others than this package see the module's input or output.

    So do hooks of all modules, as torch.nn.modules.module.register_module_forward_hook has them.
    """
    if any(getattr(torch_module, name) for name in OF_ALL_MODULES):
        return True
    for name in HOOKS:
        for hook in getattr(module, name).values():
            owner = getattr(hook, "__self__", hook)
            if hook is not prevent_fast_path and not isinstance(owner, AdvanceRng):
                return True
    return False


def can_be_one_op(module: MLP, x: Any) -> bool:
    """Tells whether the op computes what the module's layers do of this input.

    Not where they are converted under other recipes, or replaced; where hooks see what they return;
    where a weight is a DTensor, or one is codes and another is not; under autocast; of meta and
    nested tensors; and where dtypes or devices differ.
    """
    parts = module.mlp_parts
    if parts is None or not parts.recipe:
        return False
    if type(x) not in TENSORS or x.dtype not in VALUE_DTYPES:
        return False
    if x.is_nested or x.layout != torch.strided or x.device.type == "meta":
        return False
    if torch.is_autocast_enabled(x.device.type):
        return False
    if any(has_other_hooks(child) for child in module.children()):
        return False
    layers = [getattr(module, name) for name in parts.layers]
    for layer in layers:
        if not isinstance(layer, Linear) or "forward" in layer.__dict__:
            return False
        if layer.recipe.text != parts.recipe or layer.accumulate != layers[0].accumulate:
            return False
        weight, bias = layer.weight, layer.bias
        is_codes = isinstance(weight, QuantizedTensor)
        if is_codes != isinstance(layers[0].weight, QuantizedTensor):
            return False
        if not is_codes and type(weight) not in TENSORS:
            return False
        if (weight.dtype, weight.device) != (x.dtype, x.device):
            return False
        if bias is not None and (type(bias) not in TENSORS or bias.dtype != x.dtype):
            return False
    return True


def one_op(module: MLP, x: Tensor) -> Tensor:
    """Computes the feed-forward by the op."""
    parts = cast(Parts, module.mlp_parts)
    layers: list[Linear] = [getattr(module, name) for name in parts.layers]
    sums = sums_of(layers)
    states = [layer.op_state(layer.weight.device) for layer in layers]
    rng = [state["rng"] for state in states if "rng" in state]
    histories = [state["amax_history"] for state in states if "amax_history" in state]
    reads_back = [x.requires_grad] * len(layers)  # of each weight, whether backward does
    reads_back[-1] |= any(p.requires_grad for layer in layers[:-1] for p in layer.parameters())
    codes = [
        codes_of(layer, x, columnwise and torch.is_grad_enabled(), state.get("amax_history"))
        for layer, columnwise, state in zip(layers, reads_back, states)
    ]
    return ops.mlp(
        x,
        [w if w.is_contiguous() else w.contiguous() for w in (layer.weight for layer in layers)],
        [layer.bias for layer in layers],
        parts.recipe,
        parts.activation,
        rng=rng or None,
        amax_history=histories or None,
        streams=[state.get("stream", 0) for state in states],
        weight_operands=None if None in codes else [t for c in codes for t in c or ()],
        recompute=layers[-1].recompute,
        **sums,
    )


def codes_of(
    layer: Linear, x: Tensor, columnwise: bool, amax_history: Tensor | None
) -> list[Tensor] | None:
    """Returns the codes of a weight that is quantized, or cached ones; None: the op casts it.

    columnwise: whether backward reads the weight.
    """
    is_compiling, weight = torch.compiler.is_compiling(), layer.weight
    if layer.weight_gather is not None and not is_compiling:
        layer.weight_gather.complete(weight, columnwise)
    operands = weight_operands(weight, layer.recipe, columnwise, amax_history)
    if operands is not None or is_compiling:
        return operands
    return layer.cached_operands(layer.weight_codes, weight, weight, x, columnwise, amax_history)


def sums_of(layers: list[Linear]) -> dict[str, Any]:
    """Returns main_grads, accumulate and received of the layers, as the op takes them."""
    sums = [weight_sums(layer, layer.weight) for layer in layers]
    trained = [s for s in sums if s]
    if not trained:
        return {}
    received = {s.get("received", "") for s in trained}
    found: dict[str, Any] = {
        "accumulate": trained[0]["accumulate"],
        "received": received.pop() if len(received) == 1 else "zeros",
    }
    if "main_grad" in trained[0]:
        unread = trained[0]["main_grad"].new_empty(0)  # of a frozen weight
        found["main_grads"] = [s.get("main_grad", unread) for s in sums]
    return found
