"""minifloat: training in 8- and 4-bit floating point, with one numerics on every device.

import minifloat as mf
mf.quantize_(model, "nvfp4")          converts linear layers; its report says which
...
loss.backward(); opt.step(); mf.step(model)

What this module does not name itself, its submodules do:

    tensor        casts, their codes and scales, transforms, products of codes
    functional    products of values under a recipe
    nn, moe       construction of quantized models; the balance of experts
    distributed   gathers and gradients as codes, sharded masters, the end of a process
    lab           casts by rules of your own, and the errors of casts
    inspector     a guard against steps that are not finite
"""

from . import distributed, functional, lab, moe, nn, tensor
from . import function_transforms as _function_transforms  # registers kernels of layers' ops
from ._native import ops as _ops  # loads the operators; keep it before the rest
from ._version import __version__ as __version__
from .distributed import register as _register_distributed  # functions that layers call
from .engine_choice import engines
from .functional import linear
from .graphed_step import GraphedStep
from .inspector.inspect import inspect
from .moe import register as _register_moe  # functions for models with experts
from .moe.grouped_mlp import grouped_mlp
from .moe.layer import MoE
from .moe.ranks.expert_parallel import expert_parallel
from .nn.checkpoint_policy import checkpoint_policy
from .nn.convert.quantize import quantize_
from .nn.convert.selection import Report
from .nn.fuse.mlp import MLP
from .nn.linear import Linear
from .nn.state.model_state import load_training_state, step, training_state
from .recipe import Recipe, RecipeMap, presets
from .serving.calibrate import calibrate
from .serving.export import export
from .serving.load import load_quantized_
from .serving.restore import restore_
from .tensor.quantized_tensor import QuantizedTensor

__all__ = [
    "MLP",
    "GraphedStep",
    "Linear",
    "MoE",
    "QuantizedTensor",
    "Recipe",
    "RecipeMap",
    "Report",
    "calibrate",
    "checkpoint_policy",
    "engines",
    "expert_parallel",
    "export",
    "grouped_mlp",
    "inspect",
    "linear",
    "load_quantized_",
    "load_training_state",
    "presets",
    "quantize_",
    "restore_",
    "step",
    "training_state",
]
