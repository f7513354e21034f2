"""Layers of torchao and Transformer Engine, which the benchmarks time beside ours in one run."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

TORCHAO, TRANSFORMER_ENGINE = "torchao", "transformer_engine"
OF_PEERS = "torchao_", "te_"  # begin the name of a run under a peer's recipe: te_blocks


def installed(*peers: str) -> list[str]:
    """Returns the peers that can be imported."""
    return [peer for peer in peers if find_spec(peer)]


def convert_by_torchao(
    model: nn.Module,
    recipe: str,
    is_converted: Callable[[nn.Module, str], bool] = lambda module, name: True,
    **options: Any,
) -> nn.Module:
    """Converts the linear layers of a model to torchao's FP8.

    Its recipes: tensorwise, rowwise, rowwise_with_gw_hp.
    options: fields of its Float8LinearConfig that replace the recipe's.
    """
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = replace(Float8LinearConfig.from_recipe_name(recipe), **options)
    return convert_to_float8_training(model, config=config, module_filter_fn=is_converted)


class UnderAutocast(nn.Module):
    """A module of Transformer Engine, under one of its recipes or, without one, in bf16."""

    def __init__(self, module: nn.Module, recipe: Any) -> None:
        import transformer_engine.pytorch as te

        super().__init__()
        self.module, self.recipe, self.autocast = module, recipe, te.autocast

    def forward(self, x: Tensor) -> Tensor:
        with self.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.module(x)


def transformer_engine_recipes() -> dict[str, Any]:
    """Returns its recipes of FP8 training on Hopper, by name."""
    from transformer_engine.common import recipe

    return {
        "te delayed": recipe.DelayedScaling(),
        "te current": recipe.Float8CurrentScaling(),
        "te blocks": recipe.Float8BlockScaling(),
    }


def multiply_by_transformer_engine(
    model: nn.Module, recipe: Any, is_converted: Callable[[nn.Module, str], bool]
) -> None:
    """Has Transformer Engine multiply in a model's linear layers, under one of its recipes.

    The layers keep their names and parameters. A compiled model breaks its graph at each.
    """
    import transformer_engine.pytorch as te

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_converted(module, name):
            like = {"device": module.weight.device, "params_dtype": module.weight.dtype}
            layer = te.Linear(module.in_features, module.out_features, bias=False, **like)
            layer.weight = module.weight
            forward: Any = torch.compiler.disable(UnderAutocast(layer, recipe).forward)
            module.forward = forward


def convert_by_peer(
    model: nn.Module, name: str, is_converted: Callable[[nn.Module, str], bool]
) -> None:
    """Converts the linear layers of a model by a peer: torchao_RECIPE, or te_RECIPE."""
    peer, _, recipe = name.partition("_")
    if peer == TORCHAO:
        convert_by_torchao(model, recipe, is_converted)
    else:
        recipes = transformer_engine_recipes()
        multiply_by_transformer_engine(model, recipes[f"te {recipe}"], is_converted)


def linear_layers(k: int, n: int, device: torch.device) -> dict[str, nn.Module]:
    """Returns a linear layer of each recipe of the peers: torchao's compiled, as it recommends."""
    layers: dict[str, nn.Module] = {}
    peers = installed(TORCHAO, TRANSFORMER_ENGINE)
    if TORCHAO in peers:
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
            linear = nn.Linear(k, n, bias=False, device=device, dtype=torch.bfloat16)
            model = convert_by_torchao(nn.Sequential(linear), recipe)
            layers[f"torchao {recipe}, compiled"] = torch.compile(model)
    if TRANSFORMER_ENGINE in peers:
        import transformer_engine.pytorch as te

        for name, recipe in transformer_engine_recipes().items():
            linear = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device=device)
            layers[name] = UnderAutocast(linear, recipe)
    return layers
