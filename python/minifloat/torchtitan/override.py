"""The override "minifloat.torchtitan.override.quantize" for torchtitan 0.3.x.

    --override.imports 'minifloat.torchtitan.override.quantize={"recipe": "fp8_rowwise"}'

torchtitan applies an override to a config before it builds the object. This one takes the model's
config: the model is built as without it, on meta, and then converted. torchtitan's own classes of
modules have a protocol (initial values, sharding), so converted modules are of classes that have it
too. After each step of torchtitan's optimizers mf.step runs.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import override
from torchtitan.models.common.linear import Linear as TitanLinear
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger

from ..nn.convert.quantize import quantize_
from ..nn.grouped_product import GroupedProduct
from ..nn.linear import Linear
from ..nn.state.model_state import step
from .shared import Minifloat, keep_training_state, options_of

ROUTER = ".router."  # of names of layers that choose experts, which stay in high precision


class WholeModule(Module):
    """A converted module in torchtitan's protocol: whole on each rank, or cut by FSDP2."""

    def parallelize(self, parallel_dims: Any) -> None:
        """Applies torchtitan's sharding, which is none here.

        Raises:
            ValueError: tensor or expert parallelism would cut the module.
        """
        if parallel_dims.tp > 1 or parallel_dims.ep > 1:
            raise ValueError(
                "minifloat: expected tensor_parallel_degree 1 and expert_parallel_degree 1 with "
                f"torchtitan 0.3.x, got {parallel_dims.tp} and {parallel_dims.ep}; torchtitan "
                "0.2.x has both"
            )
        super().parallelize(parallel_dims)


class QuantizedLinear(WholeModule, Linear, TitanLinear):
    """torchtitan's Linear under a recipe."""


class QuantizedProduct(WholeModule, GroupedProduct):
    """The state of a product of experts under a recipe."""


def convert_model(model: nn.Module, options: dict[str, Any]) -> None:
    """Converts a model that torchtitan has built by mf.quantize_'s options, and logs the report."""
    if any(ROUTER in fqn for fqn, _ in model.named_modules()):
        options = {**options, "filter_fqns": [*options["filter_fqns"], ROUTER]}
    layers = [module for module in model.modules() if type(module) is TitanLinear]
    for layer in layers:
        layer.__class__ = nn.Linear
    report = quantize_(model, **options)
    for layer in layers:
        layer.__class__ = QuantizedLinear if isinstance(layer, Linear) else TitanLinear
    for module in model.modules():
        if type(module) is GroupedProduct:
            module.__class__ = QuantizedProduct
    end_steps()
    logger.info(str(report))


@override(target=BaseModel.Config, description="linear layers and experts under a recipe")
def quantize(cfg: BaseModel.Config, **settings: Any) -> BaseModel.Config:
    """Makes torchtitan's model config build a converted model.

    Args:
        cfg: of the model.
        settings: fields of minifloat.torchtitan.Minifloat; recipe is required.

    Returns:
        The same object, because torchtitan builds the model from the config that it had before
        overrides. Its class is derived from its former one.

    Raises:
        TypeError, ValueError: a keyword is no field, or no recipe is set.
    """
    options, former = options_of(Minifloat(**settings)), type(cfg)

    @dataclass(kw_only=True, slots=True)
    class Config(former):  # type: ignore[misc, valid-type]
        def build(self, **kwargs: object) -> nn.Module:
            model: nn.Module = former.build(self, **kwargs)
            convert_model(model, options)
            return model

    cfg.__class__ = Config
    return cfg


@cache
def end_steps() -> None:
    """Makes mf.step run after each step of torchtitan's optimizers, from now on."""
    register_optimizer_step_post_hook(end_step)


def end_step(optimizer: object, args: object, kwargs: object) -> None:
    """Calls mf.step for the parts of the model that the optimizers train, once on each rank.

    In a pipeline they are stages, copies of parts of the converted model; also one that has no
    converted layer, because the ranks of the others wait for all.
    """
    if isinstance(optimizer, OptimizersContainer):  # not one of those within the container
        parts = optimizer.model_parts
        step(parts[0] if len(parts) == 1 else nn.ModuleList(parts))


keep_training_state(CheckpointManager)
