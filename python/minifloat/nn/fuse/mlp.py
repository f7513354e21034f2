"""A feed-forward as one op: down(act(gate(x)) * up(x)), or down(act(up(x))).

The op casts the hidden tensor as it computes it, and saves none for backward. MLP calls it, and so
do modules that mf.quantize_(…, fuse=True) has converted to a class derived from MLP in place
(nn/fuse/find_mlps.py): object, parameters, hooks and state-dict keys stay.

Where the op would not compute what the layers do, forward calls them one by one; `layers_read`
lists these cases. The bits differ by the activation alone, which the op rounds once. The forward
of a converted module's own class is called then: so it computes what that class says now.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..._native import ops
from ...checks import require_bool, require_int, require_one_of
from ...private_torch import tracing_state
from ...tensor.quantized_tensor import QuantizedTensor
from ..accumulation import weight_sums
from ..convert.reads import NOTHING, Reads, first_change, has_hooks, hook_of
from ..linear import Linear, rebased
from ..linear_state import parameter_of, weight_operands
from .match import match_forward

TENSORS = (nn.Parameter, Tensor)
VALUE_DTYPES = (torch.float32, torch.bfloat16)  # of the op's x
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {  # by the op's names
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


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


class LayerRead(NamedTuple):
    """A layer, and the parameters of one forward: a parametrization computes them at each read."""

    layer: Linear
    weight: Tensor
    bias: Tensor | None


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
        >>> print(mf.quantize_(mlp, "mxfp8"))
        minifloat: 3 converted, 0 not; the head: none found
          + gate                mxfp8
          + up                  mxfp8
          + down                mxfp8
          * (the model itself)  gate, up, down and silu are one op
        >>> mlp(torch.ones(2, 64)).shape
        torch.Size([2, 64])
    """

    mlp_parts: Parts | None = None
    mlp_reads: Reads | None = None  # of the match; None: the layers are called one by one
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
        if not isinstance(self, MLP):  # kept by a wrapper past mf.restore_
            return type(self).forward(self, *args, **kwargs)
        read = layers_read(self, args[0]) if len(args) == 1 and not kwargs else None
        if read is not None:
            return one_op(self, args[0], read)
        return self._layer_by_layer(*args, **kwargs)

    def _layer_by_layer(self, x: Tensor) -> Tensor:
        parts = cast(Parts, self.mlp_parts)
        h = self.up(x)
        activation = ACTIVATIONS[parts.activation]
        return self.down(activation(h) if parts.gate is None else activation(self.gate(x)) * h)


def match_mlp(module: nn.Module, layers: dict[str, Linear]) -> tuple[Parts, Reads]:
    """Returns the parts of a module's feed-forward, and what its forward looks up.

    Raises:
        ValueError: the module is none.
    """
    for name, layer in layers.items():
        if hook := hook_of(layer):
            raise ValueError(f"{name} has a {hook}")
    if len({*layers.values()}) < len(layers):
        raise ValueError("one of its layers has two names")
    before = module.class_before if isinstance(module, MLP) else type(module)
    if before is None:  # built as an MLP, whose parts are what it computes
        parts = cast(Parts, module.mlp_parts)
        if set(parts.layers) != set(layers):
            raise ValueError(f"its linear layers are not {', '.join(parts.layers)}")
        return parts, NOTHING
    activation, names, reads = match_forward(module, before, layers)
    made = mlp_class(before).__mro__
    reads = reads._replace(mro=made[made.index(MLP) :])
    gate = names[0] if len(names) == 3 else None
    return Parts(gate, names[-2], names[-1], activation), reads


# ---- modules of other classes --------------------------------------------------------------------

CLASSES: dict[type, type[MLP]] = {}  # one for all blocks of a model, which share a compiled graph


def mlp_class(before: type) -> type[MLP]:
    """Returns a class whose modules are an MLP, and of the class that they had before."""

    def layer_by_layer(self: MLP, *args: Any, **kwargs: Any) -> Any:
        return cast(Any, super(MLP, self)).forward(*args, **kwargs)

    def reduce(self: MLP, protocol: Any) -> Any:
        made = cast(tuple[Any, ...], nn.Module.__reduce_ex__(self, max(2, protocol)))
        if type(self) is not CLASSES[before]:
            return made
        state = made[2:] or (self.__dict__,)  # of a __reduce__ that would build another module
        return (new_mlp, (before,), *state)

    def setstate(self: MLP, state: Any) -> None:
        cast(Any, super(MLP, self)).__setstate__(state)
        parts = self.mlp_parts
        if parts is None:
            return
        layers = {n: m for n in parts.layers if is_layer(m := self._modules.get(n))}
        try:
            found, reads = match_mlp(self, layers)
        except Exception:  # of a cycle of references, whose other objects have no state yet
            return
        if found == parts._replace(recipe=""):
            self.mlp_reads = reads

    if before not in CLASSES:
        members = {n: getattr(before, n) for n in ("__module__", "__qualname__", "__doc__")}
        members |= {"__init__": before.__init__, "__reduce_ex__": reduce}  # type: ignore[misc]
        members |= {"_layer_by_layer": layer_by_layer, "class_before": before}
        members |= {"__setstate__": setstate}
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
    module.__dict__.pop("mlp_reads", None)
    if before is not None:
        del module.mlp_parts
        module.__class__ = rebased(type(module), CLASSES[before], before)


