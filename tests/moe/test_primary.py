"""Primary weights of experts: parameters that are codes, with one amax an expert."""

import copy
import pickle

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.support import foreign_experts
from tests.support.same_bits import require_same_weight
from tests.support.worlds import run_world

D, HIDDEN, E = 48, 64, 3
RECIPES = [
    "fp8_rowwise", "fp8_tensorwise", "fp8_blockwise", "mxfp8", "mxfp8_2d", "nvfp4", "nvfp4_mxfp8",
]  # fmt: skip


def moe(fused=True, seed=0, shared=1):
    torch.manual_seed(seed)
    return nn.Sequential(mf.MoE(D, HIDDEN, E, 2, fused_w13=fused, shared_experts=shared))


def tokens(seed=0, dim=D):
    return torch.randn(20, dim, generator=torch.Generator().manual_seed(seed))


def weights_of(model):
    return {n: p for n, p in model.named_parameters() if isinstance(p, mf.QuantizedTensor)}


def gradients(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in model.named_parameters()}}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("fused", [True, False])
def test_products_and_gradients_are_those_of_weights_that_are_cast(recipe, fused):
    primary, cast = moe(fused), moe(fused)
    report = mf.quantize_(primary, recipe, primary=True)
    mf.quantize_(cast, recipe)
    assert {n.split(".")[-1] for n in weights_of(primary)} >= {"w2"}
    assert set(report.gather.values()) == {"its weight is codes"}
    for _ in range(2):
        got, want = gradients(primary, tokens()), gradients(cast, tokens())
        assert got.keys() == want.keys()
        for name in got:
            assert torch.equal(got[name], want[name]), name
    with torch.no_grad():
        assert torch.equal(primary(tokens(1)), cast(tokens(1)))


def test_an_optimizer_writes_the_codes():
    model = moe()
    mf.quantize_(model, "mxfp8_2d", primary=True, keep_high_precision_init=True)
    experts = model[0].experts
    init = experts.w13.get_high_precision_init_val()
    require_same_weight(experts.w13, mf.QuantizedTensor.from_tensor(init, *experts.w13.specs))
    before = {n: p.dequantize() for n, p in weights_of(model).items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        gradients(model, tokens())
        optimizer.step()
        want = {n: before[n] - 0.5 * p.grad for n, p in weights_of(model).items()}
        optimizer.zero_grad()
        for name, p in weights_of(model).items():
            require_same_weight(p, mf.QuantizedTensor.from_tensor(want[name], *p.specs), name)
            before[name] = p.dequantize()
    restored = mf.restore_(copy.deepcopy(model))
    assert type(restored[0].experts.w2) is nn.Parameter
    assert torch.equal(restored[0].experts.w2, experts.w2.dequantize())
    assert not hasattr(restored[0].experts.w13, "get_high_precision_init_val")


def test_states_keep_the_bytes(tmp_path):
    model, other = moe(), moe(seed=1)
    for each in (model, other):
        mf.quantize_(each, "nvfp4", primary=True)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=False))
    for twin in (other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for name, p in weights_of(twin).items():
            require_same_weight(p, weights_of(model)[name], name)
        assert torch.equal(twin(tokens()), model(tokens()))
    empty = copy.deepcopy(model).to_empty(device="cpu")
    assert weights_of(empty).keys() == weights_of(model).keys()
    empty.load_state_dict(model.state_dict())
    assert torch.equal(empty[0].experts(*routed(model)), model[0].experts(*routed(model)))
    assert {p.dtype for p in weights_of(copy.deepcopy(model).bfloat16()).values()} == {
        torch.bfloat16
    }


def routed(model):
    return tokens(), torch.arange(40).view(20, 2) % E, torch.ones(20, 2)


@pytest.mark.parametrize("row_major", [False, True])
@pytest.mark.parametrize("recipe", ["fp8_rowwise", "mxfp8_2d", "nvfp4_mxfp8"])
def test_projections_in_either_layout(recipe, row_major):
    results = []
    for primary in (True, False):
        torch.manual_seed(2)
        block = foreign_experts.ProjectionBlock(row_major, bias=True, clamped=row_major)
        mf.quantize_(block, recipe, primary=primary)
        assert isinstance(block.experts.down_proj, mf.QuantizedTensor) == primary
        results.append(gradients(block, tokens(dim=foreign_experts.D)))
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name


def test_the_function_takes_codes():
    torch.manual_seed(3)
    w13, w2 = torch.randn(E, 2 * HIDDEN, D), torch.randn(E, D, HIDDEN)
    indices, weights = torch.arange(40).view(20, 2) % E, torch.rand(20, 2)
    codes = [mf.QuantizedTensor.from_tensor(w, "mxfp8", "mxfp8") for w in (w13, w2)]
    got = mf.grouped_mlp(tokens(), *codes, indices, weights, "mxfp8")
    assert torch.equal(got, mf.grouped_mlp(tokens(), w13, w2, indices, weights, "mxfp8"))
    with pytest.raises(ValueError, match="asked for rowwise mxfp4"):
        mf.grouped_mlp(
            tokens(), *codes, indices, weights, "fprop=mxfp8*mxfp4 dgrad=bf16*bf16 wgrad=bf16*bf16"
        )


@pytest.mark.parametrize("fprop", ["bf16*mxfp8", "bf16*bf16"])
def test_a_product_that_reads_values_reads_those_of_the_codes(fprop):
    """MXFP8's values are those of bfloat16, so products of codes and of values are the same."""
    torch.manual_seed(3)
    sizes = (E, 2 * HIDDEN, D), (E, D, HIDDEN)
    codes = [mf.QuantizedTensor.from_tensor(torch.randn(*s).bfloat16(), "mxfp8") for s in sizes]
    indices, weights = torch.arange(40).view(20, 2) % E, torch.rand(20, 2)
    found = []
    for matrices, recipe in (
        (codes, f"fprop={fprop} dgrad=bf16*bf16 wgrad=bf16*bf16"),
        ([w.dequantize() for w in codes], "bf16"),
    ):
        x = tokens().bfloat16().requires_grad_()
        y = mf.grouped_mlp(x, *matrices, indices, weights, recipe)
        y.sum().backward()
        found.append((y, x.grad))
    assert all(map(torch.equal, *found))


def test_weights_that_cannot_be_codes_have_a_reason():
    def reason(model, recipe):
        return {
            why
            for name, why in mf.quantize_(model, recipe, primary=True).skipped
            if "experts" in name and "shared" not in name
        }

    linear = nn.Linear(D, D)
    recipe = "*: mxfp8; *.experts: fp8_delayed"
    (why,) = reason(nn.Sequential(moe(), linear), recipe)
    assert why.startswith("primary: QuantizedTensor: weights scale by their own amax")
    tied = nn.Sequential(moe(), moe(), linear)
    tied[1][0].experts.w2 = tied[0][0].experts.w2
    assert reason(tied, "mxfp8") == {"primary: its weight is tied to another module's"}
    block = nn.Sequential(foreign_experts.GroupedMmBlock(), linear)
    assert reason(block, "mxfp8") == {"primary: the module's own forward reads the parameter"}


def test_a_failed_conversion_leaves_the_weights(monkeypatch):
    model = moe(fused=False)
    before = dict(model.named_parameters())
    real, calls = mf.QuantizedTensor.from_tensor.__func__, []

    def fails(cls, *args):
        calls.append(args)
        if len(calls) == 6:  # the linear layers of the shared expert, then w1 and w3
            raise RuntimeError("no memory")
        return real(cls, *args)

    monkeypatch.setattr(mf.QuantizedTensor, "from_tensor", classmethod(fails))
    with pytest.raises(RuntimeError, match="no memory"):
        mf.quantize_(model, "mxfp8", primary=True, keep_high_precision_init=True)
    assert len(calls) == 6
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}
    assert not weights_of(model)
    assert not hasattr(model[0].experts.w1, "get_high_precision_init_val")


