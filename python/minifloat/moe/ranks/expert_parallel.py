"""mf.expert_parallel: divides the experts of a model's mf.MoE layers over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch import nn

from ...checks import require_module
from ...nn.grouped_product import product_of
from ...nn.names import clean_name, unwrapped
from ...nn.registry import COMPUTE_DTYPE, is_distributed
from ..layer import Experts, MoE
from .dispatch import Dispatcher
from .parallel_experts import ExpertParallel, group_of, require_sending

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Module = TypeVar("Module", bound=nn.Module)


def expert_parallel(
    model: Module,
    mesh: DeviceMesh | dist.ProcessGroup,
    *,
    dispatch: str = COMPUTE_DTYPE,
    capacity: int | str | None = None,
    dispatcher: Dispatcher | None = None,
) -> Module:
    """Divides the experts of each mf.MoE in the model over ranks, in place.

    Each rank keeps the parameters of E / ranks experts, in the order of the ranks. Each rank has
    tokens of its own, so the ranks count as data-parallel ranks. The gradient of an expert is the
    sum over all ranks' tokens. Ranks must have equal weights before. Call it before or after
    mf.quantize_, and before fully_shard and before an optimizer is built.

    Args:
        model: an mf.MoE, or a module that has some.
        mesh: one dimension of a DeviceMesh, whose parameters become DTensors with Shard(0), or a
            process group, whose parameters become this rank's part.
        dispatch: "compute_dtype": rows are sent in it. "codes": x and the gradient of the
            output are sent as codes of the recipe, and as values where it has bf16.
        capacity: most rows from one rank to another in one forward; "all": as many as there can be,
            with equal numbers of tokens on all ranks. No pass waits for the device then. Rows past
            the capacity are dropped, and mf.step warns of them. None: exact sizes, for which each
            forward copies counts to the host once.
        dispatcher: an object with the two functions of moe.ranks.dispatch.Dispatcher, by which the
            caller sends rows itself; None: torch's all_to_all_single.

    Returns:
        The model.

    Raises:
        TypeError, ValueError: an argument is not as expected, E is no multiple of the ranks, or the
            model has no mf.MoE, or one that ranks divide already. Nothing has been changed then.

    Source: docs/moe.md, "Expert parallelism".

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> moe = mf.MoE(64, 32, experts=4, top_k=2, recipe="mxfp8")
        >>> moe = mf.expert_parallel(moe, dist.group.WORLD)
        >>> moe.experts.w1.shape  # all four, on one rank
        torch.Size([4, 32, 64])
        >>> mf.distributed.destroy_process_group()
    """
    require_module("expert_parallel", model)
    group = group_of("expert_parallel: mesh", mesh)
    require_sending("expert_parallel", dispatch, capacity)
    require_dispatcher(dispatcher, capacity)
    for name, module in find_experts(model, dist.get_world_size(group)):
        parallel = ExpertParallel(name, group, module.experts, dispatch, capacity, dispatcher)
        keep_own(module, parallel, None if isinstance(mesh, dist.ProcessGroup) else mesh)
    return model


def require_dispatcher(dispatcher: object, capacity: object) -> None:
    """Checks that a caller's dispatcher has the two functions of Dispatcher."""
    if dispatcher is None:
        return
    missing = [n for n in ("dispatch", "combine") if not callable(getattr(dispatcher, n, None))]
    if missing:
        raise TypeError(
            f"expert_parallel: dispatcher: expected the functions dispatch and combine, got "
            f"{dispatcher!r} without {' and '.join(missing)}"
        )
    if capacity is not None:
        raise ValueError(
            "expert_parallel: expected capacity or dispatcher, got both: a capacity is that of "
            "minifloat's own dispatcher"
        )


def find_experts(model: nn.Module, ranks: int) -> list[tuple[str, Experts]]:
    """Returns the names and experts of each mf.MoE that `ranks` ranks can divide.

    Experts that several layers share are named by the first.
    """
    found: dict[Experts, str] = {}
    for name, module in unwrapped(model).named_modules():
        if isinstance(module, MoE):
            found.setdefault(module.experts, clean_name(name))
    if not found:
        raise ValueError(
            f"expert_parallel: expected a model with an mf.MoE, got {type(model).__name__}"
        )
    for experts, name in found.items():
        expected = ""
        part = next((n for n, p in experts.named_parameters() if is_distributed(p)), None)
        if experts.parallel is not None:
            expected = f"whole experts, got {experts.parallel}"
        elif part is not None:
            expected = f"whole experts, got a DTensor as {part}: cut along its width, or sharded"
        elif experts.experts % ranks:
            expected = f"experts as a multiple of the group's {ranks} ranks, got {experts.experts}"
        if expected:
            raise ValueError(f"expert_parallel: {name or 'the mf.MoE'}: expected {expected}")
    return [(name or "moe", experts) for experts, name in found.items()]


def keep_own(module: Experts, parallel: ExpertParallel, mesh: DeviceMesh | None) -> None:
    """Replaces the parameters of all experts by those of this rank's, and their histories."""
    begin, end = parallel.first_expert, parallel.first_expert + parallel.local
    for name, parameter in list(module._parameters.items()):
        if parameter is None:
            continue
        own = parameter.detach()[begin:end].clone()
        if mesh is not None:
            from torch.distributed.tensor import DTensor, Shard

            own = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
        module.register_parameter(name, nn.Parameter(own, parameter.requires_grad))
    module.parallel = parallel
    for name in module.weight_names:
        product = product_of(module, name)
        if product is not None:
            product.keep_experts(parallel.expert_range)
