"""Models under torch's parallel styles, alone and with FSDP2; what is gathered, what is refused."""

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat.distributed.tensor_parallel import QuantizedColwiseParallel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from tests.support.collectives import Begun, Sent
from tests.support.exact_sums import integers
from tests.support.parallel_models import (
    EXACT,
    INNER,
    PLANS,
    WIDTH,
    Block,
    built,
    check_models,
    train_step,
)
from tests.support.whole_layers import BATCH, TOKENS, values
from tests.support.worlds import run_world


@pytest.mark.parametrize(("world", "ranks"), [(2, 2), (4, 4), (4, 2)])
def test_model_is_one_process(world, ranks):
    """Checks tensor and sequence parallelism, alone and with FSDP2."""
    run_world(world, check_models, EXACT, ranks)


# ---- what is gathered, what is refused -----------------------------------------------------------


def check_payload(mesh):
    """Counts the bits an element that gathers send: x in forward, x for wgrad in backward."""
    for recipe, bits in (
        ("fp8_tensorwise", [8, 8]),
        ("fp8_delayed", [8, 8]),
        ("fp8_blockwise", [8.25, 8.25]),
        ("fp8_rowwise", [8 + 64 / WIDTH, 8]),  # a row's scale with its amax
        ("mxfp8", [8.25, 8.25]),
        ("mxfp4", [4.25, 4.25]),
        ("nvfp4", [4.5, 4.5]),
    ):
        layer = nn.Sequential(nn.Linear(WIDTH, INNER))
        mf.quantize_(layer, recipe, data_parallel_rank=0)
        style = QuantizedColwiseParallel(input_layouts=Shard(1), use_local_output=False)
        parallelize_module(layer, mesh, {"0": style})
        x = values(mesh.get_local_rank(), BATCH, TOKENS, WIDTH).requires_grad_()
        with Sent() as sent:
            layer(x).to_local().sum().backward()
        assert [8 * size / x.numel() for size in sent.sizes] == bits, recipe


def check_overlap(mesh):
    """Checks that backward gathers x beside dgrad's product, and sums dx beside wgrad's."""
    layer = nn.Sequential(nn.Linear(WIDTH, INNER))
    mf.quantize_(layer, "mxfp8", data_parallel_rank=0)
    style = QuantizedColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    parallelize_module(layer, mesh, {"0": style})
    x = values(mesh.get_local_rank(), BATCH, TOKENS, WIDTH).requires_grad_()
    y = layer(x).to_local()
    gather, scatter, wait = "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"
    product = "scaled_mm"
    with Begun(gather, scatter, wait, product) as begun:
        y.sum().backward()
    assert begun.names == [gather, product, scatter, wait, product, wait]