# ---- several processes ---------------------------------------------------------------------------


def check_masters(rank, recipe):
    """Checks training of sharded masters against masters that one process casts whole."""
    world = dist.get_world_size()
    model, alone = moe(), moe()
    for each in (model, alone):
        mf.quantize_(each, recipe, primary=True, data_parallel_rank=0)
    weights, whole = list(weights_of(model).values()), list(weights_of(alone).values())
    masters = [w.dequantize() for w in whole]
    layout = mf.distributed.WireLayout.of(weights, world)
    shards = layout.shards(rank)
    flat = [m.flatten()[begin:end].clone() for m, (begin, end) in zip(masters, shards)]
    shard_codes = layout.new_piece(flat[0])
    fragments = layout.fragments(shard_codes, rank)
    for step in range(3):
        got, want = model(tokens(step)), alone(tokens(step))
        assert torch.equal(got, want), (recipe, step)
        got.square().sum().backward()
        want.square().sum().backward()
        for master, (begin, end), p in zip(flat, shards, weights):
            master -= 0.01 * p.grad.flatten()[begin:end]
        for i, p in enumerate(whole):
            masters[i] = masters[i] - 0.01 * p.grad
            p.data.copy_(masters[i])
        starts = [begin for begin, _ in shards]
        mf.distributed.quantize_master_weights(weights, flat, starts, None, fragments)
        layout.gather(shard_codes, weights, dist.group.WORLD)
        mf.distributed.post_all_gather_processing(weights)
        for p, q in zip(weights, whole):
            require_same_weight(p, q, (recipe, step))
        model.zero_grad()
        alone.zero_grad()


def check_fsdp(rank):
    """Checks that FSDP2 shards the values of codes, and that layers then cast those."""
    model, values = moe(shared=0), moe(shared=0)
    mf.quantize_(model, "mxfp8", primary=True, data_parallel_rank=0)
    with torch.no_grad():
        for name, p in values.named_parameters():
            p.copy_(model.get_parameter(name))
    mf.quantize_(values, "mxfp8", data_parallel_rank=0)
    for each in (model, values):
        fully_shard(each[0])
        fully_shard(each)
    assert not weights_of(model)
    assert torch.equal(model(tokens()), values(tokens()))


def check_all(rank):
    for recipe in ("fp8_rowwise", "mxfp8_2d", "nvfp4"):
        check_masters(rank, recipe)
    check_fsdp(rank)


def test_sharded_masters_and_fsdp2():
    run_world(3, check_all)
