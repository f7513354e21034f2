"""Fast paths of torch that read a layer's weight without calling the layer. They are off where the
layer is converted.

    nn.TransformerEncoderLayer    in evaluation without gradients, one fused op reads the weights of
                                  linear1 and linear2. torch does not take this path where a module
                                  inside has a forward hook: a converted layer gets one, and loses
                                  it when it is restored.
    nn.TransformerEncoder         makes a nested tensor of a padded batch, which only the fused op
                                  can read: `use_nested_tensor` is False until its layers are
                                  restored.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import nn

NESTED_TENSOR_BEFORE = "_use_nested_tensor_before_quantize"


def prevent_fast_path(module: nn.Module, args: Any) -> None:
    """Turns off the fused op of the parent by its presence; refuses what only that op can read."""
    if args and args[0].is_nested:
        raise ValueError(
            "a converted layer: expected a dense input, got a nested tensor; convert the "
            "nn.TransformerEncoder itself, or build it with enable_nested_tensor=False"
        )


def turn_off(layer: nn.Module) -> None:
    """Makes a parent of torch call the layer instead of reading its weight."""
    if prevent_fast_path not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(prevent_fast_path)


def turn_on(layer: nn.Module) -> None:
    """Takes back turn_off."""
    for key, hook in list(layer._forward_pre_hooks.items()):
        if hook is prevent_fast_path:
            del layer._forward_pre_hooks[key]


def turn_off_in(model: nn.Module, converted: Container[nn.Module]) -> list[tuple[str, str]]:
    """Turns off all fast paths that would read a converted layer's weight.

    Args:
        model: the module that mf.quantize_ converted.
        converted: the layers that are converted now.

    Returns:
        (name, sentence for the report) of each module whose fast path was on.
    """
    notes = []
    if model in converted:  # its parents are out of sight
        turn_off(model)
    for fqn, module in model.named_modules():
        if not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
            continue
        inside = [layer for layer in module.modules() if layer in converted]
        if not inside:
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            for layer in inside:
                turn_off(layer)
            notes.append((fqn, "torch's fused inference is off: it would skip converted layers"))
        elif getattr(module, "use_nested_tensor", False):
            setattr(module, NESTED_TENSOR_BEFORE, module.use_nested_tensor)
            module.use_nested_tensor = False
            notes.append((fqn, "torch's nested tensors are off: converted layers read dense ones"))
    return notes


def turn_on_in(model: nn.Module, converted: Container[nn.Module]) -> None:
    """Gives nn.TransformerEncoder its nested tensors back where no converted layer is left."""
    for module in model.modules():
        if NESTED_TENSOR_BEFORE not in module.__dict__:
            continue
        if not any(layer in converted for layer in module.modules()):
            module.use_nested_tensor = module.__dict__.pop(NESTED_TENSOR_BEFORE)
