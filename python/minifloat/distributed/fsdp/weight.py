"""Wraps the sharded parameters that FSDP2 gathers as codes, and exchanges their amaxes.

    mf.quantize_(model, "nvfp4")          plans the gathers of each weight (gather.py)
    fully_shard(model)                    assigns each layer its sharded parameter, a DTensor
    Linear.__setattr__                    wraps that DTensor's local tensor: wrap_sharded_weight
    FSDP2's hooks of the wrapper          ShardedWeight (weight_tensors.py)
    gather                                shards -> codes and scales -> GatheredWeights (gather.py)
    precompute_scales(model)              exchanges the amaxes of all weights in one all-reduce

FSDP2 assigns a sharded parameter through __setattr__ where a module defines one. The parameter is
wrapped there, and not before. So without FSDP2 the layer, its parameter, its state dict and its
optimizer do not change. With FSDP2 the gather alone uses the wrapper: every other op unwraps it and
returns a torch.Tensor.

FSDP2 frees and fills the storages of gathered tensors. So tensors of codes that autograd saved in
forward have their codes again in backward. Native code writes them in place, and torch counts no
write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...nn.grouped_product import GroupedProduct
from ...nn.linear import Linear
from ...nn.registry import is_distributed
from ..handshake import require_same
from .expert_gather import ExpertGather
from .gather import BOTH_GATHERS, Gather, GatherPlan
from .gather_batch import Batch, exchange_amaxes
from .linear_gather import LinearGather
from .private_state import UnknownFsdpError, find_fsdp_group
from .weight_tensors import ShardedWeight

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


ALL_STEP = "precompute_scales: expected all {} ranks to call it, or mf.step, for {}"
SAME_WEIGHTS = "precompute_scales: expected all ranks to have gathered the same weights"


def wrap_sharded_weight(module: nn.Module, parameter: Tensor) -> None:
    """Wraps the local tensor of a parameter that FSDP2 has sharded by rows; leaves any other."""
    layer = cast(Linear, module)
    plan = layer.gather_plan
    present: Tensor | None = layer._parameters.get("weight")
    if not isinstance(plan, GatherPlan) or not is_distributed(parameter):
        return
    is_divided = present is not None and present is not parameter and is_distributed(present)
    if is_divided and layer.weight_gather is None:
        return  # tensor parallelism cuts the weight as well
    wrap(layer, parameter, lambda group: LinearGather(layer, plan, parameter.shape, group))


def wrap_sharded_experts(
    module: nn.Module, product: GroupedProduct, before: Any, parameter: Tensor
) -> None:
    """Wraps the local tensor of a 3D parameter that FSDP2 has cut along dimension 0.

    Args:
        module: it has the parameter.
        product: of the parameter.
        before: the parameter until now. Where it is a DTensor, its mesh is expert parallelism's.
        parameter: the new one. Any other than FSDP2's is left as it is.
    """
    if product.gather_plan is None or not is_distributed(parameter):
        return
    known = product.weight_gather
    if isinstance(known, ExpertGather):
        outer_dims, shape = known.outer_dims, known.shape
    else:
        outer_dims = before.device_mesh.ndim if is_distributed(before) else 0
        shape = getattr(before, "_local_tensor", before).shape
    outer = parameter.placements[parameter.device_mesh.ndim - outer_dims :]
    if any(getattr(placement, "dim", 0) != 0 for placement in outer):
        return  # ranks cut the experts' matrices, so no rank can cast one alone
    wrap(
        product,
        parameter,
        lambda group: ExpertGather(module, product, shape, group, outer_dims),
        outer_dims,
    )


def wrap(
    owner: Linear | GroupedProduct,
    parameter: DTensor,
    new_gather: Callable[[dist.ProcessGroup], Gather],
    outer_dims: int = 0,
) -> None:
    """Wraps the local tensor of a parameter that FSDP2 has cut along dimension 0 over live ranks.

    Args:
        owner: it has the gather, from an earlier parameter or of another layer's tied weight.
        parameter: FSDP2's.
        new_gather: group of ranks -> the gather of the first parameter.
        outer_dims: dimensions of the mesh that are not FSDP2's.
    """
    local, mesh = parameter._local_tensor, parameter.device_mesh
    dim = dim_of_rows(parameter, outer_dims)
    if type(local) is Tensor and dim is not None and dist.is_initialized():
        known = owner.weight_gather  # of a parameter that .to or load_state_dict has replaced
        gather = known if isinstance(known, Gather) else new_gather(mesh.get_group(dim))
        local = parameter._local_tensor = ShardedWeight(local, gather)
    if isinstance(local, ShardedWeight):
        owner.__dict__["weight_gather"] = local.weight_gather
        local.weight_gather.forget()


def dim_of_rows(parameter: DTensor, outer_dims: int = 0) -> int | None:
    """Returns the mesh dimension that alone cuts a DTensor, along dimension 0; None: cut else."""
    inner = parameter.placements[: parameter.device_mesh.ndim - outer_dims]
    cuts = [(dim, p) for dim, p in enumerate(inner) if not p.is_replicate()]
    if len(cuts) != 1 or getattr(cuts[0][1], "dim", None) != 0:
        return None
    return cuts[0][0]


def require_no_shard(module: nn.Module, fqn: str, weight: Tensor) -> None:
    """Raises ValueError where FSDP2 has sharded a weight that is to be gathered as codes.

    FSDP2 looks for hooks of a gather when it shards a parameter.
    """
    if weight.dim() == 2 and is_distributed(weight) and dim_of_rows(weight) is None:
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


def sharded_batches(modules: Iterable[nn.Module]) -> dict[dist.ProcessGroup, list[Batch]]:
    """Finds the batches, by process group.

    Leaves out weights that have not been gathered yet, those that FSDP2 offloads, and those whose
    gathers a CUDA graph has captured: they measure their shards.
    """
    found: dict[dist.ProcessGroup, list[Batch]] = {}
    seen: set[Batch | None] = set()
    for module in modules:
        gather = module.__dict__.get("weight_gather")
        if not isinstance(gather, LinearGather) or gather.batch in seen or not gather.is_quantized:
            continue
        batch = gather.joined_batch()
        if not batch.is_current:
            parameter: Any = module._parameters["weight"]
            local = getattr(parameter, "_local_tensor", None)
            if not isinstance(local, ShardedWeight):
                continue
            if local.shard.device.type != parameter.device_mesh.device_type:
                continue
            if not batch.shards():
                batch.hold([local.shard])
        seen.add(batch)
        if not batch.is_captured:
            found.setdefault(gather.group, []).append(batch)
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
            gathered as codes, those not gathered yet, and those whose gathers a CUDA graph has
            captured are left out.

    Returns:
        None: the native batches hold the amaxes, float32.

    Raises:
        ValueError: a rank is missing, or ranks have gathered other weights; on every rank.

    Example:
        >>> import torch.distributed as dist
        >>> from torch.distributed.fsdp import fully_shard
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> layer = mf.Linear(64, 32, recipe="fp8_tensorwise")
        >>> model = fully_shard(layer, mesh=dist.init_device_mesh("cpu", (1,)))
        >>> y = model(torch.ones(2, 64))  # gathers the weight as codes
        >>> mf.distributed.precompute_scales(model)  # after opt.step()
        >>> mf.distributed.destroy_process_group()
    """
    exchange_scales(model.modules())


