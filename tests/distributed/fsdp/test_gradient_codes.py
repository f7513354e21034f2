"""FSDP2's gradients on the wire in codes: the sums, their random bits, bytes, and refusals.

The oracle has one process: it casts what each rank gave to its reduce-scatter by the op `quantize`,
as a matrix with a row a destination, and adds up the values of all ranks in their order.
"""

import minifloat as mf
import pytest
import torch
import torch.distributed as dist
from minifloat._native import ops
from minifloat.distributed.fsdp.gradients import ReduceScatterOfCodes, sharded_modules
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from tests.support.same_bits import require_same
from tests.support.sharded_models import Model, batch, sharded, train, whole
from tests.support.worlds import device_of, last_words, run_world

SPECS = ["e4m3/1x128+sr", "e4m3/1x128", "mxfp8+sr", "mxfp8/e5m2", "mxfp4+sr", "bf16"]
SEED = 5
REDUCED = {  # name -> FSDP2's policy
    "float32": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    "bfloat16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
}


class Odd(nn.Module):
    """Chunks of other lengths than whole blocks; of 4 ranks one has no row of the first weight."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(7, 3), nn.Linear(3, 131, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Spied:
    """Records (name, input, output) of each reduce-scatter, and the bytes that all-to-alls send."""

    def __init__(self, monkeypatch):
        self.calls, self.bytes = [], 0
        reduce, exchange = ReduceScatterOfCodes.__call__, dist.all_to_all_single

        def reduced(comm, output_tensor, input_tensor, *args, **kwargs):
            sent = input_tensor.clone().cpu()
            reduce(comm, output_tensor, input_tensor, *args, **kwargs)
            self.calls.append((comm.name, sent, output_tensor.clone().cpu()))

        def exchanged(output, sent, *args, **kwargs):
            self.bytes += sent.nbytes
            return exchange(output, sent, *args, **kwargs)

        def refused(*args, **kwargs):
            raise AssertionError("a reduce-scatter of torch's ran")

        monkeypatch.setattr(ReduceScatterOfCodes, "__call__", reduced)
        monkeypatch.setattr(dist, "all_to_all_single", exchanged)
        monkeypatch.setattr(dist, "reduce_scatter_tensor", refused)


def values_sent(chunks, spec, rank, count, name):
    """Returns the values of one rank's messages: (world, cols) float32."""
    if spec == "bf16":
        return chunks.bfloat16().float()
    rng = torch.tensor([ops.mix_seed(SEED, rank), count])
    stream = ops.stream(f"{name}.gradients" if name else "gradients")
    codes, scale, amax, *_ = ops.quantize(chunks, spec, "", rng=rng, stream_row=stream)
    return ops.dequantize(codes, scale, amax, spec, chunks.shape[1])