# ---- the op --------------------------------------------------------------------------------------


def layers_read(module: MLP, x: Any) -> list[LayerRead] | None:
    """Reads the layers where the op computes what they do of this input, in its order; else None.

    None where they are converted under other recipes, or replaced; where what the module's own
    forward reads has changed; where hooks see what its parts return; where layers share an amax;
    where a weight is a DTensor, or one is codes and another is not; under autocast; in a trace of
    torch.jit, which takes no op with a list of biases; of meta and nested tensors; and where dtypes
    or devices differ.
    """
    parts, reads = module.mlp_parts, module.mlp_reads
    if parts is None or reads is None or not parts.recipe:
        return None
    if type(x) not in TENSORS or (dtype := x.dtype) not in VALUE_DTYPES:
        return None
    device = x.device
    if x.is_nested or x.layout is not torch.strided or device.type == "meta":
        return None
    is_traced = not torch.compiler.is_compiling() and tracing_state() is not None
    if is_traced or torch.is_autocast_enabled(device.type):
        return None
    if (
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    ):
        return None
    mro = type(module).__mro__
    if mro[len(mro) - len(reads.mro) :] != reads.mro:
        return None
    if first_change(reads, module) is not None:
        return None
    first = None
    found: list[LayerRead] = []
    for name in parts.layers:
        layer = getattr(module, name, None)
        if not is_layer(layer) or layer.recipe.text != parts.recipe or has_hooks(layer):
            return None
        if layer.amax_group is not None:  # whose codes the layer makes
            return None
        if torch.compiler.is_compiling():
            _ = layer.forward  # which is guarded then, as a read of __dict__ is not
        weight, bias = parameter_of(layer, "weight"), parameter_of(layer, "bias")
        are_codes = type(weight) not in TENSORS
        if are_codes and not isinstance(weight, QuantizedTensor):
            return None
        if weight.dtype is not dtype or weight.device != device:
            return None
        if bias is not None and (type(bias) not in TENSORS or bias.dtype != dtype):
            return None
        of_layer = layer.accumulate, are_codes
        if first is not None and first != of_layer:
            return None
        first = of_layer
        found.append(LayerRead(layer, weight, bias))
    return found


def is_layer(layer: Any) -> TypeGuard[Linear]:
    """Tells whether a module is a linear layer whose forward is this package's."""
    cls = type(layer)
    if cls is not Linear and not (
        issubclass(cls, Linear)  # as fully_shard and parametrize derive one
        and cls.forward is Linear.forward
        and cls.__call__ is Linear.__call__
    ):
        return False
    return "forward" not in layer.__dict__


def one_op(module: MLP, x: Tensor, read: list[LayerRead]) -> Tensor:
    """Computes the feed-forward by the op."""
    parts = cast(Parts, module.mlp_parts)
    sums = sums_of(read)
    states = [layer.op_state(weight.device) for layer, weight, _ in read]
    rng = [state["rng"] for state in states if "rng" in state]
    histories = [state["amax_history"] for state in states if "amax_history" in state]
    reads_back = [x.requires_grad] * len(read)  # of each weight, whether backward does
    reads_back[-1] |= any(p.requires_grad for r in read[:-1] for p in r.layer.parameters())
    is_compiling, is_grad_enabled = torch.compiler.is_compiling(), torch.is_grad_enabled()
    codes = [
        codes_of(r, x, columnwise and is_grad_enabled, state.get("amax_history"), is_compiling)
        for r, columnwise, state in zip(read, reads_back, states)
    ]
    return ops.mlp(
        x,
        [w if w.is_contiguous() else w.contiguous() for _, w, _ in read],
        [bias for _, _, bias in read],
        parts.recipe,
        parts.activation,
        rng=rng or None,
        amax_history=histories or None,
        streams=[state.get("stream", 0) for state in states],
        weight_operands=None if None in codes else [t for c in codes for t in c or ()],
        recompute=read[-1].layer.recompute,
        **sums,
    )


def codes_of(
    read: LayerRead, x: Tensor, columnwise: bool, amax_history: Tensor | None, is_compiling: bool
) -> list[Tensor] | None:
    """Returns the codes of a weight that is quantized, or cached ones; None: the op casts it.

    columnwise: whether backward reads the weight.
    """
    layer, weight, _ = read
    if layer.weight_gather is not None and not is_compiling:
        layer.weight_gather.complete(weight, columnwise)
    operands = weight_operands(weight, layer.recipe, columnwise, amax_history)
    if operands is not None or is_compiling:
        return operands
    return layer.cached_operands(layer.weight_codes, weight, weight, x, columnwise, amax_history)


def sums_of(read: list[LayerRead]) -> dict[str, Any]:
    """Returns main_grads, accumulate and received of the layers, as the op takes them."""
    sums = [weight_sums(layer, weight) for layer, weight, _ in read]
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
