"""mf.expert_parallel beside FSDP2, and checkpoints of divided experts."""

import copy

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from minifloat.nn.grouped_product import product_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.support.expert_ranks import require_same_operands
from tests.support.expert_world import Pass, built, draw, own
from tests.support.worlds import run_world

# ---- with FSDP2 ----------------------------------------------------------------------------------


CASES = [
    *((recipe, "codes") for recipe in ("bf16", "mxfp8", "nvfp4", "fp8_tensorwise")),
    ("mxfp8", "compute_dtype"),
]


def check_sharded(rank: int) -> None:
    """Two replicas of the group shard the experts of each rank, and average gradients."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    replica, sizes = rank // 2, [9, 6]
    for recipe, gather in CASES:
        whole = built("bf16", fused_w13=True)
        cut = mf.expert_parallel(copy.deepcopy(whole), mesh["ep"])
        if recipe != "bf16":
            options = {"gather": gather}
            mf.quantize_(cut, recipe, data_parallel_rank=rank, **options)
            mf.quantize_(whole, recipe, data_parallel_rank=2 * replica, **options)
        for module in (cut.experts, cut):  # the root is not resharded after forward
            fully_shard(module, mesh=mesh["dp"])
        x, g = draw(replica, sum(sizes)), draw(5 + replica, sum(sizes))
        alone = Pass(whole, x, g)
        found = Pass(cut, own(x, sizes, rank % 2), own(g, sizes, rank % 2))
        if recipe != "bf16":
            gather_of_w2 = product_of(cut.experts, "w2").weight_gather
            assert (gather_of_w2 is not None) == (gather == "codes"), recipe
            assert gather_of_w2 is None or not gather_of_w2.reason, recipe
        first = cut.experts.parallel.first_expert
        require_same_operands(found.products, alone.products, first)
        for name, gradient in found.dw.items():
            if not name.startswith("experts."):
                continue
            mean = alone.dw[name].float()
            dist.all_reduce(mean)  # of two equal ones in each of two replicas
            got = gradient.full_tensor().float()
            assert (got - mean / 4).norm() <= 0.01 * mean.norm(), (recipe, name)


def test_fsdp2_shards_divided_experts():
    run_world(4, check_sharded)


# ---- checkpoints ---------------------------------------------------------------------------------


def trained(recipe: str) -> tuple[mf.MoE, mf.MoE]:
    """Returns a layer after two steps on one process, and one with other weights to load into."""
    moe = built(recipe, fused_w13=True)
    for step in range(2):
        moe(draw(step, 12)).float().square().sum().backward()
        mf.step(moe, dist.new_group([dist.get_rank()], use_local_synchronization=True))
    other = built(recipe, fused_w13=True)
    with torch.no_grad():
        other.experts.w13.zero_()
        other.experts.w2.zero_()
    return moe, other


def state_of(moe: mf.MoE) -> dict:
    return {"model": moe.state_dict(), "minifloat": mf.training_state(moe)}


def save(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    moe, _ = trained("fp8_delayed")
    dcp.save(state_of(mf.expert_parallel(moe, mesh["ep"])), checkpoint_id=folder)


def load(rank: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    moe, other = trained("fp8_delayed")
    other = mf.expert_parallel(other, mesh["ep"])
    state = state_of(other)
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    mf.load_training_state(other, state["minifloat"])
    for name, parameter in other.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        assert torch.equal(whole, moe.get_parameter(name)), name
    assert torch.equal(other.router.expert_bias, moe.router.expert_bias)
    for name, entry in mf.training_state(moe).items():
        assert torch.equal(mf.training_state(other)[name], entry), name
    x = draw(3, 8)
    torch.testing.assert_close(other(own(x, [4, 4], rank)), own(moe(x), [4, 4], rank))


def test_a_checkpoint_of_four_ranks_loads_on_two(tmp_path):
    run_world(4, save, str(tmp_path))
    run_world(2, load, str(tmp_path))


# ---- from expert parallelism to FSDP2 alone ------------------------------------------------------

RECIPES = ["fp8_delayed", "nvfp4"]  # histories, and a random counter
TOKENS = 12


def step(moe: mf.MoE, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    """Runs a step on this rank's share of the tokens; returns the rank's results."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    y = moe(draw(seed, ranks * TOKENS).chunk(ranks)[rank])
    y.float().square().mean().backward()
    mf.moe.average_expert_gradients(moe)
    for name, parameter in moe.named_parameters() if moe.experts.parallel is not None else ():
        if not name.startswith("experts."):  # FSDP2 averages gradients itself
            dist.all_reduce(parameter.grad.div_(ranks))
    optimizer.step()
    optimizer.zero_grad()
    mf.step(moe)
    return y.detach()


