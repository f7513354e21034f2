"""Fast paths of torch that read a layer's weight without calling the layer.

Their use is prevented where the layer is converted.

    nn.TransformerEncoderLayer    in evaluation without gradients, one fused op reads the weights of
                                  linear1 and linear2. torch does not take this path where a module
                                  inside has a forward hook. A converted layer has such a hook until
                                  it is restored.
    nn.TransformerEncoder         makes a nested tensor of a padded batch. Only the fused op reads
                                  nested tensors, so `use_nested_tensor` is False until the layers
                                  are restored.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..names import clean_name
from ..state.recipe_state import RecipeState

NESTED_TENSOR_BEFORE = "_use_nested_tensor_before_quantize"


def prevent_fast_path(module: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Refuses a nested tensor. The presence of this hook prevents the fused op of the parent."""
    if args and args[0].is_nested:
        raise ValueError(
            "a converted layer: expected a dense input, got a nested tensor; convert the "
            "nn.TransformerEncoder itself, or build it with enable_nested_tensor=False"
        )


def disable_fast_path(layer: nn.Module) -> None:
    """Makes torch's parent module call the layer instead of reading its weight."""
    if prevent_fast_path not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(prevent_fast_path)


def enable_fast_path(layer: nn.Module) -> None:
    """Reverts disable_fast_path."""
    for key, hook in list(layer._forward_pre_hooks.items()):
        if hook is prevent_fast_path:
            del layer._forward_pre_hooks[key]


def disable_fast_paths_in(model: nn.Module) -> list[tuple[str, str]]:
    """Disables all fast paths that would read a converted layer's weight.

    Args:
        model: the module that mf.quantize_ converted.

    Returns:
        (name, sentence for the report) of each module whose fast path was on.
    """
    notes = []
    if isinstance(model, RecipeState):  # a module has no reference to its parents
        disable_fast_path(model)
    for raw_fqn, module in model.named_modules():
        fqn = clean_name(raw_fqn)
        if not isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)):
            continue
        inside = [layer for layer in module.modules() if isinstance(layer, RecipeState)]
        if not inside:
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            for layer in inside:
                disable_fast_path(layer)
            notes.append((fqn, "torch's fused inference is off: it would skip converted layers"))
        elif getattr(module, "use_nested_tensor", False):
            setattr(module, NESTED_TENSOR_BEFORE, module.use_nested_tensor)
            module.use_nested_tensor = False
            notes.append((fqn, "torch's nested tensors are off: converted layers read dense ones"))
    return notes


def enable_fast_paths_in(model: nn.Module) -> None:
    """Enables nested tensors of nn.TransformerEncoder again where no converted layer is left."""
    for module in model.modules():
        if NESTED_TENSOR_BEFORE not in module.__dict__:
            continue
        if not any(isinstance(layer, RecipeState) for layer in module.modules()):
            module.use_nested_tensor = module.__dict__.pop(NESTED_TENSOR_BEFORE)
