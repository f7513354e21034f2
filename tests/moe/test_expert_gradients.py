"""mf.average_expert_gradients: the gradients of one process with all ranks' tokens."""

import copy

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.expert_world import E, built, draw
from tests.support.worlds import run_world

TOKENS = 12  # of each rank, in each micro-batch
MICRO_BATCHES = 2


def loss_of(moe: mf.MoE, x: torch.Tensor) -> torch.Tensor:
    return (moe(x).float().square().mean() + mf.balance_loss(moe)) / MICRO_BATCHES


def require_mean(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares within roundings to bfloat16, each of 2^-9: at most 8 of partial sums in one
    process, 3 in several. Of random signs they add up to 2^-9 · sqrt(11) = 0.0065.
    """
    assert found.shape == expected.shape
    error = (found.float() - expected.float()).norm()
    assert error <= 0.01 * expected.float().norm(), (name, error)
    assert expected.any(), name


def check_mean(rank: int, replicas: int, is_on_mesh: bool, uses_fsdp: bool) -> None:
    """Each replica divides the experts; the mean is over the tokens of all ranks."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp", "ep"))
    whole = built("bf16", fused_w13=True, bias=True, balance="loss", balance_loss=0.5)
    ep, dp = mesh["ep"], mesh["dp"]
    if not is_on_mesh:
        ep, dp = ep.get_group(), dp.get_group()
    cut = mf.expert_parallel(copy.deepcopy(whole), ep)
    if uses_fsdp:
        fully_shard(cut.experts, mesh=mesh["dp"])
    for i in range(MICRO_BATCHES):
        parts = draw(i, world * TOKENS).chunk(world)
        for part in parts:  # the mean of the ranks' losses
            (loss_of(whole, part) / world).backward()
        loss_of(cut, parts[rank]).backward()
    if uses_fsdp:
        with pytest.raises(ValueError, match="mesh: moe: expected None for experts that FSDP2"):
            mf.average_expert_gradients(cut, dp)
    has_replicas = replicas > 1 and not uses_fsdp
    mf.average_expert_gradients(cut, dp if has_replicas else None)
    begin, each = cut.experts.parallel.first_expert, E * replicas // world
    for name, parameter in cut.experts.named_parameters():
        wanted = whole.experts.get_parameter(name).grad[begin : begin + each]
        gradient = parameter.grad.full_tensor() if is_on_mesh else parameter.grad
        if is_on_mesh:
            gradient = gradient[begin : begin + each]
        require_mean(name, gradient, wanted)


CASES = [  # ranks, replicas, on a mesh, with FSDP2 over the replicas
    (2, 1, False, False),
    (3, 3, True, False),
    (4, 2, False, False),
    (4, 2, True, False),
    (4, 2, True, True),
]


@pytest.mark.parametrize(("ranks", "replicas", "is_on_mesh", "uses_fsdp"), CASES)
def test_means_are_those_of_one_process(ranks, replicas, is_on_mesh, uses_fsdp):
    run_world(ranks, check_mean, replicas, is_on_mesh, uses_fsdp)


def check_refusals(rank: int) -> None:
    """Ranks with different experts all raise, a rank without a gradient adds zeros."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    divided = mf.expert_parallel(built("bf16"), dist.group.WORLD)
    with pytest.raises(ValueError, match="expected ranks that hold the same experts, but rank 0 h"):
        mf.average_expert_gradients(divided, dist.group.WORLD)
    with pytest.raises(TypeError, match="average_expert_gradients: mesh: expected a DeviceMesh"):
        mf.average_expert_gradients(divided, "dp")
    same = mf.expert_parallel(built("bf16"), alone)
    if rank == 0:
        same(draw(1, TOKENS)).float().square().mean().backward()
    expected = None if rank else same.experts.w2.grad / 2
    mf.average_expert_gradients(same, dist.group.WORLD)
    if rank == 0:
        assert torch.equal(same.experts.w2.grad, expected)
    both = [torch.empty_like(same.experts.w2) for _ in range(2)]
    dist.all_gather(both, same.experts.w2.grad)
    assert torch.equal(*both)
    # Experts that change on one rank after a call that agreed, and a rank without any.
    changed = torch.nn.Linear(2, 2) if rank else same
    with pytest.raises(
        ValueError, match=r"expected ranks that hold the same experts.*rank 1 has no"
    ):
        mf.average_expert_gradients(changed, dist.group.WORLD)
    mesh = init_device_mesh("cpu", (2,))
    if rank:  # FSDP2 averages here alone
        fully_shard(same.experts, mesh=mesh)
    gradient = same.experts.w2.grad
    with pytest.raises(
        ValueError, match=r"moe: expected None for experts that FSDP2 .*ranks \[1\]"
    ):
        mf.average_expert_gradients(same, dist.group.WORLD)
    assert same.experts.w2.grad is gradient
    whole = built("bf16")
    whole(draw(1, TOKENS)).float().sum().backward()
    expected = whole.experts.w2.grad.clone()
    mf.average_expert_gradients(whole)  # whole experts are left to DDP or FSDP2
    assert torch.equal(whole.experts.w2.grad, expected)


def test_refuses_ranks_of_other_experts():
    run_world(2, check_refusals)
