"""minifloat: training in 8- and 4-bit floating point, with one numerics on every device.

import minifloat as mf
mf.quantize_(model, "nvfp4")          converts linear layers, and prints which ones
...
loss.backward(); opt.step(); mf.step(model)
"""

from . import function_transforms as _function_transforms  # registers kernels of layers' ops
from ._native import ops as _ops  # loads the operators; keep it before the rest
from ._version import __version__
from .distributed import register as _register_distributed  # functions that layers call
from .distributed.ending import destroy_process_group
from .distributed.fsdp.gradients import quantize_gradients_
from .distributed.fsdp.weight import precompute_float8_dynamic_scale_for_fsdp, precompute_scales
from .distributed.zero.flat_codes import WireLayout, attach_wires, wires
from .distributed.zero.master_weights import (
    cast_master_weights_to_nvfp4,
    post_all_gather_processing,
    quantize_master_weights,
)
from .engine_choice import Engine, engines
from .functional import linear, linear_group, scaled_grouped_mm
from .inspector.inspect import inspect
from .inspector.inspection import Inspection
from .lab.errors import Errors, errors
from .lab.rules import Rule, fake_quantize, round_to
from .moe import register as _register_moe  # functions for models with experts
from .moe.balance import balance_loss
from .moe.grouped_mlp import grouped_mlp
from .moe.layer import MoE
from .moe.ranks.expert_parallel import expert_parallel
from .moe.ranks.gradients import average_expert_gradients
from .nn.convert.construction import quantized_model_init
from .nn.convert.filters import auto_filter_small_kn
from .nn.convert.quantize import quantize_, restore_
from .nn.convert.selection import Report
from .nn.fuse.mlp import MLP
from .nn.linear import Linear
from .nn.state.model_state import load_training_state, step, training_state
from .recipe import Product, Recipe, RecipeMap, presets
from .tensor.quantized import Quantized, amax, dequantize, quantize
from .tensor.quantized_tensor import QuantizedTensor
from .tensor.scaled_mm import scaled_mm
from .tensor.transforms import (
    check_groups,
    group_table,
    hadamard,
    swizzle_scales,
    transpose_codes,
    unswizzle_scales,
)

__all__ = [
    "MLP",
    "Engine",
    "Errors",
    "Inspection",
    "Linear",
    "MoE",
    "Product",
    "Quantized",
    "QuantizedTensor",
    "Recipe",
    "RecipeMap",
    "Report",
    "Rule",
    "WireLayout",
    "amax",
    "attach_wires",
    "auto_filter_small_kn",
    "average_expert_gradients",
    "balance_loss",
    "cast_master_weights_to_nvfp4",
    "check_groups",
    "dequantize",
    "destroy_process_group",
    "engines",
    "errors",
    "expert_parallel",
    "fake_quantize",
    "group_table",
    "grouped_mlp",
    "hadamard",
    "inspect",
    "linear",
    "linear_group",
    "load_training_state",
    "post_all_gather_processing",
    "precompute_float8_dynamic_scale_for_fsdp",
    "precompute_scales",
    "presets",
    "quantize",
    "quantize_",
    "quantize_gradients_",
    "quantize_master_weights",
    "quantized_model_init",
    "restore_",
    "round_to",
    "scaled_grouped_mm",
    "scaled_mm",
    "step",
    "swizzle_scales",
    "training_state",
    "transpose_codes",
    "unswizzle_scales",
    "wires",
]