def exchange_scales(modules: Iterable[nn.Module]) -> None:
    """Exchanges the amaxes of a model's modules, as precompute_scales."""
    for group, batches in sharded_batches(modules).items():
        if any([any(batch.exchanged) for batch in batches]):
            require_same(
                "mf.step or mf.distributed.precompute_scales of",
                "; ".join([batch.title for batch in batches]),
                group,
                expected=ALL_STEP,
                differs=SAME_WEIGHTS,
            )
        exchange_amaxes(tuple(batches), BOTH_GATHERS)
        for batch in batches:
            batch.note_measured()  # for the next gathers


def require_same_scales(
    histories: Sequence[tuple[nn.Module, Tensor]], error: Exception | None
) -> None:
    """Compares histories that ranks are about to load: a rank decodes the others' codes by its own.

    Args:
        histories: (layer, its amax history to be), of those under delayed scaling.
        error: why this rank cannot load them; None: it can.

    Raises:
        ValueError: a rank has an error or is missing, or has other active amaxes; on every rank.
    """
    amaxes: dict[dist.ProcessGroup, list[Tensor]] = {}
    for layer, history in histories:
        gather = layer.__dict__.get("weight_gather")
        if gather is not None:
            amaxes.setdefault(gather.group, []).append(history[..., 0].reshape(-1).cpu())
    for group, active in amaxes.items():
        digest = sha256(torch.cat(active).numpy().tobytes()).hexdigest()
        require_same(
            "mf.load_training_state of a sharded model",
            f"those of sha256 {digest[:8]}",
            group,
            expected="load_training_state: expected all {} ranks to load {}",
            differs="load_training_state: expected the same active amaxes on all ranks",
            fault=None if error is None else str(error),
        )