class Projections(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()
        self.wq, self.wk, self.wv = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        return self.wq(x) + self.wk(x) * 2 + self.wv(x) * 4


class Recomputed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def check_shared_input(mesh):
    """Checks q, k and v: a gather in forward, one in backward, and the results of one process."""
    x, mine = integers(10, BATCH, TOKENS, WIDTH), mesh.get_local_rank()
    for is_frozen in (False, True):
        models = [Projections(), Projections()]
        for model in models:
            for i, parameter in enumerate(model.parameters()):
                parameter.data.copy_(integers(i, *parameter.shape))
            model.wk.weight.requires_grad_(not is_frozen)
            mf.quantize_(model, "mxfp8")
        alone, model = models
        y, dx = train_step(alone, x, torch.ones(()))
        style = QuantizedColwiseParallel(input_layouts=Shard(1))
        plan = {"norm": SequenceParallel(), **dict.fromkeys(("wq", "wk", "wv"), style)}
        parallelize_module(model, mesh, plan)
        with Sent() as sent:
            got, got_dx = train_step(model, x.chunk(2, 1)[mine], torch.ones(()))
        assert is_frozen or len(sent.sizes) == 2, sent.sizes
        assert torch.equal(got, y.chunk(2, -1)[mine])
        assert torch.equal(got_dx, dx.chunk(2, 1)[mine])
        for a, b in zip(model.parameters(), alone.parameters()):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.equal(a.grad.full_tensor(), b.grad)


def check_group(mesh):
    """Checks that linear_group of DTensors has the results of linear_group of whole tensors."""
    x, ws = integers(1, 32, 64), [integers(i, 64, 64) for i in (2, 3)]
    dx, dws = (
        distribute_tensor(x, mesh, [Replicate()]),
        [distribute_tensor(w, mesh, [Shard(0)]) for w in ws],
    )
    for a, b in zip(mf.functional.linear_group(dx, dws), mf.functional.linear_group(x, ws)):
        assert torch.equal(a.full_tensor(), b)


def check_tokens_that_do_not_fit(mesh):
    """Checks tokens that end inside a block: they are gathered in high precision.

    The outputs equal those of one process. A rank's product has fewer columns, so it may sum in
    another order: the sums are exact (integers).
    """
    x, w = integers(1, 3, 20, 64), integers(2, 64, 64)
    for recipe in ("fp8_tensorwise", "mxfp8"):
        y = mf.linear(
            distribute_tensor(x, mesh, [Shard(1)]).requires_grad_(),
            distribute_tensor(w, mesh, [Shard(0)]).requires_grad_(),
            recipe=recipe,
        )
        assert torch.equal(y.full_tensor(), mf.linear(x, w, recipe=recipe)), recipe


def check_refusals(rank, mesh):
    whole = mesh.size()

    def parts(n, k, dim):
        w = distribute_tensor(values(2, n, k), mesh, [Shard(dim)])
        return distribute_tensor(values(1, 32, k), mesh, [Replicate()]), w

    for recipe, (n, k, dim), words in (
        (
            "mxfp8",
            (48 * whole, 64, 0),
            f"N / ranks as a multiple of 32 for g/dgrad in mxfp8, got N = {48 * whole}",
        ),
        (
            "fp8_blockwise",
            (256, 64 * whole, 1),
            "K / ranks as a multiple of 128 for x/fprop in e4m3/1x128",
        ),
        (
            "fprop=bf16*e4m3/row+sr dgrad=bf16*bf16 wgrad=bf16*bf16",
            (64, 24 * whole, 1),
            "multiple of 16 for w/fprop",
        ),
        (
            "fp8_tensorwise",
            (whole + 1, 64, 0),
            f"N as a multiple of the ranks, got N = {whole + 1}",
        ),
    ):
        x, w = parts(n, k, dim)
        with pytest.raises(ValueError, match=words):
            mf.linear(x, w, recipe=recipe, rng=torch.tensor([1, 2]))
    x, w = parts(64, 64, 0)
    for recipe, missing in (("nvfp4", "rng"), ("fp8_delayed", "amax_history")):
        with pytest.raises(ValueError, match=f"needs {missing}"):
            mf.linear(x, w, recipe=recipe)
    with pytest.raises(ValueError, match=r"got \(64, 32\) for \(32, 64\)"):
        mf.linear(x, parts(64, 32, 0)[1], recipe="mxfp8")
    with pytest.raises(ValueError, match="expected x as a DTensor over the weight's"):
        mf.linear(x.to_local(), w, recipe="mxfp8")

    layer = nn.Sequential(nn.Linear(64, 64))
    mf.quantize_(layer, "nvfp4")  # seeds differ by rank
    parallelize_module(layer, mesh, {"0": ColwiseParallel()})
    with pytest.raises(ValueError, match="data_parallel_rank"):
        layer(values(1, 32, 64))


def check_delayed(mesh):
    """Checks that amax histories roll as those of one process.

    The amaxes are of x, the weights and the loss's gradient, which are integers, and of the results
    of two products of those: up's forward and down's dgrad. Their sums are exact.
    """
    x, weights = integers(1, BATCH, TOKENS, WIDTH), integers(2, BATCH, TOKENS, WIDTH)
    alone = built("fp8_delayed")
    model = parallelize_module(built("fp8_delayed")[0], mesh, PLANS["tensor"])
    mf.step(model)  # before any forward
    mf.step(alone)
    for _ in range(2):
        train_step(alone, x, weights), train_step(model, x, weights)
        mf.step(alone), mf.step(model)
    for name in ("up", "down"):
        history = getattr(model, name).amax_history
        assert type(history) is torch.Tensor
        want = getattr(alone[0], name).amax_history
        assert (want[:, 0] > 0).all()
        assert torch.equal(history, want), name


def check_recomputed(mesh):
    """Checks activation checkpointing and a state dict that is loaded again: nothing changes."""
    x, weights = integers(10, BATCH, TOKENS, WIDTH), integers(11, BATCH, TOKENS, WIDTH)
    own = x.chunk(2, 1)[mesh.get_local_rank()]
    alone = built("mxfp4")
    train_step(alone, x, weights)
    model = built("mxfp4")
    parallelize_module(model[0], mesh, PLANS["quantized"])
    model.load_state_dict(model.state_dict())
    own_weights = weights.chunk(2, 1)[mesh.get_local_rank()]
    block = model[0]
    model[0] = Recomputed(block)
    train_step(model, own, own_weights)
    for p, q in zip(block.parameters(), alone.parameters()):
        assert torch.equal(p.grad.full_tensor(), q.grad)


def check_converted_late(mesh):
    """Checks mf.quantize_ after parallelize_module."""
    torch.manual_seed(0)
    x = integers(10, BATCH, TOKENS, WIDTH)
    late = nn.Sequential(Block())
    with torch.no_grad():
        for i, parameter in enumerate(late.parameters()):
            parameter.copy_(integers(i, *parameter.shape))
    parallelize_module(late[0], mesh, PLANS["tensor"])
    mf.quantize_(late, "mxfp8")
    assert torch.equal(late(x), built("mxfp8")(x))


def check_layers_left_out(mesh):
    """Checks the style on layers that a map leaves out: they gather x's values, in any order.

    mf.quantize_ runs before or after parallelize_module; mf.restore_ leaves all layers out.
    """
    x, mine = integers(10, BATCH, TOKENS, WIDTH), mesh.get_local_rank()
    for recipe in ("*: mxfp8; wk: bf16", "*: bf16; wk: mxfp8", ""):
        for batch in (1, BATCH):
            models = [Projections() for _ in range(3)]
            for model in models:
                for i, parameter in enumerate(model.parameters()):
                    parameter.data.copy_(integers(i, *parameter.shape))
            alone, early, late = models
            style = QuantizedColwiseParallel(input_layouts=Shard(1))
            plan = {"norm": SequenceParallel(), **dict.fromkeys(("wq", "wk", "wv"), style)}
            parallelize_module(late, mesh, plan)
            for model in models:
                mf.quantize_(model, recipe or "mxfp8")
                _ = recipe or mf.restore_(model)
            parallelize_module(early, mesh, plan)
            y, dx = train_step(alone, x[:batch], torch.ones(()))
            for model in (early, late):
                got, got_dx = train_step(model, x[:batch].chunk(2, 1)[mine], torch.ones(()))
                assert torch.equal(got, y.chunk(2, -1)[mine]), recipe
                assert torch.equal(got_dx, dx.chunk(2, 1)[mine]), recipe
                for a, b in zip(model.parameters(), alone.parameters()):
                    assert torch.equal(a.grad.full_tensor(), b.grad), recipe


def check_others(rank):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    check_payload(mesh)
    check_overlap(mesh)
    check_shared_input(mesh)
    check_group(mesh)
    check_tokens_that_do_not_fit(mesh)
    check_refusals(rank, mesh)
    check_delayed(mesh)
    check_recomputed(mesh)
    check_converted_late(mesh)
    check_layers_left_out(mesh)


def test_what_is_gathered_and_refused():
    run_world(2, check_others)
