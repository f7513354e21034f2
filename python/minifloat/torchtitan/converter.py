"""The model converter "minifloat" for torchtitan 0.2.x.

    torchtitan builds the model on meta -> convert -> parallelism, checkpointing, torch.compile,
    FSDP2 -> memory and initial weights -> training, with mf.step after each optimizer step

torchtitan reads the types of fields, so annotations here are evaluated.
"""

import sys
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import JobConfig as TitanConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools.logging import logger

from .._native import ops
from ..nn.checkpoint_policy import PRODUCTS
from ..nn.convert.quantize import quantize_
from ..nn.state.model_state import step
from .shared import Minifloat, keep_training_state, options_of

NAME = "minifloat"  # in model.converters


@dataclass
class JobConfig:
    """What job.custom_config_module adds to torchtitan's config.

    Args:
        minifloat: the section [minifloat].
    """

    minifloat: Minifloat = field(default_factory=Minifloat)


class Converter:
    """Converts a model's linear layers and experts, and ends its training steps.

    Args:
        job_config: torchtitan's, with the section [minifloat].
        parallel_dims: torchtitan's parallel dimensions.

    Raises:
        ValueError: the section is absent, or names no recipe.
    """

    def __init__(self, job_config: TitanConfig, parallel_dims: ParallelDims) -> None:
        settings = getattr(job_config, NAME, None)
        if settings is None:
            raise ValueError(
                "minifloat: expected the section [minifloat] in the job config, got none; set "
                "job.custom_config_module (--job.custom_config_module) to minifloat.torchtitan"
            )
        self.options, self.parallel_dims = options_of(settings), parallel_dims
        self.is_selective = job_config.activation_checkpoint.mode == "selective"
        self.group = group_of_step(parallel_dims)

    def convert(self, model: nn.Module) -> None:
        """Converts the model in place, and logs which layers, with the reasons for all others.

        Raises:
            ValueError: tensor parallelism would cut experts that the recipe names, or
                mf.quantize_ refuses the settings.
        """
        mesh = self.parallel_dims.get_optional_mesh("loss")
        rank = 0 if mesh is None else mesh.get_local_rank()
        report = quantize_(model, data_parallel_rank=rank, **self.options)
        require_whole_experts(model, {fqn for fqn, _ in report.converted}, self.parallel_dims)
        if self.is_selective:
            save_products()
        logger.info(str(report))

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Calls mf.step for each part of the model."""
        for part in model if isinstance(model, list) else [model]:
            step(part, self.group)


def group_of_step(parallel_dims: ParallelDims) -> dist.ProcessGroup | None:
    """Finds the ranks that have the same layers as this one, whose amaxes mf.step reduces."""
    for name in ("loss", "tp"):
        if (mesh := parallel_dims.get_optional_mesh(name)) is not None:
            group: dist.ProcessGroup = mesh.get_group()
            return group
    if parallel_dims.get_optional_mesh("pp") is None:
        return None
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)


def require_whole_experts(
    model: nn.Module, converted: set[str], parallel_dims: ParallelDims
) -> None:
    """Raises ValueError where tensor parallelism would cut converted experts."""
    is_cut = parallel_dims.tp_enabled and (
        parallel_dims.etp_enabled or not parallel_dims.ep_enabled
    )
    for fqn, module in model.named_modules():
        if is_cut and type(module).__name__ == "GroupedExperts" and f"{fqn}.w1" in converted:
            raise ValueError(
                f"minifloat: {fqn}: expected experts that stay whole under tensor parallelism "
                "(expert_parallel_degree above 1 and expert_tensor_parallel_degree 1), got "
                f"tp {parallel_dims.tp}, ep {parallel_dims.ep}, etp {parallel_dims.etp}; or leave "
                'experts out: add "experts" to minifloat.filter_fqns'
            )


def save_products() -> None:
    """Makes selective checkpointing save products of codes, as it saves torch's products.

    Casts run again in backward. Each torchtitan model has a list of the ops that are saved.
    """
    products = {*PRODUCTS, ops.scaled_grouped_mm.default}
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.models.") and name.endswith(".infra.parallelize"):
            saved: set[object] = getattr(module, "_op_sac_save_list", set())
            saved.update(products)


register_model_converter(Converter, NAME)
keep_training_state(CheckpointManager)
