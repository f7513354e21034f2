"""ColumnParallelLinear and RowParallelLinear over ranks: one process's bytes, Megatron's places."""

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support import megatron_models as models
from tests.support.collectives import Begun, Sent
from tests.support.exact_sums import integers
from tests.support.parallel_layers import Recorded, assert_close, check_operands
from tests.support.whole_layers import Case
from tests.support.worlds import device_of, run_world

pytest.importorskip("megatron.core")

RECIPES = [name for name in mf.presets() if name != "bf16"]


def build_layer(dim, w, b=None, sequence_parallel=False, **options):
    """Returns Megatron's layer with this rank's shard of W along `dim`, in a module."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    n, k = w.shape
    of = models.config(
        bf16=w.dtype == torch.bfloat16,
        params_dtype=w.dtype,
        sequence_parallel=sequence_parallel,
        **options.pop("config", {}),
    )
    own = {"gather_output": False} if dim == 0 else {"input_is_parallel": True}
    given = {"init_method": nn.init.zeros_, "skip_bias_add": False} | own | options
    make = ColumnParallelLinear if dim == 0 else RowParallelLinear
    layer = make(k, n, config=of, bias=b is not None, **given)
    world, rank = layer.tp_group.size(), layer.tp_group.rank()
    with torch.no_grad():
        layer.weight.copy_(w.chunk(world, dim)[rank])
        if b is not None:
            layer.bias.copy_(b.chunk(world)[rank] if dim == 0 else b)
    return nn.ModuleDict({"layer": layer})


def gathered(t, dim):
    """Returns the tensors of all ranks, joined along `dim`."""
    found = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(found, t.contiguous())
    return torch.cat(found, dim)


def summed(t):
    total = t.clone()
    dist.all_reduce(total)
    return total


def run_layer(case, dim, is_cut, options):
    """Returns whole y, dx, dW and db, and the layer. is_cut: ranks cut tokens, along dimension 0.

    The first two are whole on this rank, or are put together from all ranks' parts.
    """
    model = build_layer(dim, case.w.detach(), case.b.detach(), is_cut)
    mf.quantize_(model, case.recipe, **options)
    layer = model["layer"]
    state = {name: value for name, value in case.state().items() if value is not None}
    layer.op_state = lambda device: dict(state)
    world, rank = layer.tp_group.size(), layer.tp_group.rank()
    x, g = case.x.detach(), case.g
    if is_cut and dim == 0:
        x = x.chunk(world)[rank]
    if dim == 1:
        x = x.chunk(world, -1)[rank]
    if dim == 0:
        g = g.chunk(world, -1)[rank]
    elif is_cut:
        g = g.chunk(world)[rank]
    x = x.contiguous().requires_grad_()
    y, _ = layer(x)
    dx, dw, db = torch.autograd.grad(y, (x, layer.weight, layer.bias), g.contiguous())
    y = y.detach()
    if dim == 0:
        y, db, dx = gathered(y, -1), gathered(db, 0), gathered(dx, 0) if is_cut else dx
    else:
        y, db, dx = (gathered(y, 0), summed(db), gathered(dx, -1)) if is_cut else (
            y, db, gathered(dx, -1)
        )  # fmt: skip
    return [y, dx, gathered(dw, dim), db], state.get("amax_history")


def check_layers(rank, recipes, kind="cpu", compare=assert_close):
    """Checks all recipes, both layers, with and without sequence parallelism.

    compare: called as compare(got, want, case, ranks, where) for y, dx, dW, db.
    """
    world = dist.get_world_size()
    models.begin(tp=world, kind=kind)
    for recipe in recipes:
        case = Case(recipe, device=device_of(rank, kind))
        want, history = case.alone()
        for dim, is_cut in ((0, False), (0, True), (1, False), (1, True)):
            if is_cut and case.x.shape[0] % world:
                continue
            where = (recipe, dim, is_cut, world)
            with Recorded() as recorded:
                got, own_history = run_layer(case, dim, is_cut, {})
            check_operands(case, recorded, dim, rank, world, where)
            compare(got, want, case, world, where)
            if history is not None:
                assert torch.equal(own_history, history), where


@pytest.mark.parametrize(
    ("world", "recipes"), [(2, RECIPES), (4, ["fp8_delayed", "fp8_blockwise", "mxfp8", "nvfp4"])]
)
def test_layer_is_one_process(world, recipes):
    run_world(world, check_layers, recipes)


# ---- what is sent --------------------------------------------------------------------------------


def check_gathers(rank):
    """Checks that codes are gathered, and values where a run of tokens ends inside a block."""
    models.begin(tp=2)
    w = integers(2, 64, 128)
    for recipe, tokens, bits in (
        ("mxfp8", 32, [8.25, 8.25]),
        ("nvfp4", 32, [4.5, 4.5]),
        ("fp8_tensorwise", 32, [8, 8]),
        ("mxfp8", 24, []),  # Megatron's gather of values is no functional collective
    ):
        model = build_layer(0, w, sequence_parallel=True)
        mf.quantize_(model, recipe)
        x = integers(3, 2 * tokens, 1, 128)
        mine = x.chunk(2)[rank].clone().requires_grad_()
        with Sent() as sent:
            y, _ = model["layer"](mine)
            y.sum().backward()
        assert [8 * size / mine.numel() for size in sent.sizes] == bits, (recipe, tokens)
        alone = mf.Linear(128, 64, bias=False, recipe=recipe, name="layer")
        alone.weight.data.copy_(w)
        assert torch.equal(gathered(y.detach(), -1), alone(x).detach()), (recipe, tokens)


def check_overlap(rank):
    """Checks that the sum of dx over the ranks runs beside wgrad's product."""
    models.begin(tp=2)
    model = build_layer(0, integers(2, 64, 128))
    mf.quantize_(model, "mxfp8")
    y, _ = model["layer"](integers(3, 32, 1, 128).requires_grad_())
    reduce, wait, product = "all_reduce", "wait_tensor", "scaled_mm"
    with Begun(reduce, wait, product) as begun:
        y.sum().backward()
    assert begun.names == [product, reduce, product, wait]


