"""mf.quantize_(…, share_amax="servers"): weights that servers fuse are cast by one amax."""

import copy

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from minifloat._native import ops
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.worlds import run_world

DIM, KV, HIDDEN = 64, 32, 96
RECIPES = [
    "nvfp4_served",
    "nvfp4",
    "fp8_tensorwise",
    "fprop=nvfp4/row*nvfp4 dgrad=mxfp8*mxfp8 wgrad=bf16*bf16",
]


class Block(nn.Module):
    """Attention without its softmax, and a feed-forward."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(DIM, n, bias=False) for n in (DIM, KV, KV)
        )
        self.o_proj = nn.Linear(DIM, DIM, bias=False)
        self.w1, self.w3 = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        mixed = self.q_proj(x) * torch.cat([self.k_proj(x), self.v_proj(x)], -1)
        x = x + self.o_proj(mixed)
        return x + self.w2(F.silu(self.w1(x)) * self.w3(x))


def block():
    """Returns a block whose k and up have the largest weights of their groups."""
    torch.manual_seed(0)
    model = Block().bfloat16()
    with torch.no_grad():
        model.k_proj.weight *= 5
        model.w3.weight *= 5
    return model


def converted(recipe):
    model = block()
    mf.quantize_(model, recipe, keep="nothing", share_amax="servers", seed=1)
    return model


def inputs():
    return torch.randn(40, DIM, generator=torch.Generator().manual_seed(3)).bfloat16()


def results(model, x):
    """Returns y and all gradients."""
    x = x.clone().requires_grad_()
    y = model(x)
    parameters = list(model.parameters())
    return [y.detach(), *torch.autograd.grad(y.float().square().mean(), [x, *parameters])]


def rows_of_fused(model, names, recipe):
    """Returns each layer's operands, cut from a cast of the fused weight (N of all, K)."""
    weights = [getattr(model, name).weight.detach() for name in names]
    row, col = mf.Recipe(recipe).fprop.b, mf.Recipe(recipe).dgrad.b
    col = "" if col == "fprop.w" else col
    fused = torch.cat(weights)
    whole = ops.quantize.default(fused, row, col)
    amax = mf.tensor.amax(fused, row)
    found, begin = {}, 0
    for name, w in zip(names, weights):
        rows = slice(begin, begin + len(w))
        begin += len(w)
        of_col = amax if col and mf.spec.Spec.parse(col).amax_of else None
        alone = list(ops.quantize.default(w, row, col, amax_row=amax, amax_col=of_col))
        assert torch.equal(alone[0], whole[0][rows])  # a server's codes of these rows
        found[name] = alone if col else [*alone[:4], *alone[:4]]
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_are_rows_of_the_fused_weight(recipe):
    model, x = converted(recipe), inputs()
    for names in (("q_proj", "k_proj", "v_proj"), ("w1", "w3")):
        for name, operands in rows_of_fused(model, names, recipe).items():
            layer = getattr(model, name)
            leaf = x.clone().requires_grad_()
            y = layer(leaf)
            state = layer.op_state(x.device)
            other = x.clone().requires_grad_()
            want = ops.linear.default(
                other, layer.weight, None, recipe, weight_operands=operands, **state
            )
            assert torch.equal(y, want), name
            g = torch.ones_like(y)
            got = torch.autograd.grad(y, (leaf, layer.weight), g)
            for a, b in zip(got, torch.autograd.grad(want, (other, layer.weight), g)):
                assert torch.equal(a, b), name
    plain = block()
    mf.quantize_(plain, recipe, keep="nothing", seed=1)
    assert not torch.equal(model.q_proj(x), plain.q_proj(x))  # q's own amax is smaller
    assert torch.equal(model.o_proj(x), plain.o_proj(x))


