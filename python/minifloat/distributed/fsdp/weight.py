"""FSDP2 with weights of layers that are gathered as codes: their sharded parameters, and amaxes.

    mf.quantize_(model, "nvfp4")          plans the gathers of each weight (plan.py)
    fully_shard(model)                    assigns each layer its sharded parameter, a DTensor
    Linear.__setattr__                    wraps that DTensor's local tensor: wrap_sharded_weight
    gather                                shards -> codes and scales (batch.py)
                                          -> QuantizedTensors (gathered_weight.py)
    mf.precompute_scales(model)           exchanges the amaxes of all weights in one all-reduce

The parameter is wrapped when FSDP2 has sharded it, not before: FSDP2 assigns through __setattr__
where a module defines one. So without FSDP2 the layer, its parameter, its state dict and its
optimizer do not change. With FSDP2 only the gather sees the wrapper: every other op unwraps it and
returns a torch.Tensor.

FSDP2 frees and fills gathered memory by its storage, so codes that autograd saved are refilled for
backward. Rowwise codes are views of the gathered bytes. Columnwise codes and scales of blocks are
inner tensors. The native batch writes them in place, and torch counts no write.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .all_gather import WeightGather
from .batch import BOTH_GATHERS, Batch, exchange_amaxes
from .fsdp_group import UnknownFsdpError, find_fsdp_group
from .sharded_weight import WeightWithQuantizedGather


def wrap_sharded_weight(layer: nn.Module, parameter: Tensor) -> None:
    """Wraps the local tensor of a parameter that FSDP2 has sharded by rows; leaves any other."""
    plan = layer.__dict__.get("gather_plan")
    if plan is None or not (dist.is_available() and dist.is_initialized()):
        return
    from torch.distributed.tensor import DTensor

    present = layer._parameters.get("weight")
    is_gathered = isinstance(present, DTensor) and present is not parameter
    if not isinstance(parameter, DTensor) or (is_gathered and layer.weight_gather is None):
        return  # is_gathered without a WeightGather: tensor parallelism cuts the weight as well
    local, mesh = parameter._local_tensor, parameter.device_mesh
    dim = row_dim(parameter)
    if type(local) is Tensor and dim is not None:
        gather: Any = layer.weight_gather  # of a parameter that .to or load_state_dict has replaced
        if gather is None:
            shape = parameter.shape[0], parameter.shape[1]
            gather = WeightGather(layer, plan, shape, mesh.get_group(dim))
        local = parameter._local_tensor = WeightWithQuantizedGather(local, gather)
    if isinstance(local, WeightWithQuantizedGather):  # a tied weight may have another layer's
        layer.__dict__["weight_gather"] = local.weight_gather


def row_dim(parameter: Any) -> int | None:
    """Returns the mesh dimension that alone cuts a DTensor, by rows; None where it is cut else."""
    from torch.distributed.tensor import Shard

    cuts = [(dim, p) for dim, p in enumerate(parameter.placements) if not p.is_replicate()]
    if len(cuts) != 1 or type(cuts[0][1]) is not Shard or cuts[0][1].dim != 0:
        return None
    return cuts[0][0]


def require_no_shard(module: nn.Module, fqn: str, weight: Tensor) -> None:
    """Raises ValueError where FSDP2 has sharded a weight that is to be gathered as codes.

    FSDP2 looks for hooks of a gather when it shards a parameter.
    """
    if weight.dim() == 2 and row_dim(weight) is None:
        return  # gathered in the compute dtype
    try:
        find_fsdp_group(module)
    except (LookupError, UnknownFsdpError):
        return
    raise ValueError(
        f"quantize_: expected a model that FSDP2 has not sharded, got {fqn} after fully_shard, "
        "which gathers it without its codes; call mf.quantize_ before fully_shard, or pass "
        "gather='compute_dtype'"
    )


# ---- all weights at once -------------------------------------------------------------------------


def sharded_batches(model: nn.Module) -> dict[dist.ProcessGroup, dict[Batch, list[Tensor]]]:
    """Finds the batches and their shards, by process group.

    Leaves out weights that have not been gathered yet, and those that FSDP2 offloads.
    """
    found: dict[dist.ProcessGroup, dict[Batch, list[Tensor]]] = {}
    for module in model.modules():
        gather = module.__dict__.get("weight_gather")
        if not isinstance(gather, WeightGather) or not gather.is_quantized:
            continue
        parameter: Any = module._parameters["weight"]
        local = getattr(parameter, "_local_tensor", None)
        if not isinstance(local, WeightWithQuantizedGather):
            continue
        if local.shard.device.type != parameter.device_mesh.device_type:
            continue
        batch = gather.batch or gather.joined_batch()
        batches = found.setdefault(gather.group, {})
        if batch not in batches:
            batches[batch] = batch.shards() or [local.shard]
    return found


@torch.no_grad()
def precompute_scales(model: nn.Module) -> None:
    """Exchanges the amaxes of every weight that FSDP2 gathers as codes, in one all-reduce.

    Call it after opt.step(); mf.step calls it. Without this call each gather that needs amaxes of
    other ranks exchanges them itself. Each gather casts its shards, so the codes are the same. The
    amaxes hold until the next write that torch counts, which must be one on all ranks. Writes
    through .data or raw pointers are not counted: call it again after those.

    Args:
        model: a module that fully_shard has sharded, of any floating dtype. Weights that are not
            gathered as codes, and those not gathered yet, are left out.

    Returns:
        None: the native batches hold the amaxes, float32.
    """
    for batches in sharded_batches(model).values():
        exchange_amaxes(list(batches), list(batches.values()), BOTH_GATHERS)
        for batch, shards in batches.items():
            batch.mark_measured(shards)


precompute_float8_dynamic_scale_for_fsdp = precompute_scales  # name in torchao