def check_places(rank):
    """Checks gather_output, input_is_parallel=False, bias that the caller adds, experts' layers."""
    models.begin(tp=2)
    w, b, x = integers(2, 64, 128), integers(3, 64), integers(4, 32, 2, 128)
    alone = mf.Linear(128, 64, recipe="mxfp8", name="layer")
    alone.weight.data.copy_(w)
    alone.bias.data.copy_(b)
    want, plain = alone(x).detach(), torch.nn.functional.linear(x, w)

    model = build_layer(0, w, b, gather_output=True)
    mf.quantize_(model, "mxfp8", keep="nothing")
    assert torch.equal(model["layer"](x)[0], want)
    model = build_layer(1, w, b, input_is_parallel=False)
    mf.quantize_(model, "mxfp8")
    assert torch.equal(model["layer"](x)[0], want)
    model = build_layer(0, w, b, skip_bias_add=True)
    mf.quantize_(model, "mxfp8")
    y, bias = model["layer"](x)
    assert torch.equal(gathered(y.detach(), -1), plain)
    assert torch.equal(gathered(bias.detach(), 0), b)
    # The dispatcher of experts sums over the ranks: their layers do not.
    for dim in (0, 1):
        model = build_layer(dim, w, is_expert=True, skip_bias_add=True)
        mf.quantize_(model, "mxfp8")
        assert model["layer"].explicit_expert_comm
        mine = x if dim == 0 else x.chunk(2, -1)[rank].contiguous()
        mine = mine.clone().requires_grad_()
        y, _ = model["layer"](mine)
        y.sum().backward()
        whole = gathered(y.detach(), -1) if dim == 0 else summed(y.detach())
        assert torch.equal(whole, plain)
        ones = torch.ones(*x.shape[:-1], 64)
        dx = summed(mine.grad) if dim == 0 else gathered(mine.grad, -1)
        assert torch.equal(dx, ones @ w)


def check_seeds(rank):
    """Checks that tensor-parallel ranks share random bits, and data-parallel ranks do not."""
    groups = models.begin(tp=2)
    model = build_layer(0, integers(2, 64, 128))
    mf.quantize_(model, "nvfp4", seed=3)
    assert model["layer"].rng_state.rank == groups.get_data_parallel_rank()
    mine = model["layer"].rng_state.tensor[0].item()
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (groups.get_data_parallel_rank(), mine))
    assert len(set(every)) == dist.get_world_size() // 2
    x = integers(4, 32, 2, 128).requires_grad_()
    model["layer"](x)[0].sum().backward()
    mf.restore_(model)
    mf.quantize_(model, "nvfp4", data_parallel_rank=rank)
    with pytest.raises(ValueError, match="data_parallel_rank"):
        model["layer"](x)


def check_recipes(rank):
    """Checks that ranks that would wait for each other in a forward are refused before."""
    models.begin(tp=2)
    for recipes in (("mxfp8", "fp8_rowwise"), ("mxfp8", "*: mxfp8; decoder.layers.0.*: bf16")):
        model = models.build(models.config())
        with pytest.raises(ValueError, match=r"expected mf.quantize_ of the same layers"):
            mf.quantize_(model, recipes[rank])
        assert not any(hasattr(module, "recipe") for module in model.modules())


def check_two(rank):
    check_recipes(rank)
    check_gathers(rank)
    check_overlap(rank)
    check_places(rank)


def test_what_is_gathered_and_where_results_lie():
    run_world(2, check_two)


def test_ranks_of_other_tokens_draw_other_bits():
    run_world(4, check_seeds)