def test_ways_to_run_give_the_same_bits():
    """A copy, compiled code and a recomputed forward; float32 masters under autocast."""
    model, x = converted("nvfp4_served"), inputs()
    want = results(model, x)
    copied = copy.deepcopy(model)
    assert copied.q_proj.amax_group.parent is copied
    compiled = copy.deepcopy(model)
    compiled.compile(backend="aot_eager", fullgraph=True)

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    checkpointed.parameters = model.parameters
    for other in (copied, compiled, checkpointed):
        for a, b in zip(results(other, x), want):
            assert torch.equal(a, b)
    masters = converted("nvfp4_served").float()
    with torch.no_grad():
        assert torch.equal(model(x), want[0])
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(masters(x), want[0])
    with torch.no_grad():  # an update of one weight moves the scale of all
        before = model.q_proj(x)
        model.v_proj.weight[0, 0] = 100.0
        assert not torch.equal(model.q_proj(x), before)
    assert type(mf.restore_(model).q_proj) is nn.Linear
    assert "amax_group" not in model.q_proj.__dict__


@pytest.mark.parametrize("recipe", RECIPES)
def test_shapes_without_memory(recipe):
    model = converted(recipe).to("meta")
    assert model(inputs().to("meta")).shape == inputs().shape


def test_latent_attention_and_delta_nets_share_amaxes():
    for names in (("q_a_proj", "kv_a_proj_with_mqa"), ("in_proj_qkv", "in_proj_z")):
        model = nn.Module()
        for name in names:
            model.add_module(name, nn.Linear(64, 64))
        mf.quantize_(model, "nvfp4_served", keep="nothing", share_amax="servers")
        first, second = (model.get_submodule(name) for name in names)
        assert first.amax_group is second.amax_group is not None


def test_feed_forwards_run_layer_by_layer():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w3, self.w2 = nn.Linear(64, 96), nn.Linear(64, 96), nn.Linear(96, 64)

        def forward(self, x):
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    for share_amax, fused in (None, 1), ("servers", 0):
        model = nn.Sequential(Gated())
        given = {"keep": "nothing", "fuse": True, "share_amax": share_amax}
        report = mf.quantize_(model, "fp8_tensorwise", **given)
        assert len(report.fused) == fused
    assert report.not_fused == [("0", "its layers share an amax with others")]


def test_refusals():
    def refuses(message, recipe, model=None, **given):
        model = block() if model is None else model
        with pytest.raises(ValueError, match=message):
            mf.quantize_(model, recipe, keep="nothing", share_amax="servers", **given)
        assert not any(isinstance(m, mf.Linear) for m in model.modules())

    refuses("primary=True", "nvfp4", primary=True)
    refuses("recompute='weight'", "nvfp4", recompute="weight")
    refuses("got none", "mxfp8")
    refuses("got none", "nvfp4", nn.Sequential(nn.Linear(64, 64)))
    refuses("several recipes", "*: nvfp4; k_proj: fp8_tensorwise")
    refuses("no amax of the values alone", "fp8_delayed")
    drawn = "fprop=nvfp4*nvfp4 dgrad=nvfp4*nvfp4+sr wgrad=bf16*bf16"
    refuses("no cast of the values alone", drawn)
    experts = nn.Sequential(mf.MoE(64, 32, 4, 2))
    refuses("gate and up as one parameter", "nvfp4_served", experts)
    with pytest.raises(ValueError, match="share_amax: expected"):
        mf.quantize_(block(), "nvfp4", share_amax="all")
    model = converted("nvfp4_served")
    model.k_proj = nn.Linear(DIM, KV, bias=False).bfloat16()
    with pytest.raises(ValueError, match="k_proj: expected a layer under nvfp4_served"):
        model(inputs())


def check_ranks(rank):
    """FSDP2 gathers the layers together, in the compute dtype; a cut weight is refused.

    Masters in float32 are rounded to it before their amaxes are found: bfloat16 rounds them back.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone, x = converted("nvfp4_served"), inputs()
    masters = converted("nvfp4_served").float()
    with torch.no_grad():
        for p in masters.parameters():
            p *= 1 + 2.0**-10 * (torch.rand_like(p) - 0.5)
    sharded = fully_shard(
        masters,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    assert torch.equal(sharded(x), alone(x))
    apart = converted("nvfp4_served")
    for name in ("q_proj", "k_proj", "v_proj"):
        fully_shard(getattr(apart, name), mesh=mesh)
    with pytest.raises(ValueError, match="expected a whole weight"):
        apart(x)
    cut = parallelize_module(converted("nvfp4_served"), mesh, {"q_proj": ColwiseParallel()})
    with pytest.raises(ValueError, match="expected a whole weight"):
        cut.q_proj(x)


def test_sharded_models():
    run_world(2, check_ranks)
