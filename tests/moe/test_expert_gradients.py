"""mf.moe.average_expert_gradients: the gradients of one process with all ranks' tokens."""

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
    return (moe(x).float().square().mean() + mf.moe.balance_loss(moe)) / MICRO_BATCHES


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
            mf.moe.average_expert_gradients(cut, dp)
    has_replicas = replicas > 1 and not uses_fsdp
    mf.moe.average_expert_gradients(cut, dp if has_replicas else None)
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
    with pytest.raises(
        ValueError, match=r"expected ranks that hold the same experts, .* but rank 0 h"
    ):
        mf.moe.average_expert_gradients(divided, dist.group.WORLD)
    same = mf.expert_parallel(built("bf16"), alone)
    if rank == 0:
        same(draw(1, TOKENS)).float().square().mean().backward()
    expected = None if rank else same.experts.w2.grad / 2
    mf.moe.average_expert_gradients(same, dist.group.WORLD)
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
        mf.moe.average_expert_gradients(changed, dist.group.WORLD)
    mesh = init_device_mesh("cpu", (2,))
    if rank:  # FSDP2 averages here alone
        fully_shard(same.experts, mesh=mesh)
    gradient = same.experts.w2.grad
    with pytest.raises(
        ValueError, match=r"moe: expected None for experts that FSDP2 .*ranks \[1\]"
    ):
        mf.moe.average_expert_gradients(same, dist.group.WORLD)
    assert same.experts.w2.grad is gradient
    whole = built("bf16")
    whole(draw(1, TOKENS)).float().sum().backward()
    expected = whole.experts.w2.grad.clone()
    mf.moe.average_expert_gradients(whole)  # whole experts are left to DDP or FSDP2
    assert torch.equal(whole.experts.w2.grad, expected)


def test_refuses_ranks_of_other_experts():
    run_world(2, check_refusals)


# ---- gradients of each rank ----------------------------------------------------------------------

WIDTH = 32


def every_second(gradient: torch.Tensor) -> torch.Tensor:
    return torch.stack([gradient, gradient + 1], -1)[..., 0]


# How a rank's gradient lies in memory.
LAYOUTS = {
    "dense": lambda g: g.clone(),
    "transposed": lambda g: g.transpose(1, 2).contiguous().transpose(1, 2),
    "experts last": lambda g: g.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "every second": every_second,
}


def replica(parameter_dtype: torch.dtype = torch.float32) -> mf.MoE:
    """Returns a layer of which each rank has all experts, so that the world averages gradients."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    moe = mf.MoE(WIDTH, 2 * WIDTH, experts=2, top_k=1, dtype=parameter_dtype)
    return mf.expert_parallel(moe, alone)


def check_layouts(rank: int) -> None:
    """Gradients are averaged by index, wherever the elements lie, and stay where they are."""
    moe = replica()
    for mine in LAYOUTS:
        for other in LAYOUTS:
            places = {}
            for name, parameter in moe.experts.named_parameters():
                values = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
                parameter.grad = LAYOUTS[other if rank else mine](values * (1 + 2 * rank))
                places[name] = parameter.grad.data_ptr(), parameter.grad.stride()
            mf.moe.average_expert_gradients(moe, dist.group.WORLD)
            for name, parameter in moe.experts.named_parameters():
                values = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape)
                assert torch.equal(parameter.grad, 2 * values), (mine, other, name)
                assert places[name] == (parameter.grad.data_ptr(), parameter.grad.stride())


# What rank 1 alone has for a gradient -> the error of both ranks.
UNLIKE = {
    "dtype": (
        lambda g: g.bfloat16(),
        r"rank 0 has .*w1 \(2, 64, 32\) torch.float32.*; rank 1 has ",
    ),
    "expanded": (lambda g: g[:1].expand_as(g), r"memory of its own .* strides \(0, .*ranks \[1\]"),
    "sparse": (lambda g: g.to_sparse(), r"a dense gradient .* got torch.sparse_coo \(ranks \[1\]"),
}


def check_unlike(rank: int) -> None:
    """A gradient that cannot be added is one error on both ranks, and nothing is written."""
    for name, (change, match) in UNLIKE.items():
        moe = replica()
        for parameter in moe.experts.parameters():
            parameter.grad_dtype = None
            parameter.grad = torch.ones_like(parameter)
        if rank:
            moe.experts.w1.grad = change(moe.experts.w1.grad)
        for _ in range(2):
            with pytest.raises(ValueError, match=match):
                mf.moe.average_expert_gradients(moe, dist.group.WORLD)
        for parameter in moe.experts.parameters():
            assert parameter.grad.to_dense().eq(1).all(), name
    moe.experts.w1.grad = torch.ones_like(moe.experts.w1).to_sparse()
    with pytest.raises(ValueError, match=r"expected a dense gradient .* got torch.sparse_coo$"):
        mf.moe.average_expert_gradients(moe)  # no other rank waits
    # A missing gradient has the dtype that it would have.
    moe = replica(torch.bfloat16)
    for parameter in moe.experts.parameters():
        parameter.grad_dtype = torch.float32
        if rank:
            parameter.grad = torch.ones_like(parameter, dtype=torch.float32)
    mf.moe.average_expert_gradients(moe, dist.group.WORLD)
    for parameter in moe.experts.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.eq(0.5).all()


def check_arguments(rank: int) -> None:
    """Arguments that one rank alone gets wrong are one error on both, at once."""
    moe, mesh = replica(), init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    right, world = (moe, mesh["b"]), dist.group.WORLD
    for wrong, match in (
        ((None, mesh["b"]), r"average_expert_gradients: expected a torch.nn.Module, got NoneType"),
        ((moe, "x"), r"mesh: expected a DeviceMesh of one dimension, .* got 'x' \(str\)"),
        ((moe, 3), r"mesh: expected a DeviceMesh of one dimension, .* got 3 \(int\)"),
        ((moe, mesh), r"mesh: expected one dimension, got 2"),
    ):
        usual = right if wrong[0] is None else (moe, world)
        with pytest.raises(ValueError, match=match + r".*\(ranks \[1\]\)"):
            mf.moe.average_expert_gradients(*(wrong if rank else usual))
        mf.moe.average_expert_gradients(*usual)
    nobody = dist.new_group([0]) if rank else None  # nobody waits for a rank that is not in a group
    if not rank:
        dist.new_group([0])
    for wrong in ((None, None), (None, nobody), (moe, nobody)):
        if rank:
            with pytest.raises(TypeError, match=r"average_expert_gradients: .*expected "):
                mf.moe.average_expert_gradients(*wrong)


def check_gradients(rank: int) -> None:
    check_layouts(rank)
    check_unlike(rank)
    check_arguments(rank)


def test_gradients_that_ranks_lay_out_or_pass_otherwise():
    run_world(2, check_gradients)