def of_all_ranks(sent, device):
    every = [torch.empty_like(sent, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(every, sent.to(device))
    return [t.cpu() for t in every]


def check_calls(calls, spec, count, device, members, where):
    """Checks each output against the oracle. members: the ranks that shard, in order."""
    for name, sent, output in calls:
        total, mine = None, members.index(dist.get_rank())
        for rank, of_rank in enumerate(of_all_ranks(sent, device)):
            if rank in members:
                chunks = of_rank.view(len(members), -1)
                values = values_sent(chunks, spec, rank, count, name)[mine]
                total = values if total is None else total + values
        require_same(output, total.to(output.dtype), f"{where}: {name!r}")


def check_gradients(model, calls, divisor, where):
    """Checks that .grad is the output over the number of ranks. Not under HSDP."""
    outputs = {name: output for name, _, output in calls}
    world = dist.get_world_size()
    for name, _, group in sharded_modules(model):
        begin = 0
        for p in (p.sharded_param for p in group.fsdp_params):
            got = p.grad.to_local().cpu().flatten()
            want = outputs[name][begin : begin + got.numel()] / divisor
            require_same(got, want.to(got.dtype), f"{where}: gradients of {name!r}")
            begin += -(-p.shape[0] // world) * p.shape[1:].numel()


def check_sums(rank, kind="cpu", specs=SPECS):
    """Compares two steps of models with whole and odd chunks, the second of two micro-batches."""
    device, world = device_of(rank, kind), dist.get_world_size()
    for spec in specs:
        for reduced, policy in REDUCED.items():
            for build, width in ((Model, 48), (Odd, 7)):
                with pytest.MonkeyPatch.context() as patch:
                    where = f"{spec} reduced in {reduced}, {build.__name__}, {world} ranks"
                    torch.manual_seed(0)
                    model = build().to(device)
                    blocks = list(model.blocks) if build is Model else [model.up]
                    for module in (*blocks, model):
                        fully_shard(module, mp_policy=policy)
                    mf.distributed.quantize_gradients_(model, spec, seed=SEED)
                    spied = Spied(patch)
                    for step, micro_batches in ((1, 1), (2, 2)):
                        spied.calls.clear()
                        model.zero_grad()
                        for i in range(micro_batches):
                            model.set_requires_gradient_sync(i == micro_batches - 1)
                            x = batch(10 * step + i, rank)[:, :width].to(device)
                            (model(x).square().mean() * 100).backward()
                        assert len(spied.calls) == len(blocks) + 1, where
                        check_calls(spied.calls, spec, step, device, [*range(world)], where)
                        check_gradients(model, spied.calls, world, where)


@pytest.mark.parametrize("world", [2, 4])
def test_sums_are_those_of_one_process(world):
    run_world(world, check_sums)


def check_hybrid(rank, kind="cpu"):
    """Two replicas of two shards: sums of shards in order, then torch's all-reduce."""
    device = device_of(rank, kind)
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = sharded(Model().to(device), mesh=mesh)
    mf.distributed.quantize_gradients_(model, seed=SEED)
    members = mesh["shard"].mesh.tolist()
    with pytest.MonkeyPatch.context() as patch:
        spied = Spied(patch)
        model(batch(0, rank).to(device)).square().mean().backward()
        check_calls(spied.calls, "e4m3/1x128+sr", 1, device, members, "two replicas")
        of_head = next(output for name, _, output in spied.calls if name == "").to(device)
    dist.all_reduce(of_head, group=mesh["replicate"].get_group())
    got = model.head.weight.grad.to_local().flatten()
    require_same(got, of_head[: got.numel()] / 4, "two replicas: head")


def test_hybrid_sharding_keeps_its_all_reduce():
    run_world(4, check_hybrid)


def check_bytes(rank, kind="cpu"):
    """Counts the bytes of a layer of 1024 x 4096 beside two bytes an element."""
    device = device_of(rank, kind)
    for spec, most in (("e4m3/1x128+sr", 0.516), ("mxfp4+sr", 0.266), ("bf16", 1.0)):
        model = fully_shard(nn.Linear(1024, 4096).to(device))
        mf.distributed.quantize_gradients_(model, spec)
        with pytest.MonkeyPatch.context() as patch:
            spied = Spied(patch)
            model(torch.ones(1, 1024, device=device)).sum().backward()
            elements = spied.calls[0][1].numel()
            assert 0 < spied.bytes <= most * 2 * elements, (spec, spied.bytes / (2 * elements))


def test_bytes_on_the_wire():
    run_world(2, check_bytes)


def grown(spec, device, steps):
    """Returns the losses of a training; None: gradients are torch's."""
    torch.manual_seed(0)
    model = sharded(Model().to(device))
    if spec is not None:
        mf.distributed.quantize_gradients_(model, spec, seed=SEED)
    return train(model, steps)


def check_training(rank, kind="cpu"):
    """Compares the mean loss of ten steps with that of torch's reduce-scatter in float32.

    The wire's rounding is unbiased, and at most 2^-4 of an element. A sum over thousands of
    elements, as a step's change of the loss is, has a small part of that.
    """
    device = device_of(rank, kind)
    exact = grown(None, device, 30)
    want = sum(exact[-10:])
    assert want / 10 < 0.5 * exact[0]
    for spec in ("e4m3/1x128+sr", "bf16"):
        got = sum(grown(spec, device, 30)[-10:])
        assert abs(got - want) <= 0.02 * want, (spec, got, want)


def test_training_reaches_the_loss_of_exact_sums():
    run_world(2, check_training)


def check_resume(rank):
    """A job that goes on from a checkpoint has the weights of one that did not stop."""
    torch.manual_seed(0)
    model = sharded(Model())
    mf.distributed.quantize_gradients_(model, seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    saved = None
    for step in range(4):
        if step == 2:
            saved = mf.training_state(model), {k: v.clone() for k, v in model.state_dict().items()}
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    state, weights = saved
    assert state["gradients.rng"].tolist() == [SEED, 2]
    resumed = sharded(Model())
    mf.distributed.quantize_gradients_(resumed, seed=SEED + 1)  # the loaded seed replaces it
    resumed.load_state_dict(weights)
    mf.load_training_state(resumed, state)
    optimizer = torch.optim.SGD(resumed.parameters(), lr=0.1)
    for step in (2, 3):
        resumed(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    got, want = whole(resumed), whole(model)
    for name in want:
        require_same(got[name], want[name], f"resumed: {name}")


def test_resume_is_exact():
    run_world(2, check_resume)


def check_order(rank):
    """Reduces the gradients of modules in two orders, and looks at what differs between draws."""
    sums = []
    for order in ([0, 1, 2], [2, 0, 1]):
        model = sharded(Model())
        mf.distributed.quantize_gradients_(model, seed=SEED)
        comms = [group._reduce_scatter_comm for _, _, group in sharded_modules(model)]
        found = {}
        for step in range(2):
            for i in order:
                given, out = torch.linspace(0.1, 1.0, 2 * 300), torch.empty(300)
                comms[i](out, given, dist.group.WORLD, dist.ReduceOp.SUM)
                found[step, i] = out
        sums.append(found)
    assert all(torch.equal(sums[0][key], sums[1][key]) for key in sums[0])
    every = list(sums[0].values())  # of steps and modules, from one input
    assert not any(torch.equal(a, b) for i, a in enumerate(every) for b in every[:i])


def test_sums_do_not_depend_on_the_order_of_modules():
    run_world(2, check_order)


@pytest.mark.parametrize("spec", ["e4m3/1x128+sr", "mxfp8+sr", "mxfp4+sr"])
def test_the_mean_over_many_draws_is_the_value(spec):
    """A draw is one of the value's two neighbours, so its deviation is at most half their distance.

    That is 2^-4 of the value under E4M3. Under E2M1 it is 2^-2 of the value, or a quarter of the
    scale, which is at most a third of the block's largest value.
    """
    x = torch.randn(1, 512, generator=torch.Generator().manual_seed(0))
    draws, total = 2000, torch.zeros(512, dtype=torch.float64)
    out = torch.empty(512)
    for count in range(draws):
        rng = torch.tensor([1, count])
        ops.sum_messages(ops.quantize_messages(x, spec, rng=rng, stream=2), spec, out)
        total += out
    step, least = (2.0**-2, x.abs().max() / 3) if "mxfp4" in spec else (2.0**-4, 2.0**-4)
    limit = 5 * step * x.abs().clamp(min=float(least)).double() / draws**0.5
    error = (total / draws - x[0]).abs()
    assert (error <= limit[0]).all(), (error / limit[0]).max()


def check_not_finite(rank, kind="cpu"):
    """A NaN or Inf of one rank's gradient is NaN in its block, and nowhere else."""
    device = device_of(rank, kind)
    model = sharded(Model().to(device))
    for spec, at in (("e4m3/1x128+sr", slice(128, 256)), ("bf16", slice(200, 201))):
        mf.distributed.quantize_gradients_(model, spec)
        comm = model._get_fsdp_state()._fsdp_param_group._reduce_scatter_comm
        for bad in (float("nan"), float("inf")):
            given, out = torch.ones(2 * 300, device=device), torch.empty(300, device=device)
            given[200] = bad if rank == 1 else 1.0
            comm(out, given, dist.group.WORLD, dist.ReduceOp.SUM)
            want = torch.full((300,), 2.0)
            if rank == 0:  # the chunk that has the element
                want[at] = float("nan") if spec != "bf16" else bad
            assert torch.equal(out.cpu().nan_to_num(7.0, 8.0), want.nan_to_num(7.0, 8.0)), spec


def test_what_is_not_finite_stays_visible():
    run_world(2, check_not_finite)


# ---- Refusals ------------------------------------------------------------------------------------


class Other:
    """A reduce-scatter of somebody else's."""


def check_refusals(rank):
    model = sharded(Model())
    wrong = ["e4m3/tensor", "e4m3/row", "e4m3/128x128", "mxfp8/32x32", "nvfp4", "mxfp4+rht"]
    for spec in (*wrong, "e4m3/tensor+delayed"):
        with pytest.raises(
            ValueError, match="messages: expected .*got " + spec.replace("+", r"\+")
        ):
            mf.distributed.quantize_gradients_(model, spec)
    for unsharded in (Model(), nn.parallel.DistributedDataParallel(Model())):
        with pytest.raises(ValueError, match="got Model without a sharded module"):
            mf.distributed.quantize_gradients_(unsharded)
    with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module, got str$"):
        mf.distributed.quantize_gradients_("model")
    half = sharded(Model(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    with pytest.raises(ValueError, match=r"got torch\.float16 in 'the model'"):
        mf.distributed.quantize_gradients_(half)
    custom = sharded(Model())
    custom.blocks[1].set_custom_reduce_scatter(Other())
    with pytest.raises(ValueError, match=r"in 'blocks\.1', got Other"):
        mf.distributed.quantize_gradients_(custom)
    of_group = sharded(Model())
    of_group.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(ValueError, match="in 'the model', got ProcessGroupAllocReduceScatter"):
        mf.distributed.quantize_gradients_(of_group)
    with pytest.raises(ValueError, match="got replicate"):
        mf.distributed.quantize_gradients_(replicate(Model(), mesh=init_device_mesh("cpu", (2,))))
    for refused in (model, half, custom):
        for _, _, group in sharded_modules(refused):
            assert not isinstance(group._reduce_scatter_comm, ReduceScatterOfCodes)
            assert not group.force_sum_reduction_for_comms
    later = Model()
    fully_shard(later.blocks[0])
    mf.distributed.quantize_gradients_(later)
    fully_shard(later)
    with pytest.raises(ValueError, match="got 'the model' sharded later"):
        later(batch(0)).sum().backward()


def check_arguments_of_one(rank):
    """What rank 1 alone passes is an error on both, at once, and changes nothing."""
    for wrong, match in (
        ({"model": None}, r"expected a torch\.nn\.Module, got NoneType \(ranks"),
        ({"model": Model()}, r"got Model without a sharded module; .* \(ranks"),
        ({"spec": "nvfp4"}, r"messages: expected .* got nvfp4 \(ranks"),
        ({"spec": 3}, r"got int \(ranks"),
        ({"seed": "x"}, r"seed: expected an int, got 'x' \(str\) \(ranks"),
        ({"seed": 2**70}, r"seed: expected an int from .* \(ranks"),
        (
            {"spec": "mxfp8"},
            r"alike, but rank 0 .* as e4m3/1x128\+sr from seed 0; rank 1 .* as mxfp8$",
        ),
        ({"seed": 1}, r"alike, but rank 0 .* as e4m3/1x128\+sr from seed 0; rank 1 .* from seed 1"),
    ):
        model = sharded(Model())
        right = {"model": model, "spec": "e4m3/1x128+sr", "seed": 0}
        with pytest.raises(ValueError, match=match):
            mf.distributed.quantize_gradients_(**right | (wrong if rank else {}))
        for _, _, group in sharded_modules(model):
            assert not isinstance(group._reduce_scatter_comm, ReduceScatterOfCodes)
        mf.distributed.quantize_gradients_(**right)
        model(batch(0)).sum().backward()
    model = sharded(Model())  # a seed matters where it is drawn from
    mf.distributed.quantize_gradients_(model, "e4m3/1x128", seed=rank)
    later = Model()
    for block in later.blocks[rank:]:
        fully_shard(block)
    with pytest.raises(
        ValueError,
        match=r"rank 0 has .*'blocks.0', 'blocks.1' as .*; rank 1 has .* of 'blocks.1' as",
    ):
        mf.distributed.quantize_gradients_(later)


def check_parallel(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel()})
    sharded(model, mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"parameters of 'blocks\.0' that tensor-parallel ranks"):
        mf.distributed.quantize_gradients_(model)
    mf.distributed.quantize_gradients_(model, "bf16")


def test_refusals():
    run_world(2, check_refusals)


def test_ranks_that_send_otherwise():
    run_world(2, check_arguments_of_one)


def send_on_one_rank(rank):
    model = sharded(Model())
    if rank == 0:
        mf.distributed.quantize_gradients_(model)
    model(batch(0)).sum().backward()


def send_twice_on_one_rank(rank):
    model = sharded(Model())
    for calls in (1, 2 - rank):
        for _ in range(calls):
            mf.distributed.quantize_gradients_(model)
        model(batch(0)).sum().backward()


@pytest.mark.parametrize("send", [send_on_one_rank, send_twice_on_one_rank])
def test_a_rank_that_does_not_send(send):
    first, _ = last_words(2, send, seconds=8)
    assert "expected all 2 ranks to call it, for the gradients of 'the model', 'blocks.0'" in first
    assert "ranks [1] have not arrived" in first


def test_blocks_would_span_what_tensor_parallel_ranks_share():
    run_world(4, check_parallel)


def check_twice(rank):
    """A second call replaces the first, with its own count."""
    model = sharded(Model())
    mf.distributed.quantize_gradients_(model, "e4m3/1x128+sr")
    model(batch(0, rank)).sum().backward()
    assert mf.training_state(model)["gradients.rng"].tolist() == [0, 1]
    mf.distributed.quantize_gradients_(model.blocks[0], "e4m3/1x128+sr")
    mf.distributed.quantize_gradients_(model, "mxfp8+sr", seed=3)
    (state,) = mf.training_state(model).values()  # also in place of a part's
    assert state.tolist() == [3, 0]
    mf.distributed.quantize_gradients_(model, "bf16")
    assert mf.training_state(model) == {}
    with pytest.MonkeyPatch.context() as patch:
        spied = Spied(patch)
        model(batch(0, rank)).sum().backward()
        check_calls(spied.calls, "bf16", 0, "cpu", [0, 1], "after bf16")


def check_options(rank, kind="cpu"):
    """Sums that are offloaded, and a division by another number than that of the ranks."""
    device = device_of(rank, kind)
    plain = sharded(Model().to(device))
    offloaded = sharded(Model(), offload_policy=CPUOffloadPolicy(pin_memory=kind == "cuda"))
    offloaded.load_state_dict({k: v.cpu() for k, v in plain.state_dict().items()})
    for model in (plain, offloaded):
        mf.distributed.quantize_gradients_(model, seed=SEED)
        model.set_gradient_divide_factor(3.0)
        with pytest.MonkeyPatch.context() as patch:
            spied = Spied(patch)
            model(batch(0, rank).to(device)).square().mean().backward()
            root = [call for call in spied.calls if call[0] == ""]
        head = model.head.weight.grad.to_local().flatten().cpu()
        want = root[0][2][: head.numel()].to(device) / 3.0  # a GPU multiplies by the reciprocal
        require_same(head, want.cpu(), "divided by 3")
    pairs = zip(plain.parameters(), offloaded.parameters(), strict=True)
    assert all(p.grad.to_local().cpu().equal(q.grad.to_local()) for p, q in pairs)


def test_offloaded_sums_and_a_divide_factor():
    run_world(2, check_options)


def check_factor(rank):
    """A module of one rank sends nothing, and its sum over replicas is divided once, too."""
    for shape in ((2,), (2, 1), (1, 2)):
        for spec in ("bf16", "mxfp8"):
            layer = nn.Linear(32, 1, bias=False)
            names = ("replicas", "shards")[-len(shape) :]
            fully_shard(layer, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
            mf.distributed.quantize_gradients_(layer, spec)
            for factor, want in ((None, 1.0), (8.0, 0.25)):
                if factor is not None:
                    layer.set_gradient_divide_factor(factor)
                layer.zero_grad()
                layer(torch.ones(1, 32)).sum().backward()
                gradient = layer.weight.grad.full_tensor()
                assert gradient.eq(want).all(), (shape, spec, factor, gradient[0, 0].item())


def test_a_divide_factor_on_meshes_with_dimensions_of_one():
    run_world(2, check_factor)


def test_a_second_call_replaces_the_first():
    run_world(2, check_twice)
