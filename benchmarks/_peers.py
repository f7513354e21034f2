"""Layers of torchao and Transformer Engine, which the benchmarks time beside ours in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

TORCHAO, TRANSFORMER_ENGINE = "torchao", "transformer_engine"


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

    Its recipes: tensorwise, rowwise, rowwise_with_gw_hp; and blockwise, its prototype of blocks of
    128 with scales that are no powers of two, for its values alone: its kernels are not tuned.
    options: fields of its Float8LinearConfig that replace the recipe's.
    """
    if recipe == "blockwise":
        from torchao.prototype.blockwise_fp8_training import kernels, linear
        from torchao.quantization import quantize_

        quantize_(
            model,
            linear.Float8BlockwiseLinearConfig(),
            filter_fn=lambda module, name: (
                isinstance(module, nn.Linear) and is_converted(module, name)
            ),
        )
        for module in model.modules():
            if isinstance(module, linear.Float8BlockwiseLinear):
                # torch 2.11 does not trace its product, and graph breaks inside take minutes.
                forward: Any = torch.compiler.disable(module.forward)
                module.forward = forward
        for kernel in vars(kernels).values():  # trying 45 choices a shape takes minutes too
            if hasattr(kernel, "configs"):
                kernel.configs = kernel.configs[:1]
        return model
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


def transformer_engine_recipes() -> Iterator[tuple[str, Any]]:
    """Yields names and recipes of FP8 training on Hopper."""
    from transformer_engine.common import recipe

    yield "te delayed", recipe.DelayedScaling()
    yield "te current", recipe.Float8CurrentScaling()
    yield "te blocks", recipe.Float8BlockScaling()


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

        for name, recipe in transformer_engine_recipes():
            linear = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device=device)
            layers[name] = UnderAutocast(linear, recipe)
    return layers
