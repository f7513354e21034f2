"""Training on several ranks: FSDP2, tensor parallelism, and ZeRO with sharded masters."""

from .ending import destroy_process_group
from .fsdp.gradients import quantize_gradients_
from .fsdp.weight import precompute_scales
from .zero.flat_codes import WireLayout, attach_wires, wires
from .zero.master_weights import post_all_gather_processing, quantize_master_weights

__all__ = [
    "WireLayout",
    "attach_wires",
    "destroy_process_group",
    "post_all_gather_processing",
    "precompute_scales",
    "quantize_gradients_",
    "quantize_master_weights",
    "wires",
]