def optimizer_of(moe: mf.MoE) -> torch.optim.Optimizer:
    return torch.optim.AdamW(moe.parameters(), lr=0.01)


def states_of(moe: mf.MoE, optimizer: torch.optim.Optimizer, is_whole: bool = False) -> dict:
    options = StateDictOptions(full_state_dict=is_whole)
    model, moments = get_state_dict(moe, optimizer, options=options)
    return {"model": model, "optimizer": moments, "minifloat": mf.training_state(moe)}


def save_divided(rank: int, folder: str, recipe: str) -> None:
    """Trains two steps with divided experts, and saves all state, as DTensors and as a whole."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    moe = mf.expert_parallel(built(recipe, fused_w13=True, shared_experts=1), mesh["ep"])
    optimizer = optimizer_of(moe)
    for seed in range(2):
        step(moe, optimizer, seed)
    dcp.save(states_of(moe, optimizer), checkpoint_id=folder)
    whole = states_of(moe, optimizer, is_whole=True)
    if rank == 0:
        torch.save(whole, f"{folder}/whole.pt")


def resumed(recipe: str, folder: str, is_whole: bool) -> tuple[mf.MoE, torch.optim.Optimizer]:
    """Loads a checkpoint into a layer that FSDP2 alone shards."""
    moe = built(recipe, fused_w13=True, shared_experts=1)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.zero_()
    for module in (moe.experts, moe.shared_experts, moe):  # the rest is the router, in fp32
        fully_shard(module)
    optimizer = optimizer_of(moe)
    if is_whole:
        state = torch.load(f"{folder}/whole.pt")
    else:
        state = states_of(moe, optimizer)
        dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        moe,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=is_whole),
    )
    mf.load_training_state(moe, state["minifloat"])
    return moe, optimizer


def require_same_state(a: dict, b: dict, where: str) -> None:
    """Requires equal bytes of weights, moments, balance biases, histories and counters."""
    assert a["model"].keys() == b["model"].keys()
    for part in ("model", "minifloat"):
        assert a[part].keys() == b[part].keys()
        for name, value in a[part].items():
            assert torch.equal(value, b[part][name]), (where, name)
    moments = a["optimizer"]["state"]
    assert moments.keys() == b["optimizer"]["state"].keys()
    for name, values in moments.items():
        for key, value in values.items():
            assert torch.equal(value, b["optimizer"]["state"][name][key]), (where, name, key)


def load_sharded(rank: int, folder: str, recipe: str) -> None:
    """Resumes under FSDP2 from DTensors and from the whole state: the same bytes, two steps on."""
    saved = torch.load(f"{folder}/whole.pt")
    assert "router.expert_bias" in saved["model"]
    kind = "amax_history" if recipe == "fp8_delayed" else "rng"
    assert any(name.endswith(kind) for name in saved["minifloat"]), recipe
    resumes = [resumed(recipe, folder, is_whole) for is_whole in (False, True)]
    for moe, optimizer in resumes:
        found = states_of(moe, optimizer, is_whole=True)
        if rank == 0:
            require_same_state(found, saved, "loaded")
    for seed in (2, 3):
        first, second = (step(moe, optimizer, seed) for moe, optimizer in resumes)
        assert torch.equal(first, second)
    states = [states_of(moe, optimizer, is_whole=True) for moe, optimizer in resumes]
    if rank == 0:
        require_same_state(*states, "two steps on")
        assert not torch.equal(states[0]["model"]["experts.w2"], saved["model"]["experts.w2"])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_of_two_ranks_loads_under_fsdp2_alone(tmp_path, recipe):
    run_world(2, save_divided, str(tmp_path), recipe)
    for ranks in (2, 3):  # three do not divide the experts
        run_world(ranks, load_sharded, str(tmp_path), recipe)
