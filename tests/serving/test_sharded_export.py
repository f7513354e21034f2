"""mf.export of models whose parameters ranks share: the bytes of the whole model's folder."""

import filecmp
from pathlib import Path

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat.nn.state.recipe_state import converted
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.support.served_models import llama, qwen3_moe, read, tokens
from tests.support.worlds import run_world

RANKS = 2
SHARED = "fsdp of shared amaxes"
EXPERTS = {  # what expert_parallel divides -> the recipe
    "experts": "*: mxfp8; *.experts: nvfp4",
    "experts in bf16": "*: mxfp8; *.experts: bf16",
    "experts of delayed scaling": "fp8_delayed",
}
PLACES = ("a mesh", "a group", "a group and fsdp")


def mixture():
    torch.manual_seed(0)
    moe = mf.MoE(64, 32, experts=4, top_k=2, fused_w13=True, bias=True)
    return nn.Sequential(nn.Linear(64, 64), moe)


def whole(kind):
    """Returns the model of a kind, converted, on one rank."""
    experts = kind.partition(" over ")[0]
    model = mixture() if experts in EXPERTS else llama()
    model = qwen3_moe() if kind == "fsdp of experts" else model
    recipes = {"tensor parallel": "fp8_rowwise", "fsdp": "nvfp4", SHARED: "nvfp4_served"}
    recipe = (EXPERTS | recipes).get(experts, EXPERTS["experts"])
    mf.quantize_(model, recipe, share_amax="servers" if kind == SHARED else None)
    for _, layer in converted(model):
        if layer.amax_history is not None:  # as after a step: each expert has its own scale
            layer.amax_history.copy_(torch.rand_like(layer.amax_history) + 1)
    return model


def sharded_experts(kind):
    """Returns the same model with experts that expert_parallel divides."""
    place = kind.partition(" over ")[2]
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("experts", "data"))
    experts = mesh["experts"]
    model = whole(kind)
    mf.expert_parallel(model, experts if place == "a mesh" else experts.get_group())
    return fully_shard(model, mesh=mesh["data"]) if place == "a group and fsdp" else model


def sharded(kind):
    """Returns the same model with parameters that ranks share."""
    if " over " in kind:
        return sharded_experts(kind)
    mesh = init_device_mesh("cpu", (RANKS,))
    model = whole(kind)
    if kind == "tensor parallel":
        plan = {f"model.layers.0.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan["model.layers.0.mlp.down_proj"] = RowwiseParallel()
        return parallelize_module(model, mesh, plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS = (
    "fsdp",
    SHARED,
    "fsdp of experts",
    "tensor parallel",
    *(f"{experts} over {place}" for experts in EXPERTS for place in PLACES),
)


def largest_local_share(model):
    return max(p.to_local().numel() / p.numel() for p in model.parameters() if type(p) is DTensor)


def check_kinds(rank, folder):
    folder = Path(folder)
    for kind in KINDS:
        model = sharded(kind)
        mf.export(model, folder / kind, weight_only=True)
        if rank == 0:
            with_ranks, config = read(folder / kind)
            plain, plain_config = read(folder / f"{kind}, whole")
            assert config == plain_config, kind
            assert list(with_ranks) == list(plain), kind
        dist.barrier()
    check_errors(rank, folder)
    check_amaxes(rank)


def check_errors(rank, folder):
    """Each rank raises, and names what is wrong on one of them."""
    model = sharded("experts over a group")
    if rank == 1:
        model[1].experts.w2.data[0, 0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"got\n  1.experts.w2: its weight has Inf or NaN$"):
        mf.export(model, folder / "broken", weight_only=True)
    assert not (folder / "broken").exists()
    model = sharded("fsdp")
    k_proj = model.model.layers[0].self_attn.k_proj.weight.to_local()
    with torch.no_grad():
        k_proj.zero_()[0, 0] = 1e-36 * rank
    with pytest.raises(ValueError, match=r"k_proj: expected its weight as zeros, .* of 1e-36$"):
        mf.export(model, folder / "broken", weight_only=True)
    assert not (folder / "broken").exists()
    model = mixture()
    mf.quantize_(model, "mxfp8", primary=True)
    mf.expert_parallel(model, dist.group.WORLD)
    with pytest.raises(ValueError, match=r"experts.w2: ranks have parts of its codes"):
        mf.export(model, folder / "broken", weight_only=True)
    assert not (folder / "broken").exists()
    model = sharded("fsdp")
    (folder / "file").touch()
    expected = NotADirectoryError if rank == 0 else RuntimeError
    with pytest.raises(expected, match="file"):
        mf.export(model, folder / "file/out", weight_only=True)


def check_amaxes(rank):
    """Ranks have the largest amax of all ranks' batches."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    mf.quantize_(model, "nvfp4", keep="nothing")
    amaxes = mf.calibrate(model, [torch.full((2, 64), float(rank + 1))])
    assert amaxes["0"] == RANKS
    batches = [{"input_ids": tokens(i)} for i in range(RANKS)]
    got = mf.calibrate(sharded("fsdp"), [batches[rank]])
    assert got == mf.calibrate(whole("fsdp"), batches)


def test_ranks_write_the_bytes_of_the_whole_model(tmp_path):
    for kind in KINDS:
        mf.export(whole(kind), tmp_path / f"{kind}, whole", weight_only=True)
    run_world(RANKS, check_kinds, str(tmp_path))
    for kind in KINDS:
        files = [p.name for p in (tmp_path / kind).iterdir()]
        same, *others = filecmp.cmpfiles(
            tmp_path / kind, tmp_path / f"{kind}, whole", files, shallow=False
        )
        assert len(same) == len(files) >= 2, (kind, others)
